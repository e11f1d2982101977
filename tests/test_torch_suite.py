"""The comparison of torch's own tests with and without us finds what is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch_suite import compare

ROOT = Path(__file__).resolve().parents[1]
SUITE = """
import pytest, torch
from torch.nn.attention import current_flash_attention_impl

def attend():
    query = torch.ones(1, 2, 300, 64)
    return torch.nn.functional.scaled_dot_product_attention(query, query, query)

def test_right_in_both(): assert torch.allclose(attend(), torch.ones(1))
def test_without_us_only(): assert current_flash_attention_impl() is None, "somebody else is here"
def test_with_us_only(): assert current_flash_attention_impl() is not None
def test_wrong_in_both(): assert attend().sum() == 0
@pytest.mark.skip
def test_skipped(): pass
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.torch_suite", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_lost_tests_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "test_attention.py"
    file.write_text(SUITE)
    done = run(str(file))
    assert done.returncode == 1, done.stderr
    assert "without us: 2 failed, 2 passed, 1 skipped\nwith us: 2 failed, 2 passed, 1 skipped\n" in done.stdout
    assert "calls on our kernels: 2, in 2 tests" in done.stdout
    (lost,) = (line for line in done.stdout.splitlines() if line.startswith("LOST"))
    assert "test_without_us_only: failed" in lost and "somebody else" in lost
    assert done.stdout.endswith("1 tests pass without us and not with us\n")


def test_nothing_lost(capsys: pytest.CaptureFixture[str]) -> None:
    passed, failed = {"outcome": "passed", "calls": 1}, {"outcome": "failed", "calls": 1, "error": "wrong"}
    assert compare({"a": passed, "b": failed}, {"a": passed, "b": passed}) == []
    assert compare({"a": passed, "b": passed}, {"b": failed}) == ["a", "b"]
    assert "LOST a: not run" in capsys.readouterr().out


def test_missing_file() -> None:
    done = run("no/such/test_transformers.py")
    assert done.returncode == 2 and "no/such/test_transformers.py" in done.stderr
