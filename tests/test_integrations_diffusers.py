"""The attention backend "kittens" of diffusers, and `enable` for its models that call torch, on tiny random models."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import dtype_of, normal
from torch import Tensor

import kittens_torch
from kittens_torch.integrations import diffusers as ours

os.environ.setdefault("HF_HUB_OFFLINE", "1")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: `make test` installs it")
dispatcher = pytest.importorskip("diffusers.models.attention_dispatch", reason="diffusers is older than its dispatcher")
names = dispatcher.AttentionBackendName
registry = dispatcher._AttentionBackendRegistry

pytestmark = pytest.mark.usefixtures("only_ours", "_native_afterwards", "torchs_attention_as_before")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture
def _native_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_attention_backend` also sets the backend of the whole process."""
    monkeypatch.setattr(registry, "_active_backend", names.NATIVE)


class Family(NamedTuple):
    """A tiny model, its inputs, and its number of attention calls."""

    model: str
    settings: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    calls: int
    # Its processors ask diffusers' dispatcher; those of the others call torch.
    dispatched: bool = True


HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
PADDED = torch.arange(7) < torch.tensor([[7], [4]])
FAMILIES = {
    "Flux": Family(
        "FluxTransformer2DModel",
        {**HEADS, "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
        | {"axes_dims_rope": [4, 4, 8], "joint_attention_dim": 32, "pooled_projection_dim": 32},
        lambda: {
            "hidden_states": normal(2, 16, 4),
            "encoder_hidden_states": normal(2, 7, 32),
            "pooled_projections": normal(2, 32),
            "timestep": torch.rand(2),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
            "txt_ids": torch.zeros(7, 3),
        },
        calls=2,
    ),
    "Wan": Family(
        "WanTransformer3DModel",
        {**HEADS, "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32}
        | {"ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
        lambda: {
            "hidden_states": normal(1, 4, 2, 8, 8),
            "encoder_hidden_states": normal(1, 12, 16),
            "timestep": torch.tensor([3]),
        },
        calls=4,
    ),
    "Qwen-Image": Family(
        "QwenImageTransformer2DModel",
        {**HEADS, "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16}
        | {"axes_dims_rope": (8, 4, 4)},
        lambda: {
            "hidden_states": normal(2, 16, 16),
            "encoder_hidden_states": normal(2, 7, 16),
            "encoder_hidden_states_mask": PADDED,
            "timestep": torch.rand(2),
            "img_shapes": [(1, 4, 4)] * 2,
            "txt_seq_lens": [7, 7],  # of older versions
        },
        calls=2,
    ),
    "Stable Diffusion 3": Family(
        "SD3Transformer2DModel",
        {**HEADS, "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
        | {"joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 64},
        lambda: {
            "hidden_states": normal(2, 4, 8, 8),
            "encoder_hidden_states": normal(2, 7, 32),
            "pooled_projections": normal(2, 64),
            "timestep": torch.tensor([3, 4]),
        },
        calls=2,
        dispatched=False,
    ),
    "Stable Diffusion": Family(
        "UNet2DConditionModel",
        {"sample_size": 16, "block_out_channels": (80, 160), "layers_per_block": 1, "attention_head_dim": 2}
        | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "norm_num_groups": 4}
        | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 16},
        lambda: {
            "sample": normal(2, 4, 16, 16),
            "encoder_hidden_states": normal(2, 7, 16),
            "timestep": torch.tensor(3),
        },
        calls=8,
        dispatched=False,
    ),
}  # fmt: skip
dispatched = pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.dispatched])
every_family = pytest.mark.parametrize("name", FAMILIES)


def build(name: str, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """The model with attention that matters, and its inputs."""
    family = FAMILIES[name]
    if not hasattr(diffusers, family.model):
        pytest.skip(f"diffusers {diffusers.__version__} has no {family.model}")
    torch.manual_seed(0)
    model = getattr(diffusers, family.model)(**family.settings).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 2 and any(part in parameter_name for part in ("to_q", "to_k", "add_q", "add_k")):
                parameter.mul_(4.0)
    dtype = dtype_of(device)

    def moved(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        return entry.to(device, dtype if entry.is_floating_point() else entry.dtype)

    known = inspect.signature(model.forward).parameters
    return model.to(device, dtype), {key: moved(entry) for key, entry in family.inputs().items() if key in known}


def run(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The output and the gradient of every weight, each scaled by the largest entry of its kind."""
    model.zero_grad()
    output = model(**inputs).sample
    output.float().square().sum().backward()
    gradients = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    largest = max(gradient.abs().max() for gradient in gradients)
    return [output.detach().float() / output.abs().max(), *(gradient / largest for gradient in gradients)]


def assert_same(mine: list[Tensor], torchs: list[Tensor], device: str) -> None:
    """Both add in other orders: float32 agrees to 1e-4 of the largest entry, bfloat16 to 3 % after the layers."""
    assert len(mine) == len(torchs)
    for ours_, its in zip(mine, torchs, strict=True):
        assert (ours_ - its).abs().max() <= (1e-4 if device == "cpu" else 3e-2)


# Numbers


@devices
@dispatched
def test_backend(name: str, device: str) -> None:
    model, inputs = build(name, device)
    expected = run(model, inputs)
    kittens_torch.set_fallback("error")
    model.set_attention_backend("kittens")
    with kittens_torch.report() as report:
        mine = run(model, inputs)
    assert_same(mine, expected, device)
    assert [call.function for call in report.calls] == ["scaled_dot_product_attention"] * FAMILIES[name].calls
    assert {call.plan.machine for call in report.calls} == {"cpu" if device == "cpu" else "sm90"}
    assert all("transformer_" in call.where for call in report.calls), "the model, not its dispatcher"
    model.set_attention_backend("native")
    assert all(map(torch.equal, run(model, inputs), expected)) or device != "cpu"  # torch's on the GPU vary


@devices
@every_family
def test_enabled(name: str, device: str, outcomes: list[Any]) -> None:
    model, inputs = build(name, device)
    expected = run(model, inputs)
    assert not outcomes
    kittens_torch.set_fallback("error")
    with kittens_torch.enabled():
        mine = run(model, inputs)
    assert_same(mine, expected, device)
    assert len(outcomes) == FAMILIES[name].calls or (device == "cuda" and name == "Qwen-Image")  # torch's efficient


@every_family
def test_attention_matters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above would see an attention that is off by a tenth of its scale."""
    model, inputs = build(name)
    expected = run(model, inputs)[0]
    torchs = F.scaled_dot_product_attention

    def wrong(query: Tensor, *operands: Tensor, **more: Any) -> Tensor:
        return torchs(query * 0.9, *operands, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    with torch.no_grad():
        output = model(**inputs).sample
    assert (output / output.abs().max() - expected).abs().max() > 1e-3


@pytest.mark.parametrize("mask", ["key padding", "per query", "additive"])
def test_masks(mask: str) -> None:
    kittens_torch.set_fallback("error")
    query, key, value = normal(2, 9, 3, 8), normal(2, 7, 3, 8), normal(2, 7, 3, 8)
    given = {"key padding": PADDED, "per query": normal(2, 1, 9, 7) > -1.0, "additive": normal(2, 3, 9, 7)}[mask]
    dense = given[:, None, None] if mask == "key padding" else given
    expected = F.scaled_dot_product_attention(*(operand.transpose(1, 2) for operand in (query, key, value)), dense)
    with dispatcher.attention_backend("kittens"):
        output = dispatcher.dispatch_attention_fn(query, key, value, attn_mask=given)
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_grouped_heads_scale_and_causal() -> None:
    query, key, value = normal(2, 9, 6, 8), normal(2, 9, 2, 8), normal(2, 9, 2, 8)
    settings: dict[str, Any] = {"is_causal": True, "scale": 0.7, "enable_gqa": True}
    expected = F.scaled_dot_product_attention(*(operand.transpose(1, 2) for operand in (query, key, value)), **settings)
    output = dispatcher.dispatch_attention_fn(query, key, value, backend="kittens", **settings)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert output.is_contiguous(), "the layout of the query: the model flattens the heads without a copy"


def test_compiled() -> None:
    torch._dynamo.reset()
    model, inputs = build("Flux")
    expected = model(**inputs).sample
    model.set_attention_backend("kittens")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).sample, expected, atol=1e-5, rtol=1e-4)


# What is refused


@pytest.mark.parametrize("argument", ["return_lse", "_parallel_config"])
def test_refused(argument: str) -> None:
    query = normal(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=argument if argument == "return_lse" else "context parallelism"):
        ours.attention_backend(query, query, query, **{argument: True})


def test_a_replaced_function_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's context parallelism does it."""
    query = normal(1, 3, 2, 8)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda **given: given["query"] + 1)
    assert torch.equal(ours.attention_backend(query, query, query), query + 1)


# Registration


def test_member() -> None:
    ours.register()
    ours.register()
    member = names("kittens")
    assert member is names.KITTENS is names["KITTENS"] is list(names)[-1]
    assert (member.name, member.value, str(member)) == (
        "KITTENS",
        "kittens",
        str(names.NATIVE).replace("NATIVE", "KITTENS"),
    )
    assert isinstance(member, names) and member == "kittens" and len(names) == len(set(names))
    assert copy.deepcopy(member) is member and pickle.loads(pickle.dumps(member)) is member
    assert registry._backends[member] is ours.attention_backend
    with pytest.raises(ValueError, match="must be one of"):
        build("Flux")[0].set_attention_backend("no such backend")


def test_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers, "__version__", "0.34.0")
    with pytest.raises(ImportError, match=r">= 0.35, found 0.34.0"):
        ours.register()
    ours.register_when_loaded()  # quietly
    monkeypatch.undo()
    monkeypatch.delattr(dispatcher, "_check_shape")
    with pytest.raises(ImportError, match=r"dispatcher of diffusers .* has changed.*_check_shape"):
        ours.register()


@pytest.mark.parametrize("state", ["not imported", "dispatcher loaded"])
def test_registered_by_importing(state: str) -> None:
    """In whatever order, and without an import that nobody asked for."""
    before = "import diffusers.models.attention_dispatch" if state == "dispatcher loaded" else ""
    program = f"""
import sys
{before}
import kittens_torch
assert ("diffusers" in sys.modules) == bool({before!r})
from diffusers.models.attention_dispatch import AttentionBackendName
AttentionBackendName("kittens")
assert not any(getattr(finder, "name", "").startswith("diffusers") for finder in sys.meta_path)
"""
    root = str(Path(kittens_torch.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )
    assert done.returncode == 0, done.stderr
