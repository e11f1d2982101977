"""What ptxas said of every GPU kernel of the last build: no spills, no local memory, no serialised wgmma.

Each is a large loss of speed that shows nowhere else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

LOG = Path(__file__).resolve().parent.parent / "build/kittens_torch/compile_log.json"
KERNEL = re.compile(r"Function properties for (\S+)\n\s*(.+)")
MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def problems(output: str) -> list[str]:
    """The lines of nvcc's output that tell of lost speed, and the functions that use local memory."""
    found = [line for line in output.splitlines() if re.search(r"\bC751\d\b", line)]
    found += [line for line in output.splitlines() if re.search(r"warning.*(spill|local memory)", line, re.IGNORECASE)]
    for name, properties in KERNEL.findall(output):
        memory = MEMORY.search(properties)
        if memory is None or any(map(int, memory.groups())):
            found.append(f"{name}: {properties}")
    return found


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What nvcc printed, by source file."""
    if not LOG.exists():
        pytest.skip("nothing was compiled in this source tree")
    records = [record for record in json.loads(LOG.read_text()) if record["source"].endswith(".cu")]
    if not records:
        pytest.skip("the build had no nvcc")
    return {record["source"]: record["output"] for record in records}


def test_the_log_tells_of_every_kernel(outputs: dict[str, str]) -> None:
    instances = {source: output for source, output in outputs.items() if "/instances/" in source}
    assert instances
    for source, output in instances.items():
        compiled = re.findall(r"Compiling entry function '(\S+)' for 'sm_90a'", output)
        assert compiled, f"{source}: no kernel in the log"
        assert set(compiled) <= {name for name, _ in KERNEL.findall(output)}, source


def test_kernels_use_registers_alone_and_wgmma_stays_asynchronous(outputs: dict[str, str]) -> None:
    found = [f"{source}: {line}" for source, output in outputs.items() for line in problems(output)]
    assert not found, "\n".join(found)


GOOD = """ptxas info    : Function properties for kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...\n"
)


@pytest.mark.parametrize(
    "output",
    [
        GOOD.replace("0 bytes stack", "8 bytes stack"),
        GOOD.replace("0 bytes spill loads", "4 bytes spill loads"),
        GOOD + "ptxas warning : Registers are spilled to local memory in function 'kernel', 8 bytes spill stores\n",
        GOOD + "ptxas warning : Local memory used for function 'kernel', size of stack frame: 8 bytes\n",
        GOOD + SERIALISED,
        GOOD + SERIALISED.replace("C7510", "C7519"),
    ],
)
def test_problems_are_recognised(output: str) -> None:
    assert problems(GOOD) == []
    assert problems(output)
