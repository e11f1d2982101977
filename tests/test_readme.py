"""The documents tell the truth: their programs run, their excerpts are in the sources, their names exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kittens_torch
from kittens_torch import ops

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MANUAL = ROOT / "csrc/kittens/README.md"
DEEP_DIVES = [ROOT / "csrc/attention/README.md", ROOT / "csrc/attention/BACKWARD.md"]
KERNEL = ROOT / "csrc/attention/forward.cuh"
TUTORIAL = ROOT / "csrc/kittens/tutorial/gemm.cuh"
VOCABULARY = {machine: ROOT / "csrc/kittens" / machine for machine in ("sm90", "cpu")}
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("csrc/**/*.md")]
GXX = shutil.which("g++")


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def one_based(texts: list[str]) -> list[object]:
    return [pytest.param(text, id=str(number)) for number, text in enumerate(texts, 1)]


# Programs


@pytest.fixture
def _unchanged_settings() -> Iterator[None]:
    before = kittens_torch.set_fallback("warn")
    yield
    kittens_torch.set_fallback(before)
    assert not ops.checking()


@pytest.mark.usefixtures("_unchanged_settings")
@pytest.mark.parametrize("program", one_based(blocks(README, "python")))
def test_python_of_the_readme_runs(program: str) -> None:
    assert torch.get_default_device() == torch.device("cpu")
    exec(compile(program, str(README), "exec"), {"__name__": "__main__"})


def test_readme_shows_the_entry_points() -> None:
    programs = "\n".join(blocks(README, "python"))
    for entry in ("scaled_dot_product_attention", "attention", "explain", "set_fallback", "checked_machine"):
        assert f"kittens_torch.{entry}(" in programs
    assert len(README.read_text().splitlines()) <= 200


def checked_program() -> str:
    return next(block for block in blocks(MANUAL, "cpp") if "int main()" in block)


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.skipif(GXX is None, reason="no g++ here")
def test_program_of_the_manual_finds_what_the_manual_says(tmp_path: Path) -> None:
    """The program and command of the manual: with the tutorial as it is, and with the fault that the manual quotes."""
    (command,) = (block.strip() for block in blocks(MANUAL, "") if block.startswith("g++"))
    compiling, _, linking = command.partition(" -lpthread")
    (runtime,) = re.findall(r" csrc/\S+", compiling)
    (quoted,) = re.findall(r"`(release of [^`]*)`", MANUAL.read_text())
    kernel = TUTORIAL.read_text()
    assert kernel.count("        mma_wait<0>();\n") == 1 and kernel.count("        a.release();\n") == 1
    broken = kernel.replace("        a.release();\n", "").replace(
        "mma_wait<0>();", "a.release();\n        mma_wait<0>();"
    )
    shutil.copytree(ROOT / "csrc/kittens", tmp_path / "csrc/kittens")
    (tmp_path / "check_gemm.cpp").write_text(checked_program())

    def shell(line: str) -> None:
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)  # bash, because the command has braces

    def run(tutorial: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "csrc/kittens/tutorial/gemm.cuh").write_text(tutorial)
        shell(compiling.replace(runtime, "") + " -c")
        shell("g++ *.o -lpthread" + linking)
        return subprocess.run([tmp_path / "check_gemm"], capture_output=True, text=True, timeout=60)

    shell(compiling.replace(" check_gemm.cpp", "") + " -c")
    right = run(kernel)
    assert (right.returncode, right.stdout) == (0, "20 seeds: right, and no rule broken\n")
    wrong = run(broken)
    assert wrong.returncode == 1 and quoted in wrong.stdout


# Excerpts


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def missing_from(excerpt: str, source: Path) -> str | None:
    """The first line of the excerpt that the source does not have, in the excerpt's order; `...` stands for any."""
    remaining = iter(lines_of(source.read_text()))
    for line in lines_of(excerpt):
        if line != "..." and line not in remaining:  # `in` moves the iterator on
            return line
    return None


def test_excerpt_of_the_kernel() -> None:
    (excerpt,) = blocks(README, "cpp")
    assert len(lines_of(excerpt)) > 30
    assert missing_from(excerpt, KERNEL) is None


def test_excerpts_of_the_tutorial() -> None:
    excerpts = [block for block in blocks(MANUAL, "cpp") if block != checked_program()]
    assert len(excerpts) >= 4
    assert missing_from("\n".join(excerpts), TUTORIAL) is None
    assert len(TUTORIAL.read_text().splitlines()) <= 120


def test_a_line_out_of_place_is_found(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text("  one\ntwo\n\nthree\n")
    assert missing_from("one\n  ...\nthree", source) is None
    assert missing_from("three\none", source) == "one"
    assert missing_from("one\nfour", source) == "four"


# Names


def names_in_tables() -> list[str]:
    """What the first columns of the manual's two tables of the vocabulary call by name."""
    tables = MANUAL.read_text().partition("## Memory layouts")[0]
    cells = re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)
    quoted = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return sorted({re.match(r"\w+", code)[0] for code in quoted} - {"float", "double"})  # type: ignore[index]


def defined(machine: str) -> str:
    folders = (VOCABULARY[machine], ROOT / "csrc/kittens/core")
    return "\n".join(file.read_text() for folder in folders for file in sorted(folder.iterdir()))


@pytest.mark.parametrize("machine", VOCABULARY)
def test_names_of_the_manual_are_defined(machine: str) -> None:
    names, source = names_in_tables(), defined(machine)
    assert {"mma_ABt", "exp2_into", "ring_flags", "store_wait_all", "launch", "bf16", "uniform"} <= set(names)
    type_or_function = r"(?:\b(?:struct|using|class) (?:alignas\(\d+\) )?{0}\b)|(?:^[^/\n]*[\w>*&\]] \*?{0}\()"
    unknown = [name for name in names if not re.search(type_or_function.format(name), source, re.MULTILINE)]
    assert not unknown, f"{machine} does not define {unknown}"


def test_public_operations_are_in_the_manual() -> None:
    """Every operation that both machines define for kernels is in the tables."""
    pattern = r"KITTENS_(?:INLINE|NO_INLINE|ALWAYS_INLINE) [^(\n;]*?(\w+)\("
    both = set.intersection(*(set(re.findall(pattern, defined(machine))) for machine in VOCABULARY))
    assert {"mma_ABt", "row_max", "store_async"} <= both
    assert both - set(re.findall(r"\w+", MANUAL.read_text())) == set()


# Links


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", target):
            continue
        assert (document.parent / path).exists(), f"{target} of {document.name}"
        assert path or anchor in anchors, f"{target} of {document.name}"


@pytest.mark.parametrize("document", [README, MANUAL, *DEEP_DIVES], ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_exist(document: Path) -> None:
    """Files and folders of the repository that a document names in code."""
    places = ("csrc/", "tests/", "examples/", "benchmarks/", "kittens_torch/", "kittens_build/")
    for code in re.findall(r"`([\w./]+)`", document.read_text()):
        if code.startswith(places):
            assert (ROOT / code).exists(), f"{document.name} names {code}"
