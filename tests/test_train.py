"""The training example: the losses of its model with our attention are torch's but for rounding."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kittens_torch.integrations import transformers as integration

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: `make test` installs it")
pytest.importorskip("accelerate", reason="accelerate is not installed: `make test` installs it")
importlib.import_module("transformers.modeling_utils")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train.py"
pytestmark = pytest.mark.usefixtures("only_ours")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kittens_torch_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def distance(run: Any, other: Any) -> float:
    """The largest difference of the losses of a step."""
    return max(abs(one - two) for one, two in zip(run.losses, other.losses, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_are_torchs_but_for_rounding(example: ModuleType, device: str) -> None:
    """Rounding grows from step to step, by how much is seen between two kernels of torch: the bound is three times
    that, and the rounding of a loss itself (its logits are many, so that in bfloat16 it is a sixteenth of theirs). On
    the CPU, in float32, an attention that is off by a hundredth of its scale is far beyond it; on the GPU one that is
    not causal."""
    long = {"length": 96, "heads": 4} if device == "cpu" else {"length": 512, "heads": 2}
    sizes = example.Sizes(hidden=128, layers=2, heads_k=2, batch=2, steps=8, **long)
    torchs = example.train("sdpa", sizes, device)
    with sdpa_kernel(SDPBackend.MATH):
        another = example.train("sdpa", sizes, device)
    ours = example.train("kittens", sizes, device)
    assert len(torchs.losses) == sizes.steps and torchs.losses[-1] < torchs.losses[0] - 1, "it learns"
    assert {call.plan.machine for call in ours.report.calls} == {"cpu" if device == "cpu" else "sm90"}
    assert len(ours.report.calls) == sizes.layers and ours.tokens_per_second > 0
    rounding = torch.finfo(torch.float32).eps if device == "cpu" else torch.finfo(torch.bfloat16).eps / 16
    allowed = 3 * distance(another, torchs) + rounding * torchs.losses[0]
    assert distance(ours, torchs) <= allowed
    assert distance(ours, torchs) > 0, "it was another attention"

    def wrong(module: Any, query: Tensor, *operands: Any, **settings: Any) -> Any:
        if device == "cuda":
            settings["is_causal"] = False
        return integration.attention_forward(module, query * 0.99, *operands, **settings)

    attentions, masks = integration._interfaces()
    attentions.register("wrong", wrong)
    masks.register("wrong", integration.make_mask)
    try:
        assert distance(example.train("wrong", sizes, device), torchs) > 3 * allowed
    finally:
        del attentions._global_mapping["wrong"], masks._global_mapping["wrong"]


def test_text_is_words(example: ModuleType) -> None:
    text = example.Text(64)
    assert len(text) > 1000
    piece = bytes(text[len(text) // 2]["input_ids"].tolist()).decode(errors="replace")
    assert len(piece.split()) > 3 and torch.equal(text[3]["input_ids"], text[3]["labels"])
    assert text.pieces.dtype == torch.int64 and text.pieces.min() >= 0 and text.pieces.max() < 256


@pytest.mark.slow
def test_command(example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example.main(["--steps", "2"])
    printed = capsys.readouterr().out
    assert 'attn_implementation="kittens":' in printed and "2 attention calls: 2 on cpu" in printed
    with pytest.raises(SystemExit):
        example.main(["--steps", "1"])
