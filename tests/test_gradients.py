"""Gradients of output and logsumexp, against float64."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers import CORNERS, LENGTHS, check_gradients, every_place, inputs, leaves, normal, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import autograd, backward, ops

pytestmark = pytest.mark.usefixtures("only_ours")
corners = pytest.mark.parametrize("causal", CORNERS)


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    grad_logsumexp: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, ...]:
    operands = leaves(query, key, value)
    output, logsumexp = kittens_torch.attention(*operands, return_lse=True, **keywords)
    if grad_logsumexp is None:
        return torch.autograd.grad(output, operands, grad_output)
    return torch.autograd.grad([output, logsumexp], operands, [grad_output, grad_logsumexp])


def _check(query: Tensor, key: Tensor, value: Tensor, with_logsumexp: bool = False, **keywords: Any) -> None:
    shape = (*query.shape[:3], value.shape[3])
    grad_output = normal(*shape, device=query.device, dtype=query.dtype)
    grad_logsumexp = None
    if with_logsumexp:
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        grad_logsumexp = normal(*query.shape[:3], device=query.device, dtype=dtype)
    ours = _gradients(query, key, value, grad_output, grad_logsumexp, **keywords)
    check_gradients(ours, query, key, value, grad_output, grad_logsumexp, **keywords)


@usual_place
@corners
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(device: str, dtype: torch.dtype, length: int, causal: str | None) -> None:
    _check(*inputs(device, dtype, length_q=length, head_dim=32), causal=causal)


@every_place
@corners
@pytest.mark.parametrize("with_logsumexp", [False, True])
@pytest.mark.parametrize(("length_q", "length_k"), [(70, 40), (40, 70), (1, 9), (9, 1)])
def test_dtypes_and_logsumexp(
    device: str, dtype: torch.dtype, length_q: int, length_k: int, with_logsumexp: bool, causal: str | None
) -> None:
    tensors = inputs(device, dtype, batch=2, length_q=length_q, length_k=length_k, head_dim=32, value_dim=24)
    _check(*tensors, with_logsumexp, causal=causal)


@usual_place
@pytest.mark.parametrize("head_dim", [1, 65, 72, 80, 100, 127, 129, 192, 256])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int) -> None:
    _check(*inputs(device, dtype, length_q=60, head_dim=head_dim), causal="upper_left")


@usual_place
@pytest.mark.parametrize("ratio", [2, 3, 8, 71])
def test_grouped_heads(device: str, dtype: torch.dtype, ratio: int) -> None:
    _check(*inputs(device, dtype, heads=ratio * 2, heads_k=2, length_q=40, head_dim=16), causal="lower_right")


@usual_place
@corners
@pytest.mark.parametrize("window", [(0, 0), (5, None), (None, 5), (3, 9), (4096, 4096)])
def test_windows(device: str, dtype: torch.dtype, window: tuple[int | None, int | None], causal: str | None) -> None:
    for length_q, length_k in ((50, 50), (20, 60), (60, 20)):
        _check(*inputs(device, dtype, length_q=length_q, length_k=length_k, head_dim=8), causal=causal, window=window)


@pytest.mark.parametrize("scale", [None, 0.4, -0.4, 0.0])
@pytest.mark.parametrize(("causal", "window"), [(None, None), ("upper_left", None), ("lower_right", (2, None))])
def test_gradcheck(scale: float | None, causal: str | None, window: Any) -> None:
    operands = leaves(*inputs("cpu", torch.float64, heads=2, heads_k=1, length_q=3, length_k=4, head_dim=2))
    assert torch.autograd.gradcheck(
        lambda q, k, v: kittens_torch.attention(q, k, v, causal=causal, window=window, scale=scale, return_lse=True),
        operands,
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: kittens_torch.scaled_dot_product_attention(q[0], k[0], v[0], scale=scale, enable_gqa=True),
        operands,
    )


def test_rows_without_keys_have_no_gradient() -> None:
    operands = leaves(*inputs("cpu", torch.float32, length_q=5, length_k=2, head_dim=8))
    output, logsumexp = kittens_torch.attention(*operands, causal="lower_right", return_lse=True)
    (output.square().sum() + logsumexp[:, :, 3:].sum()).backward()
    assert not operands[0].grad[:, :, :3].any() and operands[0].grad[:, :, 3:].any()
    assert all(torch.isfinite(operand.grad).all() for operand in operands)
    operands = leaves(*inputs("cpu", torch.float32, length_q=3, length_k=0, head_dim=8))
    kittens_torch.attention(*operands).sum().backward()
    assert not operands[0].grad.any() and operands[1].grad.shape == operands[1].shape


@usual_place
def test_only_what_is_asked_for(device: str, dtype: torch.dtype) -> None:
    tensors = inputs(device, dtype, length_q=30, head_dim=16)
    grad_output = normal(1, 2, 30, 16, device=device, dtype=dtype)
    full = _gradients(*tensors, grad_output)
    for asked in itertools.product((False, True), repeat=3):
        operands = [tensor.clone().requires_grad_(ask) for tensor, ask in zip(tensors, asked, strict=True)]
        output = kittens_torch.attention(*operands)
        assert output.requires_grad == any(asked)
        if any(asked):
            output.backward(grad_output)
        for operand, ask, expected in zip(operands, asked, full, strict=True):
            assert (operand.grad is not None) == ask and (not ask or torch.equal(operand.grad, expected))
    with torch.no_grad():
        assert not kittens_torch.attention(*leaves(*tensors)).requires_grad


def test_logsumexp_alone() -> None:
    operands = leaves(*inputs("cpu", torch.float64, length_q=6, head_dim=4))
    _, logsumexp = kittens_torch.attention(*operands, return_lse=True)
    logsumexp.square().sum().backward()
    copies = leaves(*operands)
    kittens_torch.reference.attention(*copies)[1].square().sum().backward()
    assert all(torch.allclose(a.grad, b.grad, atol=1e-10) for a, b in zip(operands[:2], copies[:2], strict=True))
    assert operands[2].grad is None or not operands[2].grad.any()


@usual_place
@pytest.mark.parametrize("form", ["permuted", "last stride", "expanded", "sliced", "misaligned"])
def test_layout_of_the_incoming_gradient(device: str, dtype: torch.dtype, form: str) -> None:
    """Bit-equal to the gradients of grad_output.contiguous()."""
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=1, length_q=32, head_dim=128)
    shape = (2, 4, 32, 128)
    grad_output = {
        "permuted": lambda: normal(2, 32, 4, 128).transpose(1, 2),
        "last stride": lambda: normal(2, 4, 128, 32).transpose(-1, -2),
        "expanded": lambda: torch.ones(()).expand(shape),
        "sliced": lambda: normal(2, 4, 32, 136)[..., 4:132],
        "misaligned": lambda: normal(2 * 4 * 32 * 128 + 1)[1:].view(shape),
    }[form]()
    grad_output = grad_output.to(device, dtype) if form != "misaligned" else grad_output
    if form == "misaligned":
        flat = torch.empty(grad_output.numel() + 1, device=device, dtype=dtype)
        flat[1:] = grad_output.flatten()
        grad_output = flat[1:].view(shape)
    ours = _gradients(*tensors, grad_output, causal="upper_left")
    copied = _gradients(*tensors, grad_output.contiguous(), causal="upper_left")
    assert all(torch.equal(a, b) for a, b in zip(ours, copied, strict=True))
    check_gradients(ours, *tensors, grad_output, causal="upper_left")


@usual_place
def test_gradients_take_the_layout_of_their_inputs(device: str, dtype: torch.dtype) -> None:
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=20, head_dim=16)
    moved = [tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in tensors]
    output = kittens_torch.attention(*moved)
    grads = torch.autograd.grad(output.sum(), moved)
    for grad, operand in zip(grads, moved, strict=True):
        assert grad.stride() == operand.stride()
    expected = _gradients(*tensors, torch.ones_like(output))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_views_and_shared_storage() -> None:
    """Slices, expands and q = k = v: autograd adds up what the views share."""
    x = torch.randn(2, 4, 33, 16, dtype=torch.float64, requires_grad=True)
    kittens_torch.attention(x, x, x, causal="upper_left").square().sum().backward()
    y = x.detach().clone().requires_grad_()
    kittens_torch.reference.attention(y, y, y, causal="upper_left")[0].square().sum().backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-10)

    wide = torch.randn(1, 2, 40, 8, dtype=torch.float64, requires_grad=True)
    query = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    kittens_torch.attention(query, wide[:, :, :-12], wide[:, :, :-12]).square().mean().backward()
    assert not wide.grad[:, :, -12:].any() and wide.grad[:, :, :-12].any()

    shared = torch.randn(1, 1, 7, 8, dtype=torch.float64, requires_grad=True)
    kittens_torch.attention(
        query.expand(3, 2, 9, 8), shared.expand(3, 2, 7, 8), shared.expand(3, 2, 7, 8)
    ).sum().backward()
    assert shared.grad.shape == shared.shape


def test_hidden_poison_stays_out_of_gradients() -> None:
    query, key, value = inputs("cpu", torch.float32, length_q=20, length_k=50, head_dim=8)
    grad_output = normal(1, 2, 20, 8)
    clean = _gradients(query, key, value, grad_output, causal="upper_left")
    key[:, :, 20:] = float("nan")
    value[:, :, 20:] = float("nan")
    poisoned = _gradients(query, key, value, grad_output, causal="upper_left")
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    assert not poisoned[1][:, :, 20:].any() and not poisoned[2][:, :, 20:].any()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    tensors = inputs("cpu", torch.float32, length_q=20, head_dim=8)
    grad_output = normal(1, 2, 20, 8)
    operands = leaves(*tensors)
    output = torch.utils.checkpoint.checkpoint(kittens_torch.attention, *operands, use_reentrant=use_reentrant)
    output.backward(grad_output)
    expected = _gradients(*tensors, grad_output)
    assert all(torch.equal(operand.grad, grad) for operand, grad in zip(operands, expected, strict=True))


def test_saved_tensors_that_come_back_from_elsewhere() -> None:
    tensors = inputs("cpu", torch.float32, length_q=20, head_dim=8)
    grad_output = normal(1, 2, 20, 8)
    operands = [tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in tensors]
    with torch.autograd.graph.save_on_cpu():
        kittens_torch.attention(*operands).backward(grad_output)
    expected = _gradients(*tensors, grad_output)
    assert all(torch.allclose(operand.grad, grad, atol=1e-6) for operand, grad in zip(operands, expected, strict=True))


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_gradients_repeat_bit_for_bit(deterministic: bool | None) -> None:
    tensors = inputs("cpu", torch.bfloat16, heads=4, heads_k=2, length_q=150, head_dim=64)
    grad_output = normal(1, 4, 150, 64, dtype=torch.bfloat16)
    first = _gradients(*tensors, grad_output, causal="upper_left", deterministic=deterministic)
    for _ in range(10):
        again = _gradients(*tensors, grad_output, causal="upper_left", deterministic=deterministic)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
def test_backward_memory_on_the_gpu() -> None:
    operands = leaves(*inputs("cuda", torch.bfloat16, heads=16, heads_k=8, length_q=8192, head_dim=64))
    output = kittens_torch.attention(*operands, causal="upper_left")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output.backward(torch.ones_like(output))
    # The weights of all heads would be 2 GiB in bfloat16.
    assert torch.cuda.max_memory_allocated() - before < 400 * 2**20


@pytest.mark.parametrize("function", [autograd.Attention, autograd.ModifiedAttention])
def test_there_is_nothing_to_bind(function: type[torch.autograd.Function]) -> None:
    """torch binds the arguments of an autograd function to its signature: most of the host's time of such a call."""
    assert inspect.signature(function.forward) == autograd.POSITIONAL


def _bits(function: Any, operands: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    output = function(*operands)
    return [output, *torch.autograd.grad(output, wanted, torch.ones_like(output))]


@usual_place
@pytest.mark.parametrize("corner", [0, 1])
def test_the_lean_function_is_the_other_one(device: str, dtype: torch.dtype, corner: int) -> None:
    """The drop-in's usual call takes it on the GPU."""
    operands = leaves(*inputs(device, dtype, length_q=70, length_k=90, head_dim=64))
    lean = autograd.eager_apply[autograd.EagerAttention]
    for count in (1, 2, 3):
        for wanted in itertools.combinations(range(3), count):
            asked = [operand.detach().requires_grad_(place in wanted) for place, operand in enumerate(operands)]
            leaf = [asked[place] for place in wanted]
            ours = _bits(lambda *tensors: lean(*tensors, 0.3, corner), asked, leaf)
            others = _bits(
                lambda *tensors: autograd.Attention.apply(*tensors, 0.3, corner, -1, -1, True, False)[0], asked, leaf
            )
            for one, other in zip(ours, others, strict=True):
                torch.testing.assert_close(one, other, atol=0.0 if device == "cpu" else 0.02, rtol=0.0)


@usual_place
def test_the_lean_function_has_no_second_derivative(device: str, dtype: torch.dtype) -> None:
    query, key, value = leaves(*inputs(device, dtype, length_q=20, head_dim=32))
    output = autograd.eager_apply[autograd.EagerAttention](query, key, value, 0.3, 0)
    (gradient,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), key)


@usual_place
def test_a_tensor_that_left_torch_func(device: str, dtype: torch.dtype) -> None:
    """Its wrapper is dead; torch's `Function.apply` looks through it, and so do we."""
    query, key, value = leaves(*inputs(device, dtype, length_q=20, head_dim=32))
    kept: list[Tensor] = []
    torch.func.grad(lambda tensor: (kept.append(tensor), tensor.sum())[1])(query.detach())
    for function in (kittens_torch.attention, kittens_torch.scaled_dot_product_attention):
        ours, exact = function(kept[0], key, value), function(query.detach(), key, value)
        assert torch.equal(ours, exact)
        for one, other in zip(
            *(torch.autograd.grad(output, (key, value), torch.ones_like(output)) for output in (ours, exact)),
            strict=True,
        ):
            assert torch.equal(one, other)


@usual_place
def test_what_the_ops_take_when_it_is_not_given(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=70, length_k=50, head_dim=48)
    settings = (48**-0.5, 0, -1, -1)
    outputs = ops.forward(query, key, value)
    saved = (torch.ones_like(outputs[0]), None, query, key, value, *outputs)
    for ours, exact in (
        (outputs, ops.forward(query, key, value, *settings)),
        (backward.backward(*saved, 0.3), backward.backward(*saved, 0.3, *settings[1:], True, True, True, False)),
    ):
        for one, other in zip(ours, exact, strict=True):
            torch.testing.assert_close(one, other, atol=0.0 if device == "cpu" else 0.02, rtol=0.0)
    torch.library.opcheck(ops.forward, (query, key, value), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(backward.backward, (*saved, 0.3), test_utils=("test_schema", "test_faketensor"))
    stacked = torch.func.vmap(ops.forward)(query[None], key[None], value[None])
    assert all(torch.equal(one[0], other) for one, other in zip(stacked, outputs, strict=True))
