"""Every row of every configuration table, and every kernel on the checking flavour with several seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import CORNERS, check_gradients, check_result, inputs, leaves

import kittens_torch
from kittens_torch import dispatch, ops

SEEDS = (0, 1, 2, 3)
# (corner, window) classes: every key visible, and each kind of interval.
MASKS = [(None, None), ("upper_left", None), ("lower_right", None), (None, (20, 9)), ("lower_right", (30, None))]


def _forward(machine: str, configuration: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seed: int = 0, corner: int = 0):
        settings = (query.shape[-1] ** -0.5, corner, -1, -1, configuration)
        if machine == "checked":
            return ops.checked_forward(query, key, value, *settings, seed)
        return ops.forward(query, key, value, *settings)

    return run


def _rows(machine: str) -> list[int]:
    """The rows of a machine's table: forcing the first one beyond it is refused."""
    device = "cuda" if machine == "sm90" else "cpu"
    tensors = inputs(device, torch.bfloat16, length_q=1, head_dim=8)
    rows: list[int] = []
    while len(rows) < 100:
        try:
            _forward(machine, len(rows))(*tensors)
        except RuntimeError as error:
            assert f"configuration {len(rows)}" in str(error) and "no such row" in str(error)
            return rows
        rows.append(len(rows))
    raise AssertionError("the table has no end")


MACHINES = [("cpu", torch.float32), ("cpu", torch.bfloat16), ("checked", torch.bfloat16), ("checked", torch.float32)]
MACHINES += [("checked", torch.float16)]
machines = pytest.mark.parametrize(
    ("machine", "dtype"),
    [*MACHINES, *(pytest.param("sm90", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16))],
    ids=lambda value: str(value).removeprefix("torch."),
)


@machines
def test_every_row(machine: str, dtype: torch.dtype) -> None:
    rows = _rows(machine)
    assert rows
    if dispatch.has_plan():
        assert len(rows) == len(dispatch._plan.configurations("cpu" if machine == "cpu" else "sm90"))
    for row in rows:
        taken = 0
        for head_dim in (24, 64, 128, 256):
            for index, causal in enumerate(CORNERS):
                # Two row tiles of the tallest configuration, more keys than any ring of stages holds at 64.
                tensors = inputs(
                    "cuda" if machine == "sm90" else "cpu",
                    dtype,
                    heads=1,
                    length_q=200,
                    length_k=420,
                    head_dim=head_dim,
                )
                try:
                    output, logsumexp = _forward(machine, row)(*tensors, seed=row, corner=index)
                except RuntimeError as error:
                    assert "smaller head dim" in str(error), error
                    continue
                check_result(output, logsumexp, *tensors, causal=causal)
                taken += 1
        assert taken, f"row {row} of {machine} took no head dim"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_checked_machine(
    seed: int, causal: str | None, window: tuple[int | None, int | None] | None, head_dim: int
) -> None:
    query, key, value = inputs(
        "cpu", torch.bfloat16, heads=2, heads_k=1, length_q=193, length_k=260, head_dim=head_dim, value_dim=40
    )
    with kittens_torch.checked_machine(seed=seed):
        output, logsumexp = kittens_torch.attention(query, key, value, causal=causal, window=window, return_lse=True)
    check_result(output, logsumexp, query, key, value, causal=causal, window=window)


@pytest.mark.parametrize("seed", SEEDS)
def test_checked_machine_many_tiles(seed: int) -> None:
    """More row tiles than blocks, so that blocks fetch their next tile."""
    tensors = inputs("cpu", torch.bfloat16, batch=3, heads=3, length_q=70, head_dim=16)
    with kittens_torch.checked_machine(seed=seed):
        for causal in CORNERS:
            output, logsumexp = kittens_torch.attention(*tensors, causal=causal, return_lse=True)
            check_result(output, logsumexp, *tensors, causal=causal)


@pytest.mark.parametrize(("length_q", "length_k"), [(1, 1), (1, 130), (130, 1), (65, 64), (5, 0), (0, 5)])
@pytest.mark.parametrize("causal", CORNERS)
def test_checked_machine_edges(length_q: int, length_k: int, causal: str | None) -> None:
    tensors = inputs("cpu", torch.float16, length_q=length_q, length_k=length_k, head_dim=17, value_dim=9)
    with kittens_torch.checked_machine(seed=length_q + length_k):
        output, logsumexp = kittens_torch.attention(*tensors, causal=causal, return_lse=True)
    check_result(output, logsumexp, *tensors, causal=causal)


def test_seeds_change_no_result() -> None:
    tensors = inputs("cpu", torch.bfloat16, length_q=150, length_k=300)
    results = []
    for seed in SEEDS:
        with kittens_torch.checked_machine(seed=seed):
            results.append(kittens_torch.attention(*tensors, causal="lower_right"))
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.usefixtures("only_ours")
def test_context_reaches_the_drop_in_and_ends() -> None:
    """The context is what routes a call: another op runs inside, none of it is left outside, also after an error."""
    tensors = inputs("cpu", torch.float32, length_q=10, head_dim=8)
    with pytest.raises(RuntimeError, match="no such row"), kittens_torch.checked_machine(configuration=999):
        kittens_torch.scaled_dot_product_attention(*tensors)
    assert not ops.checking()
    output = kittens_torch.scaled_dot_product_attention(*tensors)
    with kittens_torch.checked_machine(seed=1):
        with kittens_torch.checked_machine(seed=2, configuration=0):
            inner = kittens_torch.scaled_dot_product_attention(*tensors)
        assert ops.checking()
    assert torch.allclose(inner, output, atol=1e-5)


def test_gradients_through_the_checked_machine() -> None:
    tensors = inputs("cpu", torch.float32, length_q=70, head_dim=16)
    operands = leaves(*tensors)
    with kittens_torch.checked_machine(seed=3):
        output = kittens_torch.attention(*operands, causal="upper_left")
    grad_output = torch.randn_like(output)
    grads = torch.autograd.grad(output, operands, grad_output)
    check_gradients(grads, *tensors, grad_output, causal="upper_left")


def test_float64_is_refused_by_name() -> None:
    """The checking flavour is built for the dtypes of the GPU and for float32."""
    tensors = inputs("cpu", torch.float64, length_q=5)
    with pytest.raises(RuntimeError, match="the checked machine has float16"), kittens_torch.checked_machine():
        kittens_torch.attention(*tensors)
