"""What `report` lists: every attention call, once, with what it ran on and why."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import inputs, leaves, normal
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import kittens_torch
from kittens_torch import dispatch, functional

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    monkeypatch.setattr(dispatch, "gpu_prefers_torch", lambda *operands: False)
    before = kittens_torch.set_fallback("silent")
    yield
    kittens_torch.set_fallback(before)
    assert not functional.watchers


def operands_of(device: str, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(device, torch.float32 if device == "cpu" else torch.bfloat16, **sizes)


def machines(report: kittens_torch.Report) -> list[str]:
    return [call.plan.machine for call in report.calls]


@devices
def test_own_functions(device: str) -> None:
    query, key, value = operands_of(device, heads=4, heads_k=2, length_k=90)
    machine = "cpu" if device == "cpu" else "sm90"
    with kittens_torch.report() as report:
        outputs = [
            kittens_torch.scaled_dot_product_attention(query, key, value, enable_gqa=True),
            kittens_torch.attention(query, key, value, window=(5, 0)),
            kittens_torch.scaled_dot_product_attention(query, key, value, query.new_zeros(64, 90), enable_gqa=True),
        ]
    kittens_torch.attention(query, key, value)  # not watched
    assert [call.function for call in report.calls] == [
        "scaled_dot_product_attention",
        "attention",
        "scaled_dot_product_attention",
    ]
    assert machines(report) == [machine] * 3
    first = report.calls[0]
    assert (first.query, first.key, first.value) == ((1, 4, 64, 64), (1, 2, 90, 64), (1, 2, 90, 64))
    assert first.device.type == device and first.dtype == query.dtype
    assert first.plan == kittens_torch.explain(query, key, value, enable_gqa=True)
    assert all(call.where.startswith(f"{__file__}:") for call in report.calls)
    assert torch.equal(outputs[0], kittens_torch.scaled_dot_product_attention(query, key, value, enable_gqa=True))


@devices
def test_torchs_function(device: str) -> None:
    query, key, value = operands_of(device)
    with kittens_torch.report() as report:
        F.scaled_dot_product_attention(query, key, value)
        with kittens_torch.enabled():
            F.scaled_dot_product_attention(query, value=value, key=key)
            F.scaled_dot_product_attention(query, key, value, query.new_zeros(64, 64))
            with sdpa_kernel(SDPBackend.MATH):
                F.scaled_dot_product_attention(query, key, value)
    assert machines(report) == ["torch", "cpu" if device == "cpu" else "sm90", "torch", "torch"]
    reasons = [call.plan.reason for call in report.calls]
    assert "enable()" in reasons[0] and "math" in reasons[3]
    assert "attn_mask" in reasons[2]
    assert {call.function for call in report.calls} == {"torch.nn.functional.scaled_dot_product_attention"}


def test_preference_for_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs("cpu", torch.float32)
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: True)
    with kittens_torch.report() as report, kittens_torch.enabled():
        kittens_torch.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(query, key, value)
    assert machines(report) == ["torch", "torch"], "each call once"
    assert all("faster" in call.plan.reason for call in report.calls)


def test_model_and_text() -> None:
    model = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(3)).train()
    tokens = normal(2, 33, 64)
    with kittens_torch.enabled(), kittens_torch.report() as report:
        for layer in model:
            layer(tokens, tokens, tokens, need_weights=False)
        kittens_torch.attention(*inputs("cpu", torch.float64), scale=-1.0)
    text = str(report)
    assert text.splitlines()[0] == "4 attention calls: 4 on cpu"
    assert "3 x torch.nn.functional.scaled_dot_product_attention at " in text
    assert "query (2, 4, 33, 16), key (2, 4, 33, 16), value (2, 4, 33, 16), float32 on cpu" in text
    assert "1 x attention at " in text and "copy: query is copied: the kernels take positive scales" in text
    with kittens_torch.report() as report, kittens_torch.enabled():
        F.scaled_dot_product_attention(*inputs("cpu", torch.float32), scale=-1.0)
    assert "positive scales" in report.calls[0].plan.copies[0]
    with kittens_torch.report() as nothing:
        pass
    assert str(nothing) == "0 attention calls"


@pytest.mark.gpu
def test_copies_on_the_gpu() -> None:
    query, key, value = inputs("cuda", torch.bfloat16, length_k=64)
    odd = normal(1, 2, 64, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    with kittens_torch.report() as report, kittens_torch.enabled():
        kittens_torch.attention(query, odd, value)
        F.scaled_dot_product_attention(query, key, value)
    assert any("key is copied" in copy for copy in report.calls[0].plan.copies) and not report.calls[1].plan.copies


def test_gradients_checkpoints_and_nesting() -> None:
    query, key, value = leaves(*inputs("cpu", torch.float32))
    with kittens_torch.report() as outer:
        kittens_torch.attention(query, key, value)
        with kittens_torch.report() as inner, kittens_torch.enabled():
            output = torch.utils.checkpoint.checkpoint(
                F.scaled_dot_product_attention, query, key, value, use_reentrant=False
            )
            output.sum().backward()
            kittens_torch.scaled_dot_product_attention(query, key, value)
    assert machines(inner) == ["cpu"] * 3, "the forward pass runs again in the backward pass"
    assert [call.function for call in outer.calls[1:]] == [call.function for call in inner.calls]
    assert query.grad is not None


def test_errors_pass_and_leave_nothing_behind() -> None:
    query, key, value = inputs("cpu", torch.float32)
    with kittens_torch.report() as report:
        for function in (kittens_torch.scaled_dot_product_attention, kittens_torch.attention):
            with pytest.raises(RuntimeError):
                function(query, key[..., :8], value)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, key.double(), value)
        F.scaled_dot_product_attention(query, key, value)
    assert len(report.calls) == 1
    with pytest.raises(KeyError), kittens_torch.report():
        raise KeyError


def test_other_threads_are_not_seen() -> None:
    query, key, value = inputs("cpu", torch.float32)

    def elsewhere() -> None:
        kittens_torch.attention(query, key, value)
        kittens_torch.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(query, key, value)
        with kittens_torch.report() as its_own:
            kittens_torch.attention(query, key, value)
        seen.append(its_own)

    seen: list[kittens_torch.Report] = []
    with kittens_torch.report() as report, kittens_torch.enabled():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        kittens_torch.attention(query, key, value)
    assert len(seen[0].calls) == len(report.calls) == 1


@pytest.mark.parametrize("file", ["sdpa_attention.py", "attention_dispatch.py", "my_attention_dispatch.py"])
def test_the_caller_is_the_model_and_not_its_dispatcher(file: str, tmp_path: Path) -> None:
    """Of transformers and of diffusers; a file of the user that ends like one of these is the caller."""
    query, key, value = inputs("cpu", torch.float32)
    names: dict[str, Any] = {}
    path = tmp_path / file
    exec(compile("def hand_on(function, *operands):\n    return function(*operands)", str(path), "exec"), names)
    with kittens_torch.report() as report:
        names["hand_on"](kittens_torch.scaled_dot_product_attention, query, key, value)
    caller = str(path) if file.startswith("my_") else __file__
    assert report.calls[0].where.startswith(caller + ":")


def test_compiled_graphs_still_compile() -> None:
    torch._dynamo.reset()
    query, key, value = inputs("cpu", torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value) + kittens_torch.attention(query, key, value)

    expected = model(query, key, value)
    with kittens_torch.enabled(), kittens_torch.report() as report:
        assert torch.allclose(model(query, key, value), expected, atol=1e-5)
    assert [call.plan.machine for call in report.calls] == ["cpu"], "what enable() routes"


@pytest.fixture
def family() -> Any:
    module = pytest.importorskip("transformer_families", reason="transformers is not installed")
    return module.FAMILIES


@pytest.mark.parametrize(
    ("name", "machine", "reason"),
    [
        ("Mistral", "cpu", ""),
        ("Gemma-2", "cpu", ""),
        ("Llama", "cpu", ""),
        ("wide heads", "torch", "head dims (272, 272)"),
    ],
)
def test_model_of_transformers(name: str, machine: str, reason: str, family: Any) -> None:
    if name == "wide heads":
        llama = family["Llama"]
        model = dataclasses.replace(llama, settings={**llama.settings, "head_dim": 272}).build()
    else:
        model = family[name].build()
    model.set_attn_implementation("kittens")
    tokens = torch.arange(3, 23)[None].expand(2, -1)
    present = torch.ones_like(tokens)
    if name in ("Llama", "wide heads"):
        present[0, :3] = 0
    with kittens_torch.report() as report, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(tokens, attention_mask=present)
    assert machines(report) == [machine] * 2, "one call for each layer"
    assert all(reason in call.plan.reason for call in report.calls)
    assert all("modeling_" in call.where for call in report.calls), report.calls[0].where
    assert {call.key[1] for call in report.calls} == ({4} if name == "wide heads" else {2})
