"""`python -m kittens_torch doctor` passes here, and would not where a kernel is wrong."""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import kittens_torch
from kittens_torch import dispatch, doctor, environment


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `python -m` runs it, with fewer problems for each dtype."""
    monkeypatch.setattr(doctor, "PROBLEMS", doctor.PROBLEMS[2:4])
    monkeypatch.setattr(sys, "argv", ["kittens_torch", "doctor"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kittens_torch", run_name="__main__")
    told = capsys.readouterr().out
    assert not ended.value.code and told.endswith("Everything works.\n") and told.startswith("kittens_torch "), told
    listed = next(line for line in told.splitlines() if line.startswith("integrations "))
    assert "transformers" in listed and "diffusers" in listed
    wanted = {f"cpu {str(dtype).removeprefix('torch.')}" for dtype in dispatch.KERNEL_DTYPES["cpu"]}
    wanted |= {"checked machine", "enable() on the cpu"}
    if torch.cuda.is_available() and not dispatch.gpu_missing(0):
        wanted |= {"cuda:0 bfloat16", "enable() on cuda:0"}
    assert wanted <= {line.split("  ")[0].strip() for line in told.splitlines() if line.endswith("s  ok")}
    monkeypatch.setattr(sys, "argv", ["kittens_torch", "nurse"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kittens_torch", run_name="__main__")
    assert ended.value.code == 2 and "doctor" in capsys.readouterr().err


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def slightly_wrong(*operands: Tensor, **keywords: Any) -> Any:
        results = kittens_torch.attention(*operands, **keywords)
        return (results[0] + 0.05, results[1]) if isinstance(results, tuple) else results + 0.05

    monkeypatch.setattr(doctor, "attention", slightly_wrong)
    monkeypatch.setattr(doctor, "PROBLEMS", doctor.PROBLEMS[:1])
    monkeypatch.setattr(doctor, "report", environment.build_info)
    state = torch.get_rng_state()
    failed = doctor.main()
    told = capsys.readouterr().out
    # All checks of numbers; and the switch, whose output is no longer that of `attention`, where the plan takes it.
    assert failed in (5, 6) and "output is off by" in told and "please report" in told
    assert "FAILED: Failure: (Hq, Hk, Lq, Lk, D, Dv) = (2, 2, 150, 150, 64, 64)" in told
    assert torch.equal(torch.get_rng_state(), state)


def test_a_switch_that_does_not_switch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    doctor._enable(torch.device("cpu"))
    monkeypatch.setattr(doctor, "enabled", nullcontext)
    with pytest.raises(doctor.Failure, match="not routed"):
        doctor._enable(torch.device("cpu"))
