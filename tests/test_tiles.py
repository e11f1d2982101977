"""Every operation of the tile vocabulary, on every machine, against torch.

The kernels are in tests/tiles. Products and sums are of small integers, so that they are exact whatever the order, and
most tests ask for equality. Outputs are poisoned: what a kernel must not write must keep its poison.
"""

from __future__ import annotations

import re

import pytest
import torch
from test_build_log import problems
from tiles import build
from tiles.cases import CPU, FAMILIES, SM90, instances, name, on_every_machine
from tiles.machine import DTYPES, KernelError, Machine
from torch import Tensor

# As the machine converts: float to a 16-bit type or to itself, or double to itself.
REAL = {"bf16": torch.float32, "fp16": torch.float32, "float": torch.float32, "double": torch.float64}
POISON = 99.0


def integers(*shape: int, most: int = 8, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randint(-most, most + 1, shape).to(device=device, dtype=dtype)


def poisoned(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, POISON, device=device, dtype=dtype)


def assert_equal(what: str, ours: Tensor, expected: Tensor) -> None:
    """Exact, but NaN equals NaN whatever its bits."""
    torch.testing.assert_close(
        ours.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


# What there is


@pytest.mark.parametrize("machine", CPU[:2], ids=str)
def test_every_kernel_of_the_cpu_machine_is_tested(machine: Machine) -> None:
    known = [name(family, *instance) for family in FAMILIES for instance in instances(machine, family)]
    assert sorted(machine.kernels) == sorted(known)


@pytest.mark.build
@pytest.mark.slow
def test_sm90_kernels_compile_without_spills_and_keep_products_asynchronous() -> None:
    record = build.build_sm90()
    if record is None:
        pytest.skip("no nvcc here")
    known = [name(family, *instance) for family in FAMILIES for instance in instances(SM90, family)]
    assert sorted(SM90.kernels) == sorted(known)
    compiled = re.findall(r"Compiling entry function '(\S+)' for 'sm_90a'", record.output)
    assert len(set(compiled)) == len(known)
    assert problems(record.output) == []


# Between global and shared memory

BATCH, HEADS = 2, 3


def strided(length: int, width: int, device: str, dtype: torch.dtype, fill: Tensor | float) -> tuple[Tensor, Tensor]:
    """A tensor (BATCH, HEADS, length, width) inside a larger one in the order (batch, row, head, column), and that."""
    padded = (width + 7) // 8 * 8 + 16
    base = torch.full((BATCH, length + 3, HEADS, padded), POISON, dtype=dtype, device=device)
    inside = base[:, 1 : 1 + length, :, 8 : 8 + width].transpose(1, 2)
    inside.copy_(fill) if isinstance(fill, Tensor) else inside.fill_(fill)
    return inside, base


def places(length: int, width: int, rows: int, columns: int) -> list[tuple[int, int, int, int]]:
    """(row, head, batch, column) of boxes inside, over each edge, and outside of a tensor."""
    beyond = (width + 7) // 8 * 8
    return [
        (0, 0, 0, 0),
        (length - rows, 2, 1, 8),
        (length - 23, 1, 1, 0),
        (0, 2, 0, beyond - 16),
        (length - 1, 2, 1, beyond - 8),
        (-7, 0, 1, -8),
        (1 - rows, 1, 0, 8 - columns),
        (length, 1, 0, 0),
        (-rows, 1, 0, 0),
        (0, 1, 0, beyond),
        (3, 1, 0, -columns),
        (0, 0, BATCH, 0),
        (0, HEADS, 0, 0),
        (0, -1, 0, 0),
        (0, 0, -1, 0),
    ]


def window(tensor: Tensor, place: tuple[int, int, int, int], rows: int, columns: int) -> tuple[Tensor, slice, slice]:
    """The part of a box that lies in the tensor, and its rows and columns within the box."""
    row, head, batch, column = place
    length, width = tensor.shape[2:]
    if not (0 <= head < tensor.shape[1] and 0 <= batch < tensor.shape[0]):
        return tensor[0, 0, :0, :0], slice(0, 0), slice(0, 0)

    def overlap(first: int, size: int, end: int) -> slice:
        begin = max(0, -first)
        return slice(begin, max(begin, min(size, end - first)))

    in_rows, in_columns = overlap(row, rows, length), overlap(column, columns, width)
    inside = tensor[batch, head, in_rows.start + row : in_rows.stop + row, in_columns.start + column :]
    return inside[:, : in_columns.stop - in_columns.start], in_rows, in_columns


@on_every_machine("copy")
def test_loads_are_filled_with_zeros(machine: Machine, family: str, element: str, sizes: tuple[int, int]) -> None:
    rows, columns = sizes
    length, width = rows + 19, columns + 11
    source, base = strided(length, width, machine.device, DTYPES[element], torch.randn(BATCH, HEADS, length, width))
    base[base == POISON] = float("nan")
    expanded = source[:, 1:2].expand(-1, HEADS, -1, -1)
    for tensor in (source, expanded):
        for place in places(length, width, rows, columns):
            out = poisoned(1, 1, rows, columns, device=machine.device, dtype=DTYPES[element])
            machine.run(name(family, element, sizes), [tensor, out], place)
            expected = torch.zeros(rows, columns, dtype=DTYPES[element])
            inside, *within = window(tensor, place, rows, columns)
            expected[tuple(within)] = inside.cpu()
            assert_equal(f"box at {place}", out[0, 0], expected)


@on_every_machine("copy")
def test_sends_are_clipped(machine: Machine, family: str, element: str, sizes: tuple[int, int]) -> None:
    rows, columns = sizes
    length, width = rows + 19, columns + 24  # a send clips whole chunks of 16 bytes
    source = torch.randn(1, 1, rows, columns).to(machine.device, DTYPES[element])
    for place in places(length, width, rows, columns):
        if min(place) < 0:
            continue
        out, base = strided(length, width, machine.device, DTYPES[element], POISON)
        expected_out, expected = strided(length, width, machine.device, DTYPES[element], POISON)
        machine.run(name(family, element, sizes), [source, out], [0, 0, 0, 0, *place])
        inside, *within = window(expected_out, place, rows, columns)
        inside.copy_(source[0, 0][tuple(within)])
        assert_equal(f"box at {place}", base, expected)


@pytest.mark.parametrize(
    ("loads", "place", "said"),
    [
        (True, (0, 0, 0, 11), "copy into .* at column 11, which is not a multiple of 16 bytes"),
        (True, (0, 0, 0, -3), "copy into .* at column -3, which is not a multiple of 16 bytes"),
        (False, (0, 0, 0, 11), "send from .* at column 11, which is not a multiple of 16 bytes"),
        (False, (-7, 0, 0, 0), "send from .* to a place before the tensor"),
        (False, (0, -1, 0, 0), "send from .* to a place before the tensor"),
        (False, (0, 0, -1, 0), "send from .* to a place before the tensor"),
        (False, (0, 0, 0, -64), "send from .* to a place before the tensor"),
    ],
)
def test_places_that_the_gpu_refuses(loads: bool, place: tuple[int, int, int, int], said: str) -> None:
    """On the H200 each of these is an illegal instruction."""
    source, out = (torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16) for _ in range(2))
    both = [*place, 0, 0, 0, 0] if loads else [0, 0, 0, 0, *place]
    with pytest.raises(KernelError, match=said):
        Machine("checked").run("copy bf16 64 64", [source, out], both)


@pytest.mark.parametrize(
    ("kernel", "shapes", "integers_", "said"),
    [
        ("mma_ABt_shared bf16 64 64", [(128, 64), (64, 64)], [0, 4], "rows_of: first row 4 is not a multiple of 8"),
        ("mma_AtB bf16 64 64", [(64, 128), (64, 64)], [0, 32], "columns_of: first column 32 is not a multiple of 64"),
    ],
)
def test_operands_that_the_gpu_cannot_begin_there(
    kernel: str, shapes: list[tuple[int, int]], integers_: list[int], said: str
) -> None:
    """On the GPU these would silently take other rows or columns."""
    operands = [torch.zeros(1, 1, *shape, dtype=torch.bfloat16) for shape in shapes]
    sums = [torch.zeros(64, 64) for _ in range(2)]
    with pytest.raises(KernelError, match=said):
        Machine("checked").run(kernel, [*operands, *sums], integers_)


def awkward(*shape: int, element: str) -> Tensor:
    """Normal values of all sizes, and those that rounding may get wrong: halfway cases, Inf, NaN, overflow."""
    values = torch.randn(shape, dtype=torch.float64) * 10.0 ** torch.randint(-6, 5, shape)
    special = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, -(2**-24), 65519.0, 65520.0, 3e38, -3.4e38]
    special += [0.0, -0.0, float("inf"), -float("inf"), float("nan")]
    flat = values.view(-1)
    where = torch.randperm(flat.numel())[: 4 * len(special)]
    flat[where] = torch.tensor(special, dtype=torch.float64).repeat(4)
    return values.to(REAL[element])


@on_every_machine("store")
def test_stores_from_registers(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    (columns,), count = sizes, 3
    rows = 128 * count
    length, width = rows - 37, columns + 24
    source = awkward(rows, columns, element=element)
    rounded = source.to(DTYPES[element])
    for place in [(0, 0, 0, 0), (0, 2, 1, 8), (5, 1, 1, columns // 16 * 8), (70, 1, 0, 0), (0, HEADS, 0, 0)]:
        out, base = strided(length, width, machine.device, DTYPES[element], POISON)
        expected_out, expected = strided(length, width, "cpu", DTYPES[element], POISON)
        machine.run(name(family, element, sizes), [source.to(machine.device), out], [*place, count])
        inside, *within = window(expected_out, place, rows, columns)
        inside.copy_(rounded[tuple(within)])
        assert_equal(f"rows from {place}", base, expected)


@on_every_machine("convert")
def test_convert_takes_columns(machine: Machine, family: str, element: str, sizes: tuple[int, int, int]) -> None:
    columns, width, first = sizes
    source = awkward(64, width, element=element)
    out = poisoned(1, 1, 64, columns, device=machine.device, dtype=DTYPES[element])
    machine.run(name(family, element, sizes), [source.to(machine.device), out])
    assert_equal("converted", out[0, 0], source[:, first : first + columns].to(DTYPES[element]))


# In registers


@on_every_machine("map")
def test_fill_and_map(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    source = integers(64, *sizes, most=100, device=machine.device, dtype=DTYPES[element])
    out = poisoned(3, 64, *sizes, device=machine.device, dtype=DTYPES[element])
    machine.run(name(family, element, sizes), [source, out], reals=[-2.5])
    assert_equal("fill", out[0], torch.full_like(source, -2.5))
    assert_equal("map(x)", out[1], source * source - 3)
    rows, columns = torch.arange(64)[:, None], torch.arange(sizes[0])
    assert_equal("map(row, column, x)", out[2], source.cpu() + rows * 1000 - columns)


@on_every_machine("keep_columns")
def test_keep_columns(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    source = integers(64, *sizes, most=100, device=machine.device, dtype=DTYPES[element])
    rows, columns = torch.arange(64)[:, None], torch.arange(sizes[0])
    # Causal and window edges that cross the tile, everything, nothing, and bounds far outside.
    for bounds in [
        (0, 0, 1, 1),
        (1, -20, 1, 7),
        (2, 3, 2, 4),
        (0, 0, 0, sizes[0]),
        (0, 5, 0, 5),
        (0, -(10**6), 0, 10**6),
        (1, 0, -1, 40),
    ]:
        out = poisoned(64, *sizes, device=machine.device, dtype=DTYPES[element])
        machine.run(name(family, element, sizes), [source, out], bounds)
        seen = (columns >= rows * bounds[0] + bounds[1]) & (columns < rows * bounds[2] + bounds[3])
        assert_equal(f"bounds {bounds}", out, source.cpu().masked_fill(~seen, float("-inf")))


@on_every_machine("rows")
def test_row_operations(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    dtype = DTYPES[element]
    source = integers(2, 64, *sizes, most=1000, dtype=dtype)
    vector = integers(64, most=990, dtype=dtype)
    vector[:8] = -5000  # below all
    source[0, 3] = float("-inf")
    source[0, 4] = vector[4] = float("-inf")
    source[0, 5, -1] = float("inf")
    vectors = poisoned(2, 64, 8, device=machine.device, dtype=dtype)
    out = poisoned(64, *sizes, device=machine.device, dtype=dtype)
    machine.run(name(family, element, sizes), [source.to(machine.device), vector.to(machine.device), vectors, out])
    most, total = torch.maximum(vector, source[0].amax(-1)), source.sum((0, 2))
    assert_equal("row_max", vectors[0], most[:, None].expand(64, 8))
    assert_equal("row_sum", vectors[1], total[:, None].expand(64, 8))
    assert_equal("map_rows", out, source[0] * vector[:, None] + 1)


@on_every_machine("vectors")
def test_row_vectors(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    dtype, limit = DTYPES[element], 100.0
    kernel = name(family, element)

    def run(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor]:
        out, stored = (poisoned(*shape, device=machine.device, dtype=dtype) for shape in ((3, 64, 8), (80,)))
        machine.run(kernel, [x.to(machine.device), y.to(machine.device), out, stored], [count], [limit])
        return out.cpu(), stored.cpu()

    x, y = integers(64, most=100, dtype=dtype), integers(64, most=100, dtype=dtype)
    x[17] = limit
    for count in (0, 1, 37, 64, 100):
        out, stored = run(x, y, count)
        assert_equal("map(a)", out[0], (x * x + 1)[:, None].expand(64, 8))
        assert_equal("map(a, b)", out[1], (x - 2 * y)[:, None].expand(64, 8))
        assert not out[2].any(), "any_above: no value is above the limit"
        assert_equal(f"store_rows({count})", stored[: min(count, 64)], x[:count])
        assert bool((stored[min(count, 64) :] == POISON).all()), f"store_rows({count}) wrote more rows"
    for row in range(64):
        for value in (limit + 1, float("inf"), float("nan")):
            above = x.clone()
            above[row] = value
            out, _ = run(above, y, 0)
            warp = row // 16 * 16
            assert bool((out[2, warp : warp + 16] == 1).all()), f"any_above: {value} in row {row}"
            assert bool(((out[2] == 0) | (out[2] == 1)).all())


@on_every_machine("map_columns")
def test_map_columns(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    dtype, device = DTYPES[element], machine.device
    source, vectors = integers(64, *sizes, dtype=dtype), integers(2, *sizes, most=100, dtype=dtype)
    out = poisoned(2, 64, *sizes, device=device, dtype=dtype)
    machine.run(name(family, element, sizes), [source.to(device), vectors.to(device), out])
    assert_equal("map_columns", out, source * vectors[:, None] + 1)


@on_every_machine("exp2_into")
def test_exp2_into(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    real, dtype, scale = REAL[element], DTYPES[element], 0.37
    scores, shift = torch.randn(64, *sizes, dtype=real) * 20, torch.randn(64, dtype=real) * 3
    scores[0] = float("-inf")
    scores[1, ::2] = float("-inf")
    scores[2, 5] = float("nan")
    scores[3, 7] = float("inf")
    scores[4] = -1e30
    scores[5] = (shift[5] / scale).item()
    sums, weights = poisoned(64 * 8 + 64 * sizes[0], dtype=real), poisoned(1, 1, 64, *sizes, dtype=dtype)
    given = [tensor.to(machine.device) for tensor in (scores, shift, sums, weights)]
    machine.run(name(family, element, sizes), given, reals=[scale])
    scale = torch.tensor(scale, dtype=real).double().item()  # as the kernel has it
    exact = torch.exp2(scores.double() * scale - shift.double()[:, None])
    sums, kept, weights = given[2][: 64 * 8].view(64, 8).cpu(), given[2][64 * 8 :].view(64, -1), given[3][0, 0].cpu()
    assert_equal("the scores", kept, scores)
    # The exponent is a multiple of its rounding error, which a size of 60 makes 4e-6 (7e-15 in double).
    error = 4e-6 if real == torch.float32 else 1e-14
    assert_equal("copies of the sums", sums, sums[:, :1].expand(64, 8))
    torch.testing.assert_close(sums[:, 0].double(), exact.sum(-1), rtol=error, atol=1e-30, equal_nan=True)
    rounding = error if dtype == real else torch.finfo(dtype).eps / 2 + error
    smallest = 2.0**-24 if dtype == torch.float16 else 2.0**-120
    exact[exact > torch.finfo(dtype).max] = float("inf")
    torch.testing.assert_close(weights.double(), exact, rtol=rounding, atol=smallest, equal_nan=True)
    assert not weights[0].any() and not weights[1, ::2].any() and not weights[4].any(), "weights of -inf are 0"


@on_every_machine("scalars")
def test_scalars(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    real = REAL[element]
    error = 4e-7 if real == torch.float32 else 1e-15
    largest, below_smallest = (128.0, -200.0) if real == torch.float32 else (1024.0, -1100.0)
    exponents = torch.rand(64, 16, dtype=real) * 200 - 100
    special = [0.0, 1.0, -1.0, largest, below_smallest, 1e30, -1e30, float("inf"), float("-inf"), float("nan")]
    exponents[0, : len(special)] = torch.tensor(special)
    positive = torch.exp(torch.randn(64, 16, dtype=real) * 20)
    positive[0, :3] = torch.tensor([1.0, 0.0, float("inf")])
    for row, operand, function, smallest in ((0, exponents, torch.exp2, 1e-37), (1, positive, torch.log, error)):
        out = poisoned(3, 64, 16, device=machine.device, dtype=real)
        machine.run(name(family, element), [operand.to(machine.device), out])
        exact = function(operand.double()).to(real)
        torch.testing.assert_close(out[row].cpu(), exact, rtol=error, atol=smallest, equal_nan=True)
        limit, rest = out[2, :, 0].cpu(), out[2, :, 1:]
        assert bool((rest == float("inf")).all())
        assert bool((limit == limit[0]).all())
        assert 2**10 <= limit[0] < torch.finfo(DTYPES[element]).max / 1.5


@on_every_machine("sums")
def test_sums_in_global_memory(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    ctas, dtype = 7, DTYPES[element]
    source = integers(ctas, 64, *sizes, most=1000, device=machine.device, dtype=dtype)
    sums = torch.zeros(64 * sizes[0] + 16, device=machine.device, dtype=dtype)
    out = poisoned(64, *sizes, device=machine.device, dtype=dtype)
    for _ in range(2):
        machine.run(name(family, element, sizes), [source, sums], [0], grid=ctas)
    machine.run(name(family, element, sizes), [None, sums, out], [1])
    assert_equal("taken", out, 2 * source.sum(0))
    assert_equal("sum of all", sums.sum(), 2 * source.sum())
    assert not sums[64 * sizes[0] :].any(), "written behind the end"


# Products


def multiply(family: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return a @ b.T if "ABt" in family else a.T @ b if "AtB" in family else a @ b


def parts(family: str, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """First rows (columns for AtB) to take of A, and first columns of a wider B: multiples of a panel's columns."""
    if family == "mma_AtB_columns":
        width_a, width_b = sizes[2:]
        panel = {80: 16, 96: 32}.get(width_a, 64)
        firsts_b = range(0, width_b - sizes[0] + 1, panel)
        return [(first_a, first_b) for first_a in range(0, width_a - 63, panel) for first_b in firsts_b]
    return [(0, 0)] if family.endswith("registers") else [(0, 0), (64, 0)]


@on_every_machine(
    "mma_ABt_shared", "mma_ABt_registers", "mma_AB_shared", "mma_AB_registers", "mma_AtB", "mma_AtB_columns"
)
def test_products(machine: Machine, family: str, element: str, sizes: tuple[int, ...]) -> None:
    (n, k), real, dtype, device = sizes[:2], REAL[element], DTYPES[element], machine.device
    in_registers = family.endswith("registers")
    width_a, width_b = sizes[2:] or (128, n)
    rows_a = 64 if in_registers else 128
    shape_a = (k, width_a) if "AtB" in family else (rows_a, k)
    shape_b = (n, k) if "ABt" in family else (k, width_b)
    for kind, make, factor in (("integers", integers, 0.0), ("normal values", torch.randn, 2.0**-20)):
        a, b = make(*shape_a).to(dtype), make(*shape_b).to(dtype)
        before = make(64, n).to(real)
        given_a = a.to(real).to(device) if in_registers else a[None, None].to(device)
        for accumulate in (0, 1):
            for first_a, first_b in parts(family, sizes):
                out = poisoned(64, n, device=device, dtype=real)
                tensors = [given_a, b[None, None].to(device), before.to(device) if accumulate else None, out]
                machine.run(name(family, element, sizes), tensors, [accumulate, first_a, first_b])
                part_a = a[:, first_a : first_a + 64] if "AtB" in family else a[first_a : first_a + 64]
                part_b = b if "ABt" in family else b[:, first_b : first_b + n]
                exact = multiply(family, part_a, part_b) + accumulate * before.double()
                allowed = (multiply(family, part_a.abs(), part_b.abs()) + before.double().abs()) * factor
                if real == torch.float64:
                    allowed *= 2.0**-29
                error = (out.cpu().double() - exact).abs()
                what = f"{kind}, accumulate={accumulate}, first of A {first_a}, first of B {first_b}"
                assert bool((error <= allowed).all()), f"{what}: error {error.max():.3e} of {exact.abs().max():.3e}"


@on_every_machine("exchange")
def test_stored_tiles_as_operands(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    (columns,), real, device = sizes, REAL[element], machine.device
    x = integers(128, columns)
    sent = poisoned(1, 1, 128, columns, device=device, dtype=DTYPES[element])
    out = poisoned(2, 2, 64, 64, device=device, dtype=real)
    wide = poisoned(2, 64, columns, device=device, dtype=real)
    machine.run(name(family, element, sizes), [x.to(device, real), sent, out, wide])
    assert_equal("sent", sent[0, 0], x.to(DTYPES[element]))
    for me, own, other in ((0, x[:64], x[64:]), (1, x[64:], x[:64])):
        assert_equal(f"warpgroup {me}: A B^T", out[me, 0], (other @ own.T).to(real))
        assert_equal(f"warpgroup {me}: A^T B", out[me, 1], (x[:, :64].T @ x[:, :64]).to(real))
        assert_equal(f"warpgroup {me}: A B", wide[me], (own[:, :64] @ other).to(real))


# Pipelines


@on_every_machine("ring")
def test_ring_with_more_loads_than_stages(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    real, dtype, device = REAL[element], DTYPES[element], machine.device
    for tiles in (2, 4, 6, 14):
        length = tiles * 128 - 41
        x, b = integers(length, 64, most=3), integers(64, 64, most=2)
        vectors = integers(tiles, 64, most=3)
        out = poisoned(2, 2, 64, 64, device=device, dtype=real)
        tensors = [x[None, None].to(device, dtype), b[None, None].to(device, dtype), vectors.to(device, real), out]
        machine.run(name(family, element, sizes), tensors, [tiles])
        padded = torch.cat([x, torch.zeros(41, 64)])
        products = (padded @ b.T).view(tiles, 2, 64, 64)
        scaled = (products * vectors[:, None, None]).sum(0)
        assert_equal(f"{tiles} tiles, scaled by the vectors", out[:, 0], scaled.to(real))
        assert_equal(f"{tiles} tiles, every second one", out[:, 1], products[1::2].sum(0).to(real))


@on_every_machine("mail")
@pytest.mark.parametrize("counted", [False, True], ids=["by index", "counter"])
def test_mail_and_tile_counter(machine: Machine, family: str, element: str, sizes: tuple[int], counted: bool) -> None:
    device = machine.device
    counter = torch.zeros(2, dtype=torch.int32, device=device) if counted else None
    for tiles, ctas in ((40, 5), (3, 3), (1, 4), (17, 1), (0, 2)):
        for _ in range(2):  # the second launch finds the counter as the first has left it
            log = torch.full((ctas, 2, max(tiles, 1), 2), -1, dtype=torch.int32, device=device)
            sums = torch.full((ctas,), -1, dtype=torch.int32, device=device)
            machine.run(name(family, element), [counter, log, sums], [tiles], grid=ctas)
            assert torch.equal(log[:, 0], log[:, 1]), "the consumers have got different messages"
            seen = []
            for cta in range(ctas):
                mine, numbers = log[cta, 0].unbind(-1)
                count = int((mine >= 0).sum())
                assert numbers[:count].tolist() == list(range(1, count + 1)), "messages lost or out of order"
                assert bool((mine[count:] == -1).all())
                assert mine[:count].tolist() == sorted(mine[:count].tolist())
                assert int(sums[cta]) == int(mine[:count].sum())
                if cta < tiles:
                    assert int(mine[0]) == cta
                if not counted:
                    assert mine[:count].tolist() == list(range(cta, tiles, ctas))
                seen += mine[:count].tolist()
            assert sorted(seen) == list(range(tiles)), "every tile once"
            assert counter is None or not counter.any(), "the counter is not zero after the launch"


@on_every_machine("turns_named", "turns_mbarrier")
def test_turns(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    for rounds in (1, 2, 7, 30):
        turns = torch.full((1 + 3 * rounds + 4,), -1, dtype=torch.int32, device=machine.device)
        turns[0] = 0
        counts = torch.full((3,), -1, dtype=torch.int32, device=machine.device)
        machine.run(name(family, element), [turns, counts], [rounds])
        assert turns.tolist() == [3 * rounds, *([0, 1, 2] * rounds), -1, -1, -1, -1]
        assert counts.tolist() == [3 * rounds] * 3
