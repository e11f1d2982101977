"""The tutorial's matrix product (csrc/kittens/tutorial), on every machine, and its speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from tiles.cases import CPU, SM90, instances, name
from tiles.machine import DTYPES, Machine
from torch import Tensor

PEAK_SIZE = 8192
WANTED_TFLOPS = 650  # cuBLAS reaches 765 on an H200: the rest is the tutorial's simplicity, not descriptors or pipeline

# (rows, columns, depth): less than one tile, exactly one, several with cut edges. On the GPU rows start on 16 bytes.
CPU_SHAPES = [(1, 1, 1), (37, 53, 29), (128, 256, 64), (130, 259, 70), (257, 40, 131)]
SM90_SHAPES = [(1, 8, 8), (37, 56, 24), (128, 256, 64), (129, 264, 72), (500, 264, 200), (1000, 1000, 1000)]
SM90_SHAPES += [(2177, 3000, 776)]

CASES = [
    pytest.param(
        *(machine, element, shape),
        marks=[pytest.mark.gpu] if machine is SM90 else [],
        id="-".join([str(machine), element, *map(str, shape)]),
    )
    for machine in (*CPU, SM90)
    for element, _ in instances(machine, "gemm")
    for shape in (SM90_SHAPES if machine is SM90 else CPU_SHAPES)
]


def as_tensor(matrix: Tensor) -> Tensor:
    """With batch and head in front, as the launcher takes it."""
    return matrix[None, None]


@pytest.mark.parametrize(("machine", "element", "shape"), CASES)
def test_gemm(machine: Machine, element: str, shape: tuple[int, int, int]) -> None:
    (rows, columns, depth), dtype = shape, DTYPES[element]
    a, b = torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    eps = torch.finfo(dtype).eps / 2
    allowed = exact.abs() * eps + size * (2.0**-48 if dtype == torch.float64 else 2.0**-19)
    poison = torch.full((columns,), 99.0, device=machine.device, dtype=dtype)
    given = [as_tensor(a).to(machine.device), as_tensor(b).to(machine.device)]
    for processors in (1, 3, 132):
        memory = poison.repeat(rows + 2, 1)
        out = memory[1:-1]
        machine.run(name("gemm", element), [*given, as_tensor(out)], grid=processors)
        error = (out.cpu().double() - exact).abs()
        assert bool((error <= allowed).all()), f"{processors} processors: error {error.max():.3e}"
        assert torch.equal(memory[0], poison) and torch.equal(memory[-1], poison), "written outside of the result"


@pytest.mark.gpu
@pytest.mark.parametrize("element", ["bf16", "fp16"])
def test_gemm_repeats_bitwise(element: str) -> None:
    a, b = (torch.randn(rows, 776, device="cuda").to(DTYPES[element]) for rows in (777, 776))
    results = []
    for _ in range(50):
        out = torch.empty(777, 776, device="cuda", dtype=DTYPES[element])
        SM90.run(name("gemm", element), [as_tensor(a), as_tensor(b), as_tensor(out)], grid=132, wait=False)
        results.append(out)
    assert all(torch.equal(results[0], result) for result in results[1:])


def tflops(operations: float, call: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return operations * calls / start.elapsed_time(end) / 1e9


@pytest.mark.gpu
@pytest.mark.slow
def test_gemm_is_fast() -> None:
    """Both in turn, so that clocks and temperature are the same for both."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda").bfloat16() for _ in range(2))
    ours, theirs = torch.empty_like(a), torch.empty_like(a)
    operands = [as_tensor(a), as_tensor(b), as_tensor(ours)]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: SM90.run(name("gemm", "bf16"), operands, grid=processors, wait=False),
        "cuBLAS": lambda: torch.mm(a, b, out=theirs),
    }
    speed: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(9):
        for label, call in calls.items():
            speed[label].append(tflops(2.0 * PEAK_SIZE**3, call, 20))
    median = {label: statistics.median(values) for label, values in speed.items()}
    print(f"TFLOP/s at {PEAK_SIZE}^3: {median}")
    torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=0.02)  # one unit in the last place
    assert median["ours"] >= WANTED_TFLOPS, f"TFLOP/s: {median}"
