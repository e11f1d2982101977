"""The programs of the integrations' README run, and its names and links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_readme import blocks, one_based
from transformer_families import FAMILIES

import kittens_torch
from kittens_torch import dispatch

DOCUMENT = Path(__file__).resolve().parents[1] / "kittens_torch/integrations/README.md"


@pytest.fixture
def _unchanged_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The document shows what runs here, on CPUs where the plan would rather have torch as well.
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    before = kittens_torch.set_fallback("silent")
    yield
    kittens_torch.set_fallback(before)
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("_unchanged_settings")
@pytest.mark.parametrize("program", one_based(blocks(DOCUMENT, "python")))
def test_python_runs(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "diffusers" in program:
        pytest.importorskip("diffusers", reason="diffusers is not installed: `make test` installs it")
    exec(compile(program, str(tmp_path / "model.py"), "exec"), {"__name__": "__main__"})
    if "print(report)" in program:
        (shown,) = re.findall(r"^```\n(\d+ attention calls.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
        printed = capsys.readouterr().out.splitlines()
        for line, told in zip(printed, shown.splitlines(), strict=True):
            start, kernel, _ = told.partition(", configuration")  # what the plan says after that depends on the CPU
            pattern = re.escape(start).replace(r"model\.py", r"\S*model\.py")
            assert re.match(pattern, line) if kernel else re.fullmatch(pattern, line), f"{line!r} is shown as {told!r}"


def test_families_named() -> None:
    text = DOCUMENT.read_text()
    (tested,) = re.findall(r"on small random models: (.*?)\.\n", text, re.DOTALL)
    named = {re.sub(r"\s", " ", name) for name in re.split(r",\s+| and ", tested)}
    assert named - {"3"} == set(FAMILIES) - {"Gemma-3"}


def test_links() -> None:
    text = DOCUMENT.read_text()
    titles = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}
    anchors = re.findall(r"\]\(#([^)]+)\)", text)
    assert anchors and set(anchors) <= titles
