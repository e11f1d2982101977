"""The operations of the tile vocabulary that masks, dropout and their gradients need: every machine, against torch."""

from __future__ import annotations

import torch
from test_tiles import POISON, REAL, assert_equal, integers, poisoned
from tiles.cases import name, on_every_machine
from tiles.machine import DTYPES, Machine


@on_every_machine("hide")
def test_hiding(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """keep_where, map_pairs, tanh, any_of and map_with_elements."""
    real, columns = DTYPES[element], sizes[0]
    source = torch.randn(64, columns, dtype=real)
    source[1] = torch.logspace(-6, 2, columns, dtype=real)
    source[2, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    source[:, 0] = torch.arange(64)
    visible = torch.rand(64, columns) > 0.4
    visible[3], visible[4] = False, True
    bits = visible.view(64, columns // 32, 32).long() << torch.arange(32)
    words = (bits.sum(-1) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    added = torch.randn(32, columns, 2, dtype=real)
    added[..., 1] = POISON
    for wanted, found, count in ((47, 1.0, columns), (48, 0.0, 37)):
        out = poisoned(5, 64, columns, device=machine.device, dtype=real)
        given = [tensor.to(machine.device) for tensor in (source, words, out, added)]
        machine.run(name(family, element, sizes), given, [wanted, count])
        out = given[2]
        assert_equal("keep_where", out[0], source.masked_fill(~visible, float("-inf")))
        rows, evens = torch.arange(64, dtype=real)[:, None] * 1000, torch.arange(0, columns, 2, dtype=real)
        assert_equal("map_pairs, x", out[1][:, ::2], source[:, ::2] + source[:, 1::2])
        assert_equal("map_pairs, y", out[1][:, 1::2], (rows + evens).expand(64, -1))
        exact = torch.tanh(source.double())
        error = 1e-6 if real == torch.float32 else 1e-15
        torch.testing.assert_close(out[2].cpu().double(), exact, rtol=error, atol=0, equal_nan=True)
        assert_equal("any_of", out[3], torch.full((64, columns), found, dtype=real))
        terms = 2 * added[..., 0].repeat_interleave(2, 0)
        terms[:, count:] = 0
        assert_equal("map_with_elements", out[4], source + terms)


@on_every_machine("keep_drawn")
def test_keep_drawn(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    columns, real = sizes[0], REAL[element]
    source = integers(64, columns, dtype=real) + 10  # nothing is zero
    numbers = torch.randint(0, 256, (64, columns), dtype=torch.int32)
    out = poisoned(1, 1, 64, columns, device=machine.device, dtype=DTYPES[element])
    machine.run(name(family, element, sizes), [source.to(machine.device), numbers.to(machine.device), out])
    row, column = torch.arange(64)[:, None], torch.arange(columns)
    decides = numbers[row // 16 * 16 + row % 8, column // 16 * 16 + column % 8 // 2 * 2]
    kept = decides >> (row // 8 % 2 * 4 + column // 8 % 2 * 2 + column % 2) & 1
    assert_equal("keep_drawn", out[0, 0], (source * kept).to(DTYPES[element]))


@on_every_machine("riders")
def test_riders(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """Notes and tiles that travel with a tile; load, load_transposed, keep_where_transposed of what has come; pairs.

    Bytes of a mask: load_bytes and load_bytes_transposed, then keep_where and keep_where_transposed.
    """
    columns, dtype, real = sizes[0], DTYPES[element], REAL[element]
    source = (integers(1, 1, 192, columns, most=100)).to(dtype)
    bits = torch.rand(64, columns) > 0.4
    bits[:, 3], bits[5], bits[6] = False, False, True
    words = (bits.view(64, columns // 16, 16).long() << torch.arange(16)).sum(-1).to(torch.int32)
    for first in range(0, columns, 64):
        turned, whole = (
            poisoned(n, 64, width, device=machine.device, dtype=real) for n, width in ((5, 64), (5, columns))
        )
        by_bytes = poisoned(2, 64, 64, device=machine.device, dtype=real)
        mask = bits.to(torch.uint8).to(machine.device)
        given = [source.to(machine.device), words.to(machine.device), turned, whole, mask, by_bytes]
        machine.run(name(family, element, sizes), given, [first])
        for i, rows in ((0, slice(128, 192)), (1, slice(64, 128))):
            expected, cut = source[0, 0, rows].to(real), slice(first, first + 64)
            assert_equal("load", whole[i], source[0, 0, 64 * i : 64 * i + 64].to(real))
            assert_equal("load_transposed", turned[2 * i], expected[:, cut].T)
            shown = torch.where(bits, expected, 7)[:, cut].T
            assert_equal("keep_where_transposed", turned[2 * i + 1], shown)
            assert_equal("load_bytes_transposed", by_bytes[i], shown)
        first_tile, second_tile = (source[0, 0, rows].to(real) for rows in (slice(64), slice(64, 128)))
        assert_equal("load_pairs", whole[2], first_tile)
        assert_equal("load_bytes", whole[4], torch.where(bits, first_tile, 9))
        assert_equal("map_with_pairs", whole[3], 10 * first_tile + second_tile)
        assert_equal("notes", turned[4], torch.full((64, 64), 21, dtype=real))


@on_every_machine("zero_rows")
def test_zero_rows(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    dtype = DTYPES[element]
    source = (integers(1, 1, 128, *sizes) + 10).to(dtype)
    source[0, 0, ::3] = float("nan")
    source[0, 0, 0, :6] = torch.tensor([1e-7, -1e-5, float("inf"), -float("inf"), float("nan"), -0.0]).to(dtype)
    flags = torch.zeros(128, dtype=torch.int32)
    flags[::3], flags[70] = 1, 5
    read, widened = (poisoned(n, w, device=machine.device, dtype=REAL[element]) for n, w in ((128, sizes[0]), (64, 8)))
    machine.run(name(family, element, sizes), [source.to(machine.device), flags.to(machine.device), read, widened])
    expected = source[0, 0].to(REAL[element])
    assert_equal("widen", widened, expected.flatten()[:64, None].expand(64, 8))
    assert_equal("zero_rows", read, expected.masked_fill(flags.bool()[:, None], 0.0))


@on_every_machine("signed")
def test_signed_weights(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """map_into, map_with, map_below, negate_undrawn, its transposed twin and put."""
    columns, dtype, real = sizes[0], DTYPES[element], REAL[element]
    source, numbers = integers(64, columns, dtype=real), torch.randint(0, 256, (64, columns), dtype=torch.int32)
    row, column = torch.arange(64)[:, None], torch.arange(columns)[None, :]
    decides = numbers[row // 16 * 16 + row % 8, column // 16 * 16 + column % 8 // 2 * 2]
    drawn = decides >> (row // 8 % 2 * 4 + column // 8 % 2 * 2 + column % 2) & 1
    decides = numbers[row // 16 * 16 + row % 8 // 2 * 2, column // 16 * 16 + column % 8]
    drawn_transposed = decides >> (column // 8 % 2 * 4 + row // 8 % 2 * 2 + row % 2) & 1
    for end in (-5, 0, 1, 32, 33, columns, 200):
        out = poisoned(4, 64, columns, device=machine.device, dtype=real)
        rounded = poisoned(64, columns, device=machine.device, dtype=dtype)
        given = [source.to(machine.device), numbers.to(machine.device), out, rounded]
        machine.run(name(family, element, sizes), given, [end])
        below = column // 32 * 32 < end
        assert_equal("map_into, map_with", out[0], source * 1002)
        assert_equal("map_below", out[1], source + torch.where(below, 100 * row + column, 0))
        below = column // 16 * 16 < end
        assert_equal("negate_undrawn", out[2], torch.where(below & (drawn == 0), -source, source))
        other = torch.where(below & (drawn_transposed == 0), -source, source)
        assert_equal("negate_undrawn_transposed", out[3], other)
        assert_equal("put", rounded, (source / 3).to(dtype))


@on_every_machine("finite")
def test_what_is_not_finite(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """any_not_finite and zero_not_finite, wherever in the tile it is."""
    dtype, real = DTYPES[element], REAL[element]
    places = [(0, 0), (3, 9), (63, sizes[0] - 1), (64, 1), (127, sizes[0] - 1), (90, 33)]
    largest = torch.finfo(dtype).max
    for bad in ([], *([place] for place in places), places):
        source = (integers(1, 1, 128, *sizes) + 10).to(dtype)
        source[0, 0, 5, :4] = torch.tensor([largest, -largest, 0.0, -0.0], dtype=dtype)
        for i, place in enumerate(bad):
            source[0, 0][place] = (float("nan"), float("inf"), -float("inf"))[i % 3]
        read = poisoned(128, *sizes, device=machine.device, dtype=real)
        found = poisoned(2, 64, 8, device=machine.device, dtype=real)
        machine.run(name(family, element, sizes), [source.to(machine.device), read, found])
        exact = source[0, 0].to(real)
        assert_equal("zero_not_finite", read, exact.where(exact.isfinite(), torch.zeros((), dtype=real)))
        assert (found[..., 0] == (1.0 if bad else 0.0)).all() and not found[..., 1].any()


@on_every_machine("column_sums")
def test_column_sums(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    source = integers(64, *sizes, dtype=DTYPES[element])
    out = poisoned(64, *sizes, device=machine.device, dtype=DTYPES[element])
    machine.run(name(family, element, sizes), [source.to(machine.device), out])
    assert_equal("sum_columns", out, source.sum(0).expand(64, -1))
