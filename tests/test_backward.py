"""The backward ops: every row of their tables on every machine, needs, layouts, determinism, and what they refuse.

tests/test_gradients.py holds the same kernels through autograd.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import CORNERS, LENGTHS, RATIOS, check_gradients, every_place, inputs, leaves, normal, places, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import backward, dispatch, ops

SEEDS = (0, 1, 2, 3)
MASKS = [(0, -1, -1), (1, -1, -1), (2, -1, -1), (0, 20, 9), (2, 30, -1), (0, -1, 5)]
ALL = (True, True, True)
gpu_only = places()


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grads_in(query: Tensor, value: Tensor, with_logsumexp: bool = False) -> tuple[Tensor, Tensor | None]:
    """Standard normal gradients of the output and, if asked for, of the logsumexp."""
    grad_output = normal(*query.shape[:3], value.shape[3], device=query.device, dtype=query.dtype)
    if not with_logsumexp:
        return grad_output, None
    return grad_output, normal(*query.shape[:3], device=query.device, dtype=_real(query.dtype))


def _poison(device: str) -> None:
    """Leaves NaN in the memory that torch's CUDA allocator hands out next."""
    if device == "cuda":
        blocks = [torch.full((1 << size,), float("nan"), device=device) for size in range(8, 25)]
        del blocks


def _backward(
    tensors: tuple[Tensor, Tensor, Tensor],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None = None,
    mask: tuple[int, int, int] = (0, -1, -1),
    needed: tuple[bool, bool, bool] = ALL,
    deterministic: bool = False,
    configuration: int = -1,
    seed: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the op; of the checking flavour where a seed is given."""
    scale = tensors[0].shape[-1] ** -0.5
    saved = ops.forward(*tensors, scale, *mask)
    _poison(tensors[0].device.type)
    arguments = (grad_output, grad_logsumexp, *tensors, *saved, scale, *mask, *needed, deterministic, configuration)
    return backward.backward(*arguments) if seed is None else backward.checked_backward(*arguments, seed)


def _check(
    tensors: tuple[Tensor, Tensor, Tensor],
    with_logsumexp: bool = False,
    mask: tuple[int, int, int] = (0, -1, -1),
    **keywords: Any,
) -> None:
    grad_output, grad_logsumexp = _grads_in(tensors[0], tensors[2], with_logsumexp)
    ours = _backward(tensors, grad_output, grad_logsumexp, mask, **keywords)
    corner, *sides = mask
    window = tuple(None if side < 0 else side for side in sides)
    check_gradients(ours, *tensors, grad_output, grad_logsumexp, causal=CORNERS[corner], window=window)


# Every kernel


MACHINES = [("cpu", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
MACHINES += [("checked", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
machines = pytest.mark.parametrize(
    ("machine", "dtype"),
    [*MACHINES, *(pytest.param("sm90", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16))],
    ids=lambda value: str(value).removeprefix("torch."),
)


@machines
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_row(machine: str, dtype: torch.dtype, deterministic: bool) -> None:
    device = "cuda" if machine == "sm90" else "cpu"
    for row in itertools.count():
        taken = 0
        for head_dim in (24, 64, 128, 192, 256):
            # A tile of keys and part of one, several steps of queries and part of one, two heads to a group.
            tensors = inputs(
                device,
                dtype,
                heads=2,
                heads_k=1,
                length_q=200,
                length_k=150,
                head_dim=head_dim,
                value_dim=min(head_dim, 128),
            )
            for corner in range(3):
                try:
                    _check(
                        tensors,
                        mask=(corner, -1, -1),
                        deterministic=deterministic,
                        configuration=row,
                        seed=row if machine == "checked" else None,
                    )
                except RuntimeError as error:
                    if "no such row" in str(error):
                        assert row >= 3 and f"configuration {row}" in str(error)
                        return
                    assert "smaller head dim" in str(error), error
                    continue
                taken += 1
        assert taken, f"row {row} of {machine} took no head dim"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "configuration"), [(64, 0), (128, 1), (256, 4)])
def test_checked_machine(seed: int, mask: tuple[int, int, int], head_dim: int, configuration: int) -> None:
    """More tiles of keys and of queries than blocks, and a group of three heads. dQ is summed, in order or not, or its
    owner's.

    A configuration that is asked for adds up dQ in memory also where rows are so short that the plan would not.
    """
    tensors = inputs(
        "cpu", torch.bfloat16, heads=3, heads_k=1, length_q=150, length_k=270, head_dim=head_dim, value_dim=40
    )
    for row, deterministic in ((configuration, False), (configuration, True), (-1, False)):
        _check(tensors, True, mask, deterministic=deterministic, configuration=row, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_checked_machine_value_dim_of_its_own(seed: int) -> None:
    tensors = inputs("cpu", torch.bfloat16, heads=2, length_q=130, length_k=140, head_dim=192, value_dim=128)
    _check(tensors, mask=(1, -1, -1), seed=seed)


@pytest.mark.parametrize(("length_q", "length_k"), [(1, 1), (1, 130), (130, 1), (65, 64), (5, 0), (0, 5)])
@pytest.mark.parametrize("corner", range(3))
def test_checked_machine_edges(length_q: int, length_k: int, corner: int) -> None:
    tensors = inputs("cpu", torch.float16, length_q=length_q, length_k=length_k, head_dim=17, value_dim=9)
    _check(tensors, True, (corner, -1, -1), seed=length_q + length_k)


def test_seeds_change_no_deterministic_result() -> None:
    tensors = inputs("cpu", torch.bfloat16, length_q=150, length_k=200)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    first, *others = (_backward(tensors, grad_output, deterministic=True, seed=seed) for seed in SEEDS)
    assert all(torch.equal(a, b) for other in others for a, b in zip(other, first, strict=True))


# The plan


@pytest.mark.skipif(not dispatch.has_plan(), reason="built without the plan module")
def test_plan() -> None:
    """Who makes dQ, the workspace that follows from it, and that every row fits a CTA's shared memory."""
    problem = {
        "machine": "sm90",
        "dtype": "bfloat16",
        "batch": 2,
        "heads": 8,
        "heads_k": 4,
        "head_dim": 128,
        "value_dim": 128,
    }
    no_window = {"window_left": -1, "window_right": -1}
    for length, corner, sums in ((100, 0, False), (1024, 0, True), (512, 1, False), (4096, 1, True)):
        plan = dispatch._plan.backward(**problem, length_q=length, length_k=length, corner=corner, **no_window)
        rows = 2 * 8 * (-(-length // plan.block_q) * plan.block_q)
        assert plan.sums_query == sums and plan.workspace_values == rows * (4 + (128 if sums else 2))
    long = dict(length_q=4096, length_k=4096, corner=0, **no_window)
    for without, values in (({"scale": 1e30}, 2), ({"need_query": False}, 4), ({"need_keys": False}, 2)):
        plan = dispatch._plan.backward(**problem, **long, **without)
        assert not plan.sums_query and plan.workspace_values == 2 * 8 * 4096 * values
    narrow = {"length_q": 4096, "length_k": 4096, "corner": 2, "window_left": 50, "window_right": -1}
    assert not dispatch._plan.backward(**problem, **narrow).sums_query
    for machine in ("sm90", "cpu"):
        for row, (head_dim, value_dim, *_) in enumerate(dispatch._plan.backward_configurations(machine)):
            shape = {**problem, "machine": machine, "head_dim": head_dim, "value_dim": value_dim}
            plan = dispatch._plan.backward(**shape, **long, configuration=row)
            assert plan.configuration == row and 0 < plan.shared_bytes <= 227 * 1024


# Shapes


@usual_place
@pytest.mark.parametrize("corner", range(3))
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(device: str, dtype: torch.dtype, length: int, corner: int) -> None:
    for head_dim in (32, 128):
        _check(inputs(device, dtype, length_q=length, length_k=100, head_dim=head_dim), mask=(corner, -1, -1))
        if length > 1:  # with one key the weights are constant: dQ and dK are 0, and all that one gets is rounding
            _check(inputs(device, dtype, length_q=90, length_k=length, head_dim=head_dim), mask=(corner, -1, -1))


@every_place
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(1, 1), (8, 64), (72, 40), (100, 100), (129, 8), (192, 128), (200, 256)]
)
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    _check(inputs(device, dtype, length_q=70, length_k=90, head_dim=head_dim, value_dim=value_dim), True, (2, -1, -1))


@usual_place
@pytest.mark.parametrize("ratio", RATIOS)
def test_grouped_heads(device: str, dtype: torch.dtype, ratio: int) -> None:
    _check(inputs(device, dtype, batch=2, heads=2 * ratio, heads_k=2, length_q=70, head_dim=32), mask=(1, -1, -1))


@usual_place
@pytest.mark.parametrize("window", [(0, 0), (5, -1), (-1, 5), (3, 9), (130, 0), (4096, 4096)])
@pytest.mark.parametrize("corner", range(3))
def test_windows(device: str, dtype: torch.dtype, window: tuple[int, int], corner: int) -> None:
    for length_q, length_k in ((300, 300), (60, 290), (290, 60)):
        _check(inputs(device, dtype, length_q=length_q, length_k=length_k, head_dim=24), mask=(corner, *window))


@gpu_only
def test_many_tiles_and_long_rows(device: str, dtype: torch.dtype) -> None:
    for head_dim in (64, 128, 256):
        for corner in range(3):
            _check(
                inputs(device, dtype, batch=3, heads=16, heads_k=8, length_q=900, length_k=1100, head_dim=head_dim),
                mask=(corner, -1, -1),
            )


# What is asked for


@every_place
def test_only_what_is_asked_for(device: str, dtype: torch.dtype) -> None:
    tensors = inputs(device, dtype, heads=4, heads_k=2, length_q=130, head_dim=64)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    full = _backward(tensors, grad_output, mask=(1, -1, -1), deterministic=True)
    for needed in itertools.product((False, True), repeat=3):
        some = _backward(tensors, grad_output, mask=(1, -1, -1), needed=needed, deterministic=True)
        for gradient, wanted, expected in zip(some, needed, full, strict=True):
            assert torch.equal(gradient, expected) if wanted else gradient.shape == (0,)
        if not all(needed[1:]) or not needed[0]:
            continue
        check_gradients(_backward(tensors, grad_output), *tensors, grad_output)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_checked_machine_makes_only_what_is_asked_for(head_dim: int) -> None:
    tensors = inputs("cpu", torch.bfloat16, length_q=70, length_k=150, head_dim=head_dim)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    full = _backward(tensors, grad_output, seed=0)
    for needed in itertools.product((False, True), repeat=3):
        some = _backward(tensors, grad_output, needed=needed, seed=0)
        for gradient, wanted, expected in zip(some, needed, full, strict=True):
            assert torch.equal(gradient, expected) if wanted else gradient.shape == (0,)


@every_place
def test_gradient_of_the_logsumexp_alone(device: str, dtype: torch.dtype) -> None:
    tensors = inputs(device, dtype, length_q=70, length_k=50, head_dim=40, value_dim=24)
    _, grad_logsumexp = _grads_in(tensors[0], tensors[2], True)
    ours = _backward(tensors, None, grad_logsumexp, (2, -1, -1))
    assert not ours[2].any()
    nothing = torch.zeros(1, 2, 70, 24, device=device, dtype=dtype)
    check_gradients(ours, *tensors, nothing, grad_logsumexp, causal="lower_right")


@usual_place
@pytest.mark.parametrize(("length_q", "length_k"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_multiply(device: str, dtype: torch.dtype, length_q: int, length_k: int) -> None:
    tensors = inputs(device, dtype, length_q=length_q, length_k=length_k, head_dim=16)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    for gradient, operand in zip(_backward(tensors, grad_output), tensors, strict=True):
        assert gradient.shape == operand.shape and not gradient.any()
    no_batch = tuple(tensor[:0] for tensor in tensors)
    for gradient in _backward(no_batch, grad_output[:0]):
        assert gradient.numel() == 0


@usual_place
def test_keys_that_no_row_sees(device: str, dtype: torch.dtype) -> None:
    """Their gradients are 0, and NaN in them reaches nothing."""
    query, key, value = inputs(device, dtype, length_q=20, length_k=300, head_dim=64)
    grad_output, _ = _grads_in(query, value)
    for mask, seen in (((1, -1, -1), slice(0, 20)), ((2, 30, -1), slice(250, 300))):
        clean = _backward((query, key, value), grad_output, mask=mask)
        poisoned = [torch.full_like(tensor, float("nan")) for tensor in (key, value)]
        for tensor, like in zip(poisoned, (key, value), strict=True):
            tensor[:, :, seen] = like[:, :, seen]
        ours = _backward((query, *poisoned), grad_output, mask=mask)
        assert all(torch.equal(a, b) for a, b in zip(ours, clean, strict=True))
        for gradient in ours[1:]:
            assert gradient[:, :, seen].any()
            gradient[:, :, seen] = 0
            assert not gradient.any()


@usual_place
def test_rows_without_a_key(device: str, dtype: torch.dtype) -> None:
    """Their dQ is 0 whatever comes back to them."""
    tensors = inputs(device, dtype, length_q=90, length_k=20, head_dim=32)
    grad_output, grad_logsumexp = _grads_in(tensors[0], tensors[2], True)
    expected = _backward(tensors, grad_output, grad_logsumexp, (2, -1, -1))
    assert not expected[0][:, :, :70].any() and expected[0][:, :, 70:].any()
    grad_logsumexp[:, :, :70] = float("nan")
    ours = _backward(tensors, grad_output, grad_logsumexp, (2, -1, -1))
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


# Memory


def _in_form(tensor: Tensor, form: str) -> Tensor:
    """The same values in other memory: not contiguous, or where TMA cannot read."""
    batch, heads, length, columns = tensor.shape
    if form == "length before heads":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "last stride":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if form == "sliced":
        wide = tensor.new_full((batch, heads, length + 3, columns + 9), float("nan"))
        inside = wide[:, :, 2 : 2 + length, 5 : 5 + columns]
        return inside.copy_(tensor)
    flat = tensor.new_empty(tensor.numel() + 1)
    return flat[1:].copy_(tensor.flatten()).view(tensor.shape)


@usual_place
@pytest.mark.parametrize("form", ["length before heads", "last stride", "sliced", "misaligned"])
@pytest.mark.parametrize("moved", ["inputs", "grad_output"])
def test_layouts(device: str, dtype: torch.dtype, form: str, moved: str) -> None:
    """Bit for bit what contiguous tensors give; a gradient lies in memory as its input does."""
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=70, length_k=90, head_dim=72, value_dim=40)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    expected = _backward(tensors, grad_output, mask=(2, -1, -1), deterministic=True)
    if moved == "inputs":
        tensors = tuple(_in_form(tensor, form) for tensor in tensors)
    else:
        grad_output = _in_form(grad_output, form)
    ours = _backward(tensors, grad_output, mask=(2, -1, -1), deterministic=True)
    for gradient, same, operand in zip(ours, expected, tensors, strict=True):
        assert torch.equal(gradient, same)
        assert gradient.stride() == torch.empty_like(ops.empty_in_layout_of(operand, operand.shape, 4)).stride()


@usual_place
@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 1), (2,), (3,)])
def test_expanded_gradients(device: str, dtype: torch.dtype, dims: tuple[int, ...]) -> None:
    """Of a sum, of a mean over rows, and so on: one value for many, with stride 0."""
    tensors = inputs(device, dtype, batch=2, heads=2, length_q=70, head_dim=64)
    shape = [1 if dim in dims else size for dim, size in enumerate((2, 2, 70, 64))]
    grad_output = normal(*shape, device=device, dtype=dtype).expand(2, 2, 70, 64)
    ours = _backward(tensors, grad_output, deterministic=True)
    expected = _backward(tensors, grad_output.contiguous(), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    grad_logsumexp = torch.full((), 0.5, device=device).expand(2, 2, 70)
    ours = _backward(tensors, grad_output, grad_logsumexp, deterministic=True)
    expected = _backward(tensors, grad_output, grad_logsumexp.contiguous(), deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@gpu_only
def test_workspace(device: str, dtype: torch.dtype) -> None:
    """Beside the gradients: 16 bytes a row, float sums for dQ and, where they are in order, a number for each step."""
    tensors = inputs(device, dtype, heads=8, length_q=4096, head_dim=128)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    scale = 128**-0.5
    saved = ops.forward(*tensors, scale, 1, -1, -1)
    rows = 8 * 4096
    for deterministic, workspace in ((False, rows * (128 + 4) * 4), (True, rows * (128 + 4) * 4 + rows // 64 * 4)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = backward.backward(grad_output, None, *tensors, *saved, scale, 1, -1, -1, *ALL, deterministic)
        outputs = sum(gradient.numel() * gradient.element_size() for gradient in grads)
        assert torch.cuda.max_memory_allocated() - before <= outputs + workspace + 4096
        del grads


# The same bit for bit


@usual_place
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_deterministic_gradients_repeat(device: str, dtype: torch.dtype, head_dim: int) -> None:
    long = 1000 if device == "cuda" else 150
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=long, head_dim=head_dim)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    first = _backward(tensors, grad_output, mask=(1, -1, -1), deterministic=True)
    for _ in range(200 if device == "cuda" else 5):
        again = _backward(tensors, grad_output, mask=(1, -1, -1), deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@usual_place
def test_key_and_value_gradients_always_repeat(device: str, dtype: torch.dtype) -> None:
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=400, head_dim=64)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    first = _backward(tensors, grad_output, mask=(1, -1, -1))
    for _ in range(20):
        again = _backward(tensors, grad_output, mask=(1, -1, -1))
        assert all(torch.equal(a, b) for a, b in zip(again[1:], first[1:], strict=True))


@pytest.mark.parametrize(("argument", "global_switch"), [(True, False), (False, True), (None, True), (None, False)])
def test_who_asks_for_determinism(monkeypatch: pytest.MonkeyPatch, argument: bool | None, global_switch: bool) -> None:
    asked: list[bool] = []
    op = backward.backward

    def watching(*arguments: Any) -> tuple[Tensor, ...]:
        asked.append(arguments[-1])
        return op(*arguments)

    monkeypatch.setattr(backward, "backward", watching)
    operands = leaves(*inputs("cpu", torch.float32, length_q=10, head_dim=8))
    before = torch.are_deterministic_algorithms_enabled()
    output = kittens_torch.attention(*operands, deterministic=argument)
    torch.use_deterministic_algorithms(global_switch)
    try:
        output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert asked == [bool(argument) or global_switch]


@gpu_only
def test_graph_capture(device: str, dtype: torch.dtype) -> None:
    """Replays on other values give what eager calls give, masked problems with many tiles included."""
    tensors = inputs(device, dtype, batch=2, heads=16, length_q=1100, head_dim=64)
    grad_output, _ = _grads_in(tensors[0], tensors[2])
    for mask in MASKS[:3]:
        _backward(tensors, grad_output, mask=mask, deterministic=True)
        graph = torch.cuda.CUDAGraph()
        scale = 64**-0.5
        with torch.cuda.graph(graph):
            saved = ops.forward(*tensors, scale, *mask)
            captured = backward.backward(grad_output, None, *tensors, *saved, scale, *mask, *ALL, True)
        for _ in range(3):
            for tensor in tensors:
                tensor.normal_()
            graph.replay()
            expected = _backward(tensors, grad_output, mask=mask, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


# What is refused


def test_refusals_name_the_argument() -> None:
    tensors = inputs("cpu", torch.float32, length_q=10, head_dim=8)
    output, logsumexp = ops.forward(*tensors, 0.5, 0, -1, -1)

    def call(grad_output: Tensor, grad_logsumexp: Tensor | None = None, saved: Any = (output, logsumexp)) -> None:
        backward.backward(grad_output, grad_logsumexp, *tensors, *saved, 0.5, 0, -1, -1, *ALL)

    with pytest.raises(RuntimeError, match=r"grad_output must have shape \(1, 2, 10, 8\), got \(1, 2, 9, 8\)"):
        call(output[:, :, :9])
    with pytest.raises(RuntimeError, match="grad_output: its dtype"):
        call(output.double())
    with pytest.raises(RuntimeError, match=r"grad_logsumexp must have shape \(1, 2, 10\), got \(1, 2, 10, 1\)"):
        call(output, logsumexp.unsqueeze(-1))
    with pytest.raises(RuntimeError, match="grad_logsumexp: its dtype"):
        call(output, logsumexp.double())
    with pytest.raises(RuntimeError, match="output must have shape"):
        call(output, saved=(output[..., :7], logsumexp))
    with pytest.raises(RuntimeError, match="logsumexp must have shape"):
        call(output, saved=(output, logsumexp[:, :1]))
    with pytest.raises(RuntimeError, match=r"configuration 99: .* no such row"):
        _backward(tensors, output, configuration=99)
    with pytest.raises(RuntimeError, match="dtype is not compiled"):
        wide = tuple(tensor.double() for tensor in tensors)
        _backward(wide, output.double(), seed=0)


def test_context_of_the_checked_machine_reaches_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    op = backward.checked_backward

    def watching(*arguments: Any) -> tuple[Tensor, ...]:
        seeds.append(arguments[-1])
        return op(*arguments)

    monkeypatch.setattr(backward, "checked_backward", watching)
    tensors = inputs("cpu", torch.float32, length_q=70, head_dim=16)
    operands = leaves(*tensors)
    with kittens_torch.checked_machine(seed=7):
        output = kittens_torch.attention(*operands)
        grads = torch.autograd.grad(output, operands, torch.ones_like(output), retain_graph=True)
    torch.autograd.grad(output, operands, torch.ones_like(output))
    assert seeds == [7]
    check_gradients(grads, *tensors, torch.ones_like(output))
