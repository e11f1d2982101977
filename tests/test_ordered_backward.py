"""Deterministic gradients from sums in a fixed order: tiles of keys take turns at adding to dQ (backward_turns.cuh).

A row of the table that is asked for sums also where rows are so short that dQ's owner would make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import CORNERS, check_gradients, inputs, normal, places
from torch import Tensor

from kittens_torch import backward, dispatch, ops

MASKS = [(0, -1, -1), (1, -1, -1), (2, -1, -1), (0, 70, 40), (2, 130, -1), (1, -1, 9), (2, 200, 0)]
rows = pytest.mark.parametrize(("head_dim", "row"), [(64, 0), (128, 1)])
Operands = tuple[Tensor, Tensor, Tensor]


def window_of(mask: tuple[int, int, int]) -> dict[str, Any]:
    return {"causal": CORNERS[mask[0]], "window": tuple(None if side < 0 else side for side in mask[1:])}


def run(
    tensors: Operands, grad_output: Tensor, mask: tuple[int, int, int], row: int, seed: int, deterministic: bool = True
) -> tuple[Tensor, ...]:
    scale = tensors[0].shape[-1] ** -0.5
    saved = ops.forward(*tensors, scale, *mask)
    needed = (True, True, True)
    return backward.checked_backward(
        grad_output, None, *tensors, *saved, scale, *mask, *needed, deterministic, row, seed
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With one thread the CTAs run one after the other, with two at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@rows
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("seed", range(3))
def test_values(head_dim: int, row: int, mask: tuple[int, int, int], seed: int) -> None:
    """Groups of three heads, lengths that are not whole tiles, more queries than keys and fewer."""
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed]
    for length_q, length_k in ((300, 521), (431, 130)):
        sizes = {"heads": 6, "heads_k": 2, "length_q": length_q, "length_k": length_k}
        tensors = inputs("cpu", dtype, **sizes, head_dim=head_dim, value_dim=head_dim - 8)
        grad_output = normal(1, 6, length_q, head_dim - 8, dtype=dtype)
        check_gradients(run(tensors, grad_output, mask, row, seed), *tensors, grad_output, **window_of(mask))


@rows
@pytest.mark.parametrize("mask", MASKS)
def test_order(head_dim: int, row: int, mask: tuple[int, int, int]) -> None:
    """The same bits with every seed, whether CTAs run at once or one after the other."""
    tensors = inputs("cpu", torch.bfloat16, heads=4, heads_k=2, length_q=333, length_k=650, head_dim=head_dim)
    grad_output = normal(1, 4, 333, head_dim, dtype=torch.bfloat16)
    results = []
    for count, seeds in ((2, range(4)), (1, range(4, 6))):
        with threads(count):
            results += [run(tensors, grad_output, mask, row, seed) for seed in seeds]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_any_order_differs() -> None:
    """What the tests above would find: without turns a CTA that begins late adds its tiles late."""
    tensors = inputs("cpu", torch.float32, length_q=300, length_k=650, head_dim=128)
    grad_output = normal(1, 2, 300, 128)
    with threads(1):
        in_order, any_order = (run(tensors, grad_output, (0, -1, -1), 1, 0, ordered) for ordered in (True, False))
    assert not torch.equal(in_order[0], any_order[0])
    torch.testing.assert_close(in_order, any_order)


def test_turns_of_many_problems() -> None:
    """A wrong turn is one that never comes, or is over: the checked machine says so."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for problem in range(60):
        length_q, length_k, head_dim = draw(1, 700), draw(1, 700), (64, 128)[problem % 2]
        mask = (draw(0, 3), draw(-1, 400) if draw(0, 2) else -1, draw(-1, 300) if draw(0, 2) else -1)
        tensors = inputs(
            "cpu",
            torch.bfloat16,
            heads=2,
            heads_k=1 + problem // 2 % 2,
            length_q=length_q,
            length_k=length_k,
            head_dim=head_dim,
        )
        grad_output = normal(1, 2, length_q, head_dim, dtype=torch.bfloat16)
        first = run(tensors, grad_output, mask, problem % 2, problem)
        again = run(tensors, grad_output, mask, problem % 2, problem + 1000)
        what = f"{length_q} queries, {length_k} keys, head dim {head_dim}, mask {mask}"
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), what


@pytest.mark.skipif(not dispatch.has_plan(), reason="built without the plan module")
def test_plan() -> None:
    """In order where the default sums; elsewhere, and where nobody asks, no turns."""
    sizes = {"batch": 2, "heads": 8, "heads_k": 4, "length_q": 4096, "length_k": 4096}
    problem = {"machine": "sm90", "dtype": "bfloat16", **sizes, "corner": 1, "window_left": -1, "window_right": -1}

    def plan(head_dim: int = 128, **others: Any) -> Any:
        return dispatch._plan.backward(**{**problem, "head_dim": head_dim, "value_dim": head_dim, **others})

    for head_dim, step in ((64, 128), (128, 64)):
        free, ordered = plan(head_dim), plan(head_dim, deterministic=True)
        assert free.sums_query and not free.in_order and ordered.sums_query and ordered.in_order
        assert ordered.workspace_values == free.workspace_values + 2 * 8 * 4096 // step
    narrow = {"corner": 2, "window_left": 50}
    for others in ({"head_dim": 256}, narrow, {"need_query": False}, {"scale": 1e30}, {"machine": "cpu"}):
        owned = plan(**others, deterministic=True)
        assert not owned.sums_query and not owned.in_order
        assert owned.workspace_values == plan(**others).workspace_values


# On the GPU

gpu_only = places()


@gpu_only
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [(0, -1, -1), (1, -1, -1), (2, 1500, -1), (0, 700, 900)])
def test_long_rows_repeat(device: str, dtype: torch.dtype, head_dim: int, mask: tuple[int, int, int]) -> None:
    """200 times 4096 keys, grouped heads, right and always the same."""
    tensors = inputs(device, dtype, batch=2, heads=8, heads_k=4, length_q=4096, head_dim=head_dim)
    grad_output = normal(2, 8, 4096, head_dim, device=device, dtype=dtype)
    scale = head_dim**-0.5
    saved = ops.forward(*tensors, scale, *mask)

    def gradients() -> tuple[Tensor, ...]:
        return backward.backward(grad_output, None, *tensors, *saved, scale, *mask, True, True, True, True)

    first = gradients()
    check_gradients(first, *tensors, grad_output, **window_of(mask))
    different = torch.zeros(3, dtype=torch.int64, device=device)
    for _ in range(200):
        different += torch.stack([(a != b).any() for a, b in zip(gradients(), first, strict=True)])
    assert not different.any(), f"of 200 repeats so many differ in query, key, value: {different.tolist()}"


@gpu_only
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("corner", [0, 1])
def test_neighbours_side_by_side(device: str, dtype: torch.dtype, head_dim: int, corner: int) -> None:
    """One head: every tile that runs waits for the one beside it."""
    tensors = inputs(device, dtype, heads=1, length_q=20000, head_dim=head_dim)
    grad_output = normal(1, 1, 20000, head_dim, device=device, dtype=dtype)
    settings = (head_dim**-0.5, corner, -1, -1)
    saved = ops.forward(*tensors, *settings)

    def gradients(deterministic: bool) -> tuple[Tensor, ...]:
        return backward.backward(grad_output, None, *tensors, *saved, *settings, True, True, True, deterministic)

    first = gradients(True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(True), first, strict=True))
    torch.testing.assert_close(first, gradients(False), atol=2e-3, rtol=2e-2)
