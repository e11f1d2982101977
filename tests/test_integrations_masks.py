"""The attention and mask functions for transformers by themselves: what masks mean, what is refused, registration."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import leaves, normal
from torch import Tensor
from transformer_families import FAMILIES, IS_5, TOKENS, Fallbacks, masking_utils

import kittens_torch
from kittens_torch import dispatch
from kittens_torch.integrations import transformers as ours
from kittens_torch.integrations.intervals import Band, Interval, IntervalMask, band_of

pytestmark = pytest.mark.usefixtures("only_ours")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"head_mask": torch.ones(2)}, NotImplementedError),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, NotImplementedError),
        ({"sliding_window": 3, "is_causal": False}, NotImplementedError),
    ],
)
def test_refusals(settings: dict[str, Any], error: type[Exception]) -> None:
    query = normal(1, 2, 5, 8)
    with pytest.raises(error, match=next(iter(settings))):
        ours.attention_forward(torch.nn.Module(), query, query, query, None, **settings)


@pytest.mark.parametrize("length_q", [1, 5, 9])
def test_without_a_mask(length_q: int) -> None:
    """The rule of "sdpa"; and the window of a causal module counts, as with transformers' flash implementations."""
    query, (key, value) = normal(2, 4, length_q, 8), normal(2, 2, 2, 9, 8)
    module = torch.nn.Module()
    rows, columns = torch.arange(length_q)[:, None], torch.arange(9)[None]
    everything = torch.ones(length_q, 9, dtype=torch.bool)

    def check(visible: Tensor, **settings: Any) -> None:
        output, weights = ours.attention_forward(module, query, key, value, None, scaling=0.3, **settings)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, visible, scale=0.3, enable_gqa=True
        )
        assert weights is None and output.is_contiguous()
        torch.testing.assert_close(output, expected.transpose(1, 2))

    check(columns <= rows if length_q > 1 else everything)
    check(everything, is_causal=False)
    lower_right = columns - rows - (9 - length_q)
    check((lower_right <= 0) & (lower_right > -4), sliding_window=4)


def formula(operands: list[Tensor], visible: Tensor | None, softcap: float | None) -> Tensor:
    """(B, Lq, Hq, Dv) in float64 of query, key, value, and what is added to the scores, and the sinks."""
    query, key, value, bias, sinks = operands
    wide = [operand.repeat_interleave(2, dim=1) for operand in (key, value)]
    logits = query @ wide[0].mT / 8**0.5
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits + bias
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    total = logits.exp().sum(3, keepdim=True) + sinks.exp()[:, None, None]
    return (logits.exp() / torch.where(total == 0, 1.0, total) @ wide[1]).transpose(1, 2)  # a row without keys is 0


PADDING = torch.ones(2, 7, dtype=torch.bool)
PADDING[0, :2] = PADDING[1, 6:] = False
LOWER = torch.ones(6, 7, dtype=torch.bool).tril(1)
SCATTERED = (torch.rand(2, 1, 6, 7, generator=torch.Generator().manual_seed(3)) > 0.4) | torch.eye(6, 7).bool()
MASKS: dict[str, tuple[Tensor, Tensor]] = {  # as given, and densely
    "causal": (IntervalMask(Interval(Band(None, 0), 1), 2, 6, 7, torch.device("cpu")), LOWER),
    "window": (IntervalMask(Interval(Band(2, 0), 1), 2, 6, 7, torch.device("cpu")), LOWER.triu(-1)),
    "padded": (
        IntervalMask(Interval(Band(3, 0), 1), 2, 6, 7, torch.device("cpu"), PADDING),
        LOWER.triu(-2) & PADDING[:, None, None],
    ),
    "dense": (SCATTERED, SCATTERED),
    "added": (torch.zeros(SCATTERED.shape).masked_fill(~SCATTERED, -1e4), SCATTERED),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("changes", ["softcap", "s_aux", "position_bias", "softcap s_aux position_bias"])
def test_what_changes_scores(kind: str, changes: str) -> None:
    """Against the formula in float64, with gradients."""
    operands = leaves(normal(2, 4, 6, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8), normal(1, 4, 6, 7), normal(4))
    settings = {"position_bias": operands[3], "s_aux": operands[4], "softcap": 2.0}
    settings = {name: settings[name] for name in changes.split()}
    mask, visible = MASKS[kind]
    with kittens_torch.report() as report:
        output, weights = ours.attention_forward(torch.nn.Module(), *operands[:3], mask, **settings)
    assert [(call.function, call.plan.machine) for call in report.calls] == [("attention", "cpu")]
    exact_operands = [operand.detach().double().requires_grad_() for operand in operands]
    terms = list(exact_operands)
    if "position_bias" not in settings:
        terms[3] = torch.zeros((), dtype=torch.float64)
    if "s_aux" not in settings:
        terms[4] = torch.full((4,), -torch.inf, dtype=torch.float64)
    exact = formula(terms, visible, settings.get("softcap"))
    assert weights is None
    torch.testing.assert_close(output, exact.float())
    asked = [index for index in range(5) if index < 3 or ("position_bias", "s_aux")[index - 3] in settings]
    mine = torch.autograd.grad(output.square().sum(), [operands[index] for index in asked])
    theirs = torch.autograd.grad(exact.square().sum(), [exact_operands[index] for index in asked])
    for grad, exact_grad in zip(mine, theirs, strict=True):
        torch.testing.assert_close(grad, exact_grad.float(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "machine"),
    [({}, "torch"), ({"dropout": 0.2}, "torch"), ({"position_bias": 1.0}, "torch"), ({"softcap": 2.0}, "cpu")],
)
def test_what_torch_runs_faster_stays_there(
    settings: dict[str, Any], machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: True)
    query, (key, value) = normal(2, 4, 6, 8), normal(2, 2, 2, 7, 8)
    if "position_bias" in settings:
        settings = {"position_bias": normal(1, 4, 6, 7)}
    mask, visible = MASKS["padded"]
    with kittens_torch.report() as report:
        output, _ = ours.attention_forward(torch.nn.Module(), query, key, value, mask, **settings)
    assert [call.plan.machine for call in report.calls] == [machine]
    if "dropout" not in settings:
        bias = settings.get("position_bias", torch.zeros(())).double()
        terms = [query.double(), key.double(), value.double(), bias, torch.full((4,), -torch.inf).double()]
        exact = formula(terms, visible, settings.get("softcap")).float()
        rows = visible.any(3).transpose(1, 2)[..., None]  # of the others torch takes the mean where there is a bias
        torch.testing.assert_close(torch.where(rows, output, 0.0), torch.where(rows, exact, 0.0))


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}, {"s_aux": 1.0}, {"position_bias": 1.0}])
def test_what_no_kernel_takes(settings: dict[str, Any]) -> None:
    """Wide heads go to torch's attention, or to plain operations with what it does not know."""
    query, (key, value) = normal(2, 4, 6, 8), normal(2, 2, 2, 7, 8)
    settings = {name: normal(4) if name == "s_aux" else word for name, word in settings.items()}
    if "position_bias" in settings:
        settings = {"position_bias": normal(1, 4, 6, 7)}
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    widened = [torch.nn.functional.pad(operand, (0, 292)) for operand in (query, key, value)]
    for mask, _ in (MASKS["causal"], MASKS["padded"], (None, None)):
        expected, _ = ours.attention_forward(module, query, key, value, mask, scaling=0.4, **settings)
        with Fallbacks("head dims (300, 300)"):
            output, _ = ours.attention_forward(module, *widened, mask, scaling=0.4, **settings)
        rows = slice(2, None) if mask is MASKS["padded"][0] else slice(None)  # the others are padding
        torch.testing.assert_close(output[:, rows, :, :8], expected[:, rows])


def test_one_batch_of_queries_for_all() -> None:
    query, (key, value) = normal(1, 4, 6, 8), normal(2, 2, 2, 7, 8)
    mask, _ = MASKS["padded"]
    output, _ = ours.attention_forward(torch.nn.Module(), query, key, value, mask)
    expected, _ = ours.attention_forward(torch.nn.Module(), query.expand(2, -1, -1, -1), key, value, mask)
    assert torch.equal(output, expected)


# Masks


def test_bands_of_mask_functions() -> None:
    make = masking_utils

    def band(function: Callable[..., Any]) -> Band | None:
        return band_of(function, masking_utils)

    assert band(make.causal_mask_function) == Band(None, 0)
    assert band(make.sliding_window_causal_mask_function(5)) == Band(4, 0)
    assert band(make.and_masks(make.sliding_window_overlay(5), make.sliding_window_causal_mask_function(3))) == Band(
        2, 0
    )
    if IS_5:
        assert band(make.bidirectional_mask_function) == Band(None, None)
        assert band(make.sliding_window_bidirectional_mask_function(5)) == Band(5, 5)
    apart = torch.tensor([[0, 0, 1, 1]])
    assert band(make.and_masks(make.causal_mask_function, make.packed_sequence_mask_function(apart * 0))) == Band(
        None, 0
    )
    for unknown in (
        make.and_masks(make.causal_mask_function, make.packed_sequence_mask_function(apart)),
        make.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        make.or_masks(make.causal_mask_function, make.causal_mask_function),
        make.and_masks(make.causal_mask_function, make.padding_mask_function(torch.ones(1, 4, dtype=torch.bool))),
        make.and_masks(make.causal_mask_function, lambda *places: places[2] > 3),
        lambda *places: places[2] > 3,
    ):
        assert band(unknown) is None


KINDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "causal": lambda: masking_utils.causal_mask_function,
    "window": lambda: masking_utils.sliding_window_causal_mask_function(4),
    "full": lambda: masking_utils.bidirectional_mask_function,
    "both sides": lambda: masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": lambda: masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("kind", list(KINDS) if IS_5 else ["causal", "window", "chunks"])
@pytest.mark.parametrize("padded", [None, "nothing", "left", "beyond"])
@pytest.mark.parametrize(
    ("length_q", "length_k", "first_q", "first_k"),
    [(6, 6, 0, 0), (1, 6, 5, 0), (1, 1, 0, 0), (3, 6, 3, 0), (3, 8, 20, 15), (1, 4, 9, 6), (6, 9, 0, 0), (3, 9, 2, 0)],
)
def test_masks_mean_what_sdpas_mean(
    kind: str, padded: str | None, length_q: int, length_k: int, first_q: int, first_k: int
) -> None:
    """Whatever our mask function answers, it stands for the dense mask that "sdpa" would make."""
    function = KINDS[kind]()
    is_causal = kind in ("causal", "window", "chunks")
    attention_mask = None
    if padded:
        attention_mask = torch.ones(2, first_k + length_k, dtype=torch.bool)
        if padded == "left":
            attention_mask[0, : first_k + 2] = False
        if padded == "beyond":  # a cache longer than what it holds
            attention_mask[:, first_q + length_q :] = False
    common = {
        "batch_size": 2,
        "kv_length": length_k,
        "kv_offset": first_k,
        "mask_function": function,
        "attention_mask": attention_mask,
    }
    if kind in ("window", "both sides", "chunks"):
        common["local_size"] = 4
    if IS_5:
        common |= {"q_length": length_q, "q_offset": first_q, "device": "cpu"}
        skips = {"allow_is_causal_skip": is_causal, "allow_is_bidirectional_skip": not is_causal}
    else:
        common |= {"cache_position": torch.arange(first_q, first_q + length_q)}
        skips = {"allow_is_causal_skip": True}
    exact = masking_utils.sdpa_mask(**common, **dict.fromkeys(skips, False))
    mask = ours.make_mask(**common, **skips)
    plain = masking_utils.sdpa_mask(**{**common, "attention_mask": None}, **dict.fromkeys(skips, False))
    hides_nothing = torch.equal(exact, plain.expand_as(exact))
    if kind == "chunks" and length_k > 1:
        assert mask is not None and not isinstance(mask, IntervalMask)
    if kind in ("causal", "full") and (length_q, length_k) != (3, 9):
        assert (mask is None and hides_nothing) or isinstance(mask, IntervalMask), "an interval says it"
        assert mask is None or (mask.padding is None) == hides_nothing
    module, query, (key, value) = torch.nn.Module(), normal(2, 4, length_q, 8), normal(2, 2, 2, length_k, 8)
    output, _ = ours.attention_forward(module, query, key, value, mask, is_causal=is_causal)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, exact, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    if mask is None:
        rows, columns = torch.arange(length_q)[:, None], torch.arange(length_k)[None]
        visible = columns <= rows if is_causal and length_q > 1 else torch.ones(length_q, length_k, dtype=torch.bool)
        mask = visible.expand(2, 1, length_q, length_k)
    elif isinstance(mask, IntervalMask):
        assert mask.shape == (2, 1, length_q, length_k) and mask.dtype == torch.bool
        mask = mask.dense()
    assert torch.equal(mask, exact.expand(2, 1, length_q, length_k))
    assert not isinstance(ours.make_mask(**common, **dict.fromkeys(skips, False)), IntervalMask), (
        "skipping is not allowed"
    )


@pytest.mark.parametrize("padded", [False, True])
def test_interval_masks_are_masks_to_everyone(padded: bool) -> None:
    padding = PADDING if padded else None
    mask = IntervalMask(Interval(Band(2, 0), 3), 2, 4, 7, torch.device("cpu"), padding)
    dense = torch.ones(4, 7, dtype=torch.bool).tril(3).triu(1).expand(2, 1, 4, 7)
    if padded:
        dense = dense & PADDING[:, None, None]
    assert torch.equal(mask.dense(), dense) and ("with padding" in repr(mask)) == padded
    copied = copy.deepcopy(mask)
    assert isinstance(copied, IntervalMask) and torch.equal(copied.dense(), dense)
    for use in (
        lambda m: m[:, :, 1:, :5],
        lambda m: ~m,
        lambda m: m.to(torch.float32),
        lambda m: torch.where(m, 0.0, -1.0),
        lambda m: m.clone(),
        lambda m: m.expand(2, 3, 4, 7),
        lambda m: m & True,
        lambda m: m.any(dim=3),
        lambda m: torch.cat([m, m], dim=3),
        lambda m: m.detach().contiguous(),
    ):
        result = use(mask)
        assert not isinstance(result, IntervalMask) and torch.equal(result, use(dense))
    query = normal(2, 3, 4, 8)
    key = normal(2, 3, 7, 8)
    by_torch = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(by_torch(query, key, key, mask), by_torch(query, key, key, dense))


# Compiled models


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_layers(padded: bool) -> None:
    """Layer by layer, where a mask of ours is an argument of a graph."""
    torch._dynamo.reset()
    model = FAMILIES["Mistral"].build()
    present = [torch.ones_like(TOKENS) for _ in range(2)]
    if padded:
        present[0][0, 14:] = present[1][1, 9:] = 0  # a graph holds no mask as a constant
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = [model(TOKENS, attention_mask=words, use_cache=False).logits for words in present]
        model.set_attn_implementation("kittens")
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend="eager")
        logits = [model(TOKENS, attention_mask=words, use_cache=False).logits for words in present]
    for mine, exact, words in zip(logits, expected, present, strict=True):
        torch.testing.assert_close(mine * words[..., None], exact * words[..., None], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["causal", "window"])
def test_compiled_with_their_masks(kind: str) -> None:
    """Masks that are made inside a graph are those of "sdpa": windows are dense there, and all are in 4.57."""
    torch._dynamo.reset()
    function = KINDS[kind]()
    module = torch.nn.Module()
    module.num_key_value_groups = 2

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths = {"q_length": 9, "device": "cpu"} if IS_5 else {"cache_position": torch.arange(9)}
        size = {"local_size": 4} if kind == "window" else {}
        mask = ours.make_mask(batch_size=2, kv_length=9, mask_function=function, **lengths, **size)
        return ours.attention_forward(module, query, key, value, mask)[0]

    operands = normal(2, 4, 9, 8), normal(2, 2, 9, 8), normal(2, 2, 9, 8)
    expected = layer(*operands)
    with Fallbacks(""):
        output = torch.compile(layer, fullgraph=True, backend="aot_eager")(*operands)
    torch.testing.assert_close(output, expected)


# Registration


def test_both_tables() -> None:
    ours.register()
    ours.register()
    attentions, masks = ours._interfaces()
    assert attentions._global_mapping["kittens"] is ours.attention_forward
    assert masks._global_mapping["kittens"] is ours.make_mask


def test_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.56.2")
    with pytest.raises(ImportError, match=r">= 4.57.*found 4.56.2"):
        ours.register()
    ours.register_when_loaded()  # quietly


@pytest.mark.parametrize("state", ["not imported", "models loaded"])
def test_registered_by_importing(state: str, tmp_path: Path) -> None:
    """In whatever order, and without an import that nobody asked for. A package in the place of transformers."""
    package = tmp_path / "transformers"
    package.mkdir()
    tables = (
        "class AttentionInterface:\n    _global_mapping = {'sdpa': None}\n    register = _global_mapping.__setitem__\n"
    )
    (package / "__init__.py").write_text('__version__ = "5.3.0.dev0"\n')
    (package / "modeling_utils.py").write_text(tables + "import transformers.masking_utils\n")
    (package / "masking_utils.py").write_text(tables.replace("AttentionInterface", "AttentionMaskInterface"))
    before = {
        "not imported": "",
        "imported": "import transformers",
        "models loaded": "import transformers.modeling_utils",
    }
    program = f"""
import sys
import torch
{before[state]}
import kittens_torch
assert ("transformers" in sys.modules) == bool({before[state]!r})
assert ("transformers.modeling_utils" in sys.modules) == ("modeling_utils" in {before[state]!r})
from transformers.modeling_utils import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
for table in (AttentionInterface, AttentionMaskInterface):
    assert list(table._global_mapping) == ["sdpa", "kittens"]
assert not any(getattr(finder, "name", "").startswith("transformers") for finder in sys.meta_path)
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
