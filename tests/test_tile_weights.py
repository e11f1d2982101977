"""The operations of the tile vocabulary that a backward pass of attention and divided keys need, on every machine."""

from __future__ import annotations

import pytest
import torch
from test_tiles import REAL, assert_equal, integers, poisoned
from tiles.cases import name, on_every_machine
from tiles.machine import DTYPES, Machine


@on_every_machine("load")
def test_load_and_row_dot(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    (columns,), real, dtype, device = sizes, REAL[element], DTYPES[element], machine.device
    stored, copied = integers(64, columns), integers(64, columns)
    loaded = poisoned(64, columns, device=device, dtype=real)
    dots = poisoned(64, 8, device=device, dtype=real)
    tensors = [stored.to(device, real), copied[None, None].to(device, dtype), loaded, dots]
    machine.run(name(family, element, sizes), tensors)
    assert_equal("load", loaded, stored.to(real))
    assert_equal("row_dot", dots, (stored * (copied + stored)).sum(-1).to(real)[:, None].expand(64, 8))


@on_every_machine("weights")
def test_weights(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    (columns,), dtype, device = sizes, DTYPES[element], machine.device
    scale = 0.37
    tiles = torch.randn(2, 64, columns, dtype=dtype) * 9
    vectors = torch.randn(64 + columns, dtype=dtype) * 3
    tiles[0, 1, ::2] = float("-inf")
    tiles[0, 2, 5] = float("nan")
    vectors[3] = vectors[64 + 4] = float("inf")
    for offset, count in ((0, 64), (-70, 0), (13, 41), (200, 1)):
        out = poisoned(4, 64, columns, device=device, dtype=dtype)
        loaded = poisoned(64, 8, device=device, dtype=dtype)
        given = [tensor.to(device) for tensor in (tiles, vectors)]
        machine.run(name(family, element, sizes), [*given, out, loaded], [offset, count], [scale])
        rows, row_values, column_values = torch.arange(64)[:, None], vectors[:64, None], vectors[64:]
        logits = tiles[0].double() * torch.tensor(scale, dtype=dtype).double()
        error = 4e-6 if dtype == torch.float32 else 1e-14
        for what, ours, shift in (("exp2_rows", out[0], row_values), ("exp2_columns", out[1], column_values)):
            exact = torch.exp2(logits - shift.double())
            torch.testing.assert_close(
                ours.cpu().double(),
                exact,
                rtol=error,
                atol=1e-30,
                equal_nan=True,
                msg=lambda text, what=what: f"{what}: {text}",
            )
        kept = torch.where(rows + offset >= torch.arange(columns), tiles[0], torch.zeros((), dtype=dtype))
        assert_equal("zero_unless", out[2], kept)
        torch.testing.assert_close(
            out[3].cpu(), tiles[0] * (tiles[1] - row_values), rtol=error, atol=error, equal_nan=True
        )
        expected = torch.where(rows[:, 0] < count, vectors[:64], torch.full((), 7.0, dtype=dtype))
        assert_equal(f"load_rows({count})", loaded, expected[:, None].expand(64, 8))


@on_every_machine("odd")
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_odd_functions(machine: Machine, family: str, element: str, sizes: tuple[int], scale: float) -> None:
    """Warps decide for themselves; with double, for which the polynomial is not accurate, the answer is no."""
    (columns,), real, dtype, device = sizes, REAL[element], DTYPES[element], machine.device
    factor = 5.0
    small = (torch.rand(64, columns, dtype=real) * 2 - 1) * 0.49 / scale
    small[3, ::2] = 0.0
    shift = torch.randn(64, dtype=real)
    for large in (None, 0.8, float("inf"), float("nan")):
        given = small.clone()
        if large is not None:
            given[37, 11] = large / scale
        out = poisoned(3 * 64 * 8 + 2 * 64 * columns, device=device, dtype=real)
        weights = poisoned(1, 1, 64, columns, device=device, dtype=dtype)
        tensors = [given.to(device), shift.to(device), out, weights]
        machine.run(name(family, element, sizes), tensors, reals=[factor, scale])
        sums, first, second = out[: 3 * 64 * 8].view(3, 64, 8).cpu()
        before, after = out[3 * 64 * 8 :].view(2, 64, columns).cpu()
        assert_equal("the scores", before, given)
        sure = torch.ones(64, dtype=torch.bool)
        if large is not None:
            sure[32:48] = False  # the warp of the large one; the others may have it as their answer, too
            assert not first[~sure].any()
            assert large != large or not second[~sure].any()
        if real == torch.float64:
            assert not first.any() and not second.any()
        elif large is None:
            assert first.all() and second.all()
        exact = factor * torch.tanh(scale * given.double())
        torch.testing.assert_close(
            after[second[:, 0] == 1], exact[second[:, 0] == 1].to(real), rtol=2e-6, atol=0, equal_nan=True
        )
        assert_equal("what was too large", after[second[:, 0] == 0], given[second[:, 0] == 0])
        taken, expected = first[:, 0] == 1, torch.exp2(exact - shift.double()[:, None])
        torch.testing.assert_close(sums[taken][:, 0].double(), expected[taken].sum(-1), rtol=1e-5, atol=0)
        rounding = 1e-5 + torch.finfo(dtype).eps / 2
        torch.testing.assert_close(weights[0, 0].cpu()[taken].double(), expected[taken], rtol=rounding, atol=1e-7)


@on_every_machine("terms")
def test_terms(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """Floats in every range come back from their terms to the last bits of the sum that they are in."""
    (columns,), device = sizes, machine.device
    x = integers(columns, 64)
    values = torch.randn(2, columns) * 10.0 ** torch.linspace(-6, 30, columns)[torch.randperm(columns)]
    values[0, :4] = torch.tensor([3e38, -3e38, 0.0, 1 / 3])
    values[1, 4:8] = torch.tensor(
        [float("inf"), float("-inf"), 3.4e38, -3.4e38]
    )  # what is beyond 3e38 counts as infinite
    values[0, 9], values[1, 10] = float("nan"), float("nan")
    pairs = poisoned(columns, 4, device=device, dtype=torch.float32)
    out = poisoned(3, 64, columns, device=device, dtype=torch.float32)
    tensors = [x[None, None].to(device, DTYPES[element]), values.to(device), pairs, out]
    for multiply in (0, 1):
        machine.run(name(family, element, sizes), tensors, [multiply])
    products = (x[:64] @ x.T).double()
    beyond = values.double().where(values.abs() <= 3e38, values.double() * float("inf"))
    both_nan = beyond.isnan().any(0)
    for i in range(2):
        exact = (products - beyond[i]).where(~both_nan, torch.tensor(float("nan"), dtype=torch.float64))
        # Tensor cores cut what they add off, by the largest summand.
        ours, size = out[i].cpu().double(), (x[:64].abs() @ x.abs().T + values[i].abs()).double()
        finite = exact.isfinite()
        assert torch.equal(ours.where(~finite, 0), exact.where(~finite, 0)) or torch.allclose(
            ours.where(~finite, 0), exact.where(~finite, 0), equal_nan=True
        )
        assert ((ours - exact).abs() <= 2e-6 * size + 1e-6)[finite].all()
    torch.testing.assert_close(out[2], out[0] + 10 * out[1], rtol=1e-6, atol=1e-6, equal_nan=True)


@on_every_machine("parts")
@pytest.mark.parametrize("rows", [-5, 0, 1, 7, 8, 9, 16, 63, 64, 100])
def test_parts_in_global_memory(machine: Machine, family: str, element: str, sizes: tuple[int, int], rows: int) -> None:
    (columns, width), dtype = sizes, DTYPES[element]
    kernel, parts = name(family, element, sizes), columns // width
    source = torch.randn(64, columns, device=machine.device, dtype=dtype)
    between = poisoned(64 * columns + 16, device=machine.device, dtype=dtype)
    out = poisoned(parts, 64, width, device=machine.device, dtype=dtype)
    machine.run(kernel, [source, between], [rows, 0])
    machine.run(kernel, [None, between, out], [rows, 1], grid=parts)
    expected = source.clone()
    expected[max(rows, 0) :] = 0
    assert_equal("taken", out.transpose(0, 1).reshape(64, columns), expected)
    assert_equal("behind the end", between[64 * columns :], poisoned(16, dtype=dtype))
