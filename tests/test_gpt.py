"""The example that trains a small GPT: its losses with us are as near to torch's as another kernel of torch is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kittens_torch_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_losses_within_the_noise_of_torchs(example: ModuleType, device: str) -> None:
    """Rounding grows from step to step, by how much is seen between two kernels of torch."""
    sizes = example.Sizes(width=64, layers=2, heads=2, length=100, batch=2, steps=12)
    if device == "cuda":
        sizes = example.SIZES[device]
    torchs, another, ours = (example.train(attend, sizes, device) for attend in example.ATTENTIONS.values())
    assert min(torchs.losses) < torchs.losses[0] - 0.5, "it learns"
    assert len(ours.losses) == sizes.steps and ours.tokens_per_second > 0
    allowed = 3 * another.distance(torchs)
    assert 0 < ours.distance(torchs) <= allowed

    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return example.ours(query * 0.9, key, value)

    if device == "cpu":  # hundreds of steps carry it further than the check needs
        assert example.train(wrong, sizes, device).distance(torchs) > 3 * allowed


def test_command(example: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(example.SIZES, "cpu", example.Sizes(width=16, layers=1, heads=1, length=20, batch=2, steps=9))
    example.main(["--steps", "2"])
    printed = capsys.readouterr().out
    assert "2 batches of 2 x 20 bytes" in printed
    rows = [line for line in printed.splitlines() if line.split() and line.split()[0] in ("1", "2")]
    assert len(rows) == 2 and all(len(row.split()) == 4 for row in rows)
    with pytest.raises(SystemExit):
        example.main(["--steps", "1"])
