"""The calls of sanitizer_matrix.py, with the CPU's configurations: that they run, and that a wrong number is found."""

from __future__ import annotations

from typing import Any

import pytest
import sanitizer_matrix
import torch
from torch import Tensor

from kittens_torch import dispatch

pytestmark = pytest.mark.skipif(not dispatch.has_plan(), reason="built without the plan module")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_part = pytest.mark.parametrize("part", sanitizer_matrix.PARTS)


@devices
@every_part
def test_nothing_is_wrong(part: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer_matrix.main([part, "--device", device]) == 0
    assert capsys.readouterr().out == f"{part}: 0 wrong results\n"


@every_part
def test_a_wrong_number_is_found(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op, calls = getattr(sanitizer_matrix, part), []

    def wrong_once(*arguments: Any) -> tuple[Tensor, ...]:
        results = op(*arguments)
        calls.append(arguments)
        if len(calls) == 2:
            largest = max((result for result in results if result.dim() == 4), key=Tensor.numel)
            largest[0, 0, 3, 5] += 0.5
        return results

    monkeypatch.setattr(sanitizer_matrix, part, wrong_once)
    assert sanitizer_matrix.main([part, "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("wrong: ") == 1 and f"{part}: 1 wrong results" in printed
    assert len(calls) <= 66


def test_tensors_keep_their_strides_and_their_place() -> None:
    odd = torch.arange(13.0)[1:].view(3, 4).mT
    moved, number, nothing = sanitizer_matrix.on("cpu", odd, 3, None)
    assert torch.equal(moved, odd) and moved.stride() == odd.stride() and moved.storage_offset() == 1
    assert (number, nothing) == (3, None)


def test_parts_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sanitizer_matrix.main(["backwards", "--device", "cpu"])
    assert "'backwards' is none of forward" in capsys.readouterr().err
