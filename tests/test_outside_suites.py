"""The comparisons of torch's and transformers' own tests with and without us find what is lost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from outside_suite import compare

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


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"tests/{script}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_lost_tests_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "test_attention.py"
    file.write_text(SUITE)
    done = run("torch_suite.py", str(file))
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


@pytest.mark.parametrize("script", ["torch_suite.py", "transformers_suite.py"])
def test_missing_file(script: str) -> None:
    done = run(script, "no/such/test.py")
    assert done.returncode == 2 and "no/such/test.py" in done.stderr and f"tests/{script}" in done.stderr


OF_A_MODEL = """
import pytest, torch, unittest
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from ...helper import WIDTH

def output(attention, tokens, **inputs):
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(vocab_size=20, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2,
                                   num_attention_heads=2, attn_implementation=attention)).eval()
    return model(tokens, **inputs).last_hidden_state

class LlamaTest(unittest.TestCase):
    def test_right_in_both(self):
        tokens = torch.arange(18).view(2, 9)
        torch.testing.assert_close(output("sdpa", tokens), output("eager", tokens))
    def test_padding(self):
        tokens, mask = torch.arange(18).view(2, 9), torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
        ours, eager = (output(name, tokens, attention_mask=mask) for name in ("sdpa", "eager"))
        torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()])
    def test_without_us_only(self):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"].__module__.startswith("transformers"), "somebody else is here"
"""


@pytest.mark.slow
def test_of_a_model_of_transformers(tmp_path: Path) -> None:
    """In a package `tests` of its own, with relative imports, as in the sources of transformers."""
    pytest.importorskip("transformers", reason="transformers is not installed: `make test` installs it")
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (tmp_path / "tests" / "helper.py").write_text("WIDTH = 16\n")
    (folder / "test_modeling_llama.py").write_text(OF_A_MODEL)
    done = run("transformers_suite.py", str(folder / "test_modeling_llama.py"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "without us: 3 passed\nwith us: 1 failed, 2 passed\n" in done.stdout
    (calls, tests) = re.findall(r"calls on our kernels: (\d+), in (\d+) tests", done.stdout)[0]
    assert int(calls) >= 2 and int(tests) >= 1, "two layers of the first test, at least"
    (lost,) = (line for line in done.stdout.splitlines() if line.startswith("LOST"))
    assert "test_without_us_only: failed" in lost and "somebody else" in lost
