"""Few query rows against many keys: keys divided among CTAs, and the heads of a group as the rows of a tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import RATIOS, check_result, inputs, normal, places, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import attention, dispatch, explain, ops

needs_plan = pytest.mark.skipif(not dispatch.has_plan(), reason="the plan module was not built")
INF = float("inf")
CORNERS = {None: 0, "upper_left": 1, "lower_right": 2}
# One block of keys and less, edges of blocks and of ranges, ranges of several blocks, more ranges than blocks.
SPLITS = (1, 2, 3, 5, 40)
LENGTHS_K = (1, 64, 65, 127, 128, 129, 257, 640, 700)
HEAD_DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (17, 40)]
MACHINES = [("checked", torch.bfloat16), ("checked", torch.float16), ("checked", torch.float32)]
MACHINES += [("cpu", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]
machines = pytest.mark.parametrize(
    ("machine", "dtype"),
    [*MACHINES, *(pytest.param("sm90", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16))],
    ids=lambda value: str(value).removeprefix("torch."),
)


def run(
    machine: str, tensors: tuple[Tensor, Tensor, Tensor], splits: int, seed: int = 0, **keywords: Any
) -> tuple[Tensor, Tensor]:
    left, right = ((-1 if side is None else side) for side in (keywords.get("window") or (None, None)))
    settings = (tensors[0].shape[-1] ** -0.5, CORNERS[keywords.get("causal")], left, right, -1)
    if machine == "checked":
        return ops.checked_forward(*tensors, *settings, seed, splits)
    return ops.forward(*tensors, *settings, splits)


def device_of(machine: str) -> str:
    return "cuda" if machine == "sm90" else "cpu"


@machines
@pytest.mark.parametrize(("head_dim", "value_dim"), HEAD_DIMS)
def test_ranges(machine: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    """Every number of ranges, on both sides of the edges, for one row a head and for several."""
    for place, length_k in enumerate(LENGTHS_K):
        for splits in SPLITS:
            heads, heads_k, length_q = ((8, 2, 1), (2, 1, 3))[(place + splits) % 2]
            tensors = inputs(
                device_of(machine),
                dtype,
                heads=heads,
                heads_k=heads_k,
                length_q=length_q,
                length_k=length_k,
                head_dim=head_dim,
                value_dim=value_dim,
            )
            causal = (None, "lower_right")[place % 2]
            output, logsumexp = run(machine, tensors, splits, seed=place, causal=causal)
            check_result(output, logsumexp, *tensors, causal=causal)


@machines
@pytest.mark.parametrize(
    ("length_q", "length_k", "causal", "window"),
    [
        (70, 333, "lower_right", None),
        (70, 333, "upper_left", None),  # no row sees most of the keys
        (200, 300, "lower_right", (40, 3)),
        (100, 700, None, (300, 20)),
        (333, 70, "lower_right", None),  # rows that see no key
        (5, 3, "lower_right", None),
        (130, 257, None, None),
    ],
)
def test_ranges_under_masks(
    machine: str,
    dtype: torch.dtype,
    length_q: int,
    length_k: int,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
) -> None:
    for splits in SPLITS:
        for head_dim in (64, 72, 200):
            tensors = inputs(
                device_of(machine), dtype, heads_k=1, length_q=length_q, length_k=length_k, head_dim=head_dim
            )
            output, logsumexp = run(machine, tensors, splits, seed=splits, causal=causal, window=window)
            check_result(output, logsumexp, *tensors, causal=causal, window=window)


@usual_place
@pytest.mark.parametrize("causal", CORNERS)
@pytest.mark.parametrize("ratio", [*RATIOS, 4])
def test_heads_as_rows(device: str, dtype: torch.dtype, ratio: int, causal: str | None) -> None:
    """The plan's own choice, in every layout of the query, which the output shares."""
    query, key, value = inputs(device, dtype, batch=2, heads=2 * ratio, heads_k=2, length_q=1, length_k=900)
    expected = attention(query, key, value, causal=causal, return_lse=True)
    check_result(*expected, query, key, value, causal=causal)
    strided = query.new_zeros(2, 3, 2 * ratio, 64)[:, 1:2].transpose(1, 2)
    strided.copy_(query)
    wide = query.new_zeros(2, 2 * ratio, 1, 67)[..., 1:65]
    wide.copy_(query)
    permuted = query.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    for same in (strided, wide, permuted, query.transpose(1, 2).contiguous().transpose(1, 2)):
        output, logsumexp = attention(same, key, value, causal=causal, return_lse=True)
        assert torch.equal(output, expected[0]) and torch.equal(logsumexp, expected[1])
    one_head = query[:, :1].expand(-1, 2 * ratio, -1, -1)
    check_result(*attention(one_head, key, value, causal=causal, return_lse=True), one_head, key, value, causal=causal)


@machines
def test_one_row_in_a_window(machine: str, dtype: torch.dtype) -> None:
    """One row sees an interval, and nothing outside of it is read."""
    tensors = inputs(device_of(machine), dtype, heads=6, heads_k=2, length_q=1, length_k=500)
    for window, seen in (((99, None), slice(400, 500)), ((300, 0), slice(199, 500)), ((0, 0), slice(499, 500))):
        query, *hidden = (tensor.clone() for tensor in tensors)
        for tensor in hidden:
            tensor[:, :, : seen.start] = float("nan")
        for splits in (-1, 0, 1, 3):
            output, logsumexp = run(machine, (query, *hidden), splits, window=window, causal="lower_right")
            check_result(output, logsumexp, query, *(tensor[:, :, seen] for tensor in tensors[1:]))


@usual_place
@pytest.mark.parametrize(("heads", "heads_k"), [(8, 2), (4, 4), (64, 1)])
@pytest.mark.parametrize("length_q", [1, 3])
@pytest.mark.parametrize("length_k", [100, 1500])
def test_sinks(device: str, dtype: torch.dtype, heads: int, heads_k: int, length_q: int, length_k: int) -> None:
    query, key, value = inputs(
        device, dtype, batch=2, heads=heads, heads_k=heads_k, length_q=length_q, length_k=length_k
    )
    sinks = normal(2 * heads, device=device) * 3
    sinks[4] = -INF
    for given in (sinks[:heads], sinks[::2]):
        output, logsumexp = attention(query, key, value, sinks=given, causal="lower_right", return_lse=True)
        check_result(output, logsumexp, query, key, value, sinks=given, causal="lower_right")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("heads", [4, 1])
def test_sinks_on_the_checked_machine(seed: int, heads: int) -> None:
    query, key, value = inputs("cpu", torch.bfloat16, heads=heads, heads_k=1, length_q=1, length_k=3000)
    sinks = normal(heads) * 3
    with kittens_torch.checked_machine(seed=seed):
        output, logsumexp = attention(query, key, value, sinks=sinks, return_lse=True)
        if dispatch.has_plan():
            plan = explain(query, key, value, sinks=sinks, function=attention)
            assert plan.splits and plan.heads_as_rows == (heads > 1)
    check_result(output, logsumexp, query, key, value, sinks=sinks)


@machines
def test_nan_and_infinity(machine: str, dtype: torch.dtype) -> None:
    """What is visible reaches the rows that see it, and no others, whichever range it is in."""
    query, key, value = inputs(device_of(machine), dtype, heads=4, heads_k=1, length_q=1, length_k=600)
    for place in (0, 300, 599):
        spoiled = query.clone()
        spoiled[0, 2, 0, 5] = float("nan")
        output, logsumexp = run(machine, (spoiled, key, value), 3)
        assert output[0, 2].isnan().all() and logsumexp[0, 2].isnan().all()
        assert output[0, [0, 1, 3]].isfinite().all() and logsumexp[0, [0, 1, 3]].isfinite().all()
        spoiled = key.clone()
        spoiled[0, 0, place, 7] = float("nan")
        output, logsumexp = run(machine, (query, spoiled, value), 3)
        assert output.isnan().all() and logsumexp.isnan().all()
        spoiled = value.clone()
        spoiled[0, 0, place, 7] = INF
        output, logsumexp = run(machine, (query, key, spoiled), 3)
        assert (output[..., 7] == INF).all() and output[..., :7].isfinite().all() and logsumexp.isfinite().all()
        spike = key.clone()  # a score so large that the other ranges vanish
        spike[0, 0, place] = query[0, 0, 0] * 100
        output, logsumexp = run(machine, (query, spike, value), 3)
        assert output.isfinite().all() and logsumexp.isfinite().all()
        torch.testing.assert_close(output[0, 0, 0], value[0, 0, place], atol=1e-2, rtol=1e-2)


@machines
def test_repeats(machine: str, dtype: torch.dtype) -> None:
    tensors = inputs(device_of(machine), dtype, batch=2, heads=8, heads_k=2, length_q=1, length_k=2000)
    output, logsumexp = run(machine, tensors, 5)
    for seed in range(5):
        again, again_logsumexp = run(machine, tensors, 5, seed=seed)
        assert torch.equal(again, output) and torch.equal(again_logsumexp, logsumexp)


@places(torch.float32)
@pytest.mark.parametrize("splits", [-2, 1025])
def test_number_of_ranges_is_checked(device: str, dtype: torch.dtype, splits: int) -> None:
    tensors = inputs(device, dtype if device == "cpu" else torch.bfloat16, length_q=1, length_k=10)
    with pytest.raises(RuntimeError, match=f"splits must be from -1 to 1024, got {splits}"):
        ops.forward(*tensors, 1.0, 0, -1, -1, -1, splits)


@usual_place
def test_gradients(device: str, dtype: torch.dtype) -> None:
    """The backward takes output and logsumexp as it takes those of any call."""
    tensors = inputs(device, dtype, heads=8, heads_k=2, length_q=1, length_k=1500)
    query, key, value = (tensor.requires_grad_() for tensor in tensors)
    output = attention(query, key, value)
    grads = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected, _ = kittens_torch.reference.attention(*exact)
    for ours, right in zip(grads, torch.autograd.grad(expected, exact, torch.ones_like(expected)), strict=True):
        torch.testing.assert_close(ours.double(), right, atol=2e-2, rtol=2e-2)


PROBLEM: dict[str, Any] = {"machine": "sm90", "dtype": "bfloat16", "batch": 1, "heads": 32, "heads_k": 8}
PROBLEM |= {"length_q": 1, "length_k": 8192, "corner": 0, "window_left": -1, "window_right": -1}


def plan_of(head_dim: int = 128, **changes: Any) -> Any:
    return dispatch._plan.forward(**{**PROBLEM, "head_dim": head_dim, "value_dim": head_dim, **changes})


@needs_plan
@pytest.mark.parametrize("machine", ["sm90", "cpu"])
@pytest.mark.parametrize(("head_dim", "row"), [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (192, 2), (256, 2)])
def test_plan_takes_every_row(machine: str, head_dim: int, row: int) -> None:
    plan = plan_of(head_dim, machine=machine)
    assert plan.kernel == f"split_forward_{machine}" and plan.configuration == row and plan.heads_as_rows
    table = dispatch._plan.configurations(machine, split=True)
    assert table[row] == (*table[row][:2], plan.block_m, plan.block_n, plan.stages, True) and len(table) == 3
    assert plan.splits > 1 and plan.grid == 8 * plan.splits <= 132
    assert plan.workspace_values == plan.grid * 64 * (table[row][1] + 1)


@needs_plan
def test_plan_divides_where_multiprocessors_would_be_idle() -> None:
    assert plan_of(batch=64).splits == 0 and plan_of(batch=64).heads_as_rows  # 512 tiles
    assert plan_of(heads=132, heads_k=132).splits == 0
    assert plan_of(length_k=128).splits == 0  # one block of keys
    assert 1 < plan_of(length_k=1024).splits <= 8  # no more ranges than blocks
    assert 60 < plan_of(heads=1, heads_k=1, length_k=2**20).splits <= 132
    assert plan_of(length_q=4, corner=2).splits > 1 and not plan_of(length_q=4).heads_as_rows
    assert plan_of(heads=8, length_q=4096, length_k=4096).splits == 0
    assert plan_of(heads=8, length_q=256, length_k=32768).splits > 1  # a chunk of a long prompt
    assert plan_of(configuration=3).splits == 0 and not plan_of(configuration=3).heads_as_rows
    assert plan_of(modified=True).splits == 0 and not plan_of(modified=True).heads_as_rows
    assert plan_of(window_left=100).splits == 0  # one block is visible
    # Only what puts ranges together knows a sink for each row.
    assert plan_of(batch=64, sinks=True).splits == 1 and plan_of(batch=64, sinks=True).heads_as_rows
    assert plan_of(batch=1024, sinks=True).splits == 0 and not plan_of(batch=1024, sinks=True).heads_as_rows
    assert plan_of(splits=7).splits == 7 and plan_of(splits=0).splits == 0


@needs_plan
def test_explain_says_it() -> None:
    query, key, value = inputs("cpu", torch.bfloat16, heads=4, heads_k=1, length_q=1, length_k=4096)
    with kittens_torch.checked_machine():
        plan = explain(query, key, value, function=attention)
        assert plan.kernel == "split_forward_sm90" and plan.splits == plan.grid == 2
        text = str(plan)
        assert f"in {plan.splits} ranges" in text and "the query heads of a key head" in text
        long = explain(*inputs("cpu", torch.bfloat16, length_q=400), function=attention)
        assert long.splits == 0 and not long.heads_as_rows and "ranges" not in str(long)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("batch", "heads_k", "length_k"), [(1, 8, 4096), (2, 2, 70000), (8, 1, 300)])
def test_steps_that_follow_each_other(head_dim: int, batch: int, heads_k: int, length_k: int) -> None:
    """Each step reads what the one before it wrote: with a synchronisation between them, without, and in a graph."""
    query, key, value = (
        normal(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((4 * heads_k, 1), (heads_k, length_k), (heads_k, length_k))
    )

    def steps(synchronised: bool) -> Tensor:
        state = query
        for _ in range(8):
            state = attention(state, key, value) * length_k**0.5
            if synchronised:
                torch.cuda.synchronize()
        return state

    exact = steps(True)
    assert exact.isfinite().all() and torch.equal(steps(False), exact)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = steps(False)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, exact)


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    tensors = inputs("cuda", torch.bfloat16, heads=8, heads_k=2, length_q=1, length_k=5000)
    attention(*tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
