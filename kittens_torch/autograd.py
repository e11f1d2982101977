"""Autograd of the forward op: entered only where grad mode is on and an input needs a gradient."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import double_backward, modified, ops
from .backward import run_backward, run_backward_modified

SECOND_DERIVATIVE = (
    "kittens_torch's kernels have no second derivative of attention. For the part of the model that is differentiated "
    "twice call kittens_torch.attention(..., double_backward=True), or "
    "torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)."
)


class _Once(torch.autograd.Function):
    """A number 1 without a derivative: what is multiplied by it is refused a derivative in `tensors`, not given 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> Tensor:
        return tensors[0].new_ones(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass  # Having it is what torch.func asks for; nothing is saved.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(SECOND_DERIVATIVE)


def _graph_is_built() -> bool:
    """Whether autograd records the backward that runs: create_graph=True, or torch.func, which always does.

    A compiled graph does not know; torch refuses to differentiate one twice.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _only_once(
    gradients: Callable[..., tuple[Tensor | None, ...]],
    needed: tuple[bool, ...],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients, whose own derivative is refused.

    Products with numbers, since under the vmap of `is_grads_batched`, where the incoming gradients alone are mapped, no
    function of these reaches the graph, but a product does with one of what is not mapped.
    """
    with torch.no_grad():
        grads = gradients(needed, grad_output, grad_logsumexp, *rest)
    once = _Once.apply(*_tensors(rest)) * _Once.apply(*_tensors((grad_output, grad_logsumexp)))
    return tuple(None if grad is None else grad * once.to(grad.dtype) for grad in grads)


def _tensors(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _gradients(
    needed: tuple[bool, bool, bool],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    saved: tuple[Tensor, ...],
    settings: tuple[Any, ...],
    deterministic: bool,
) -> tuple[Tensor | None, ...]:
    grads = run_backward(grad_output, grad_logsumexp, saved, settings, needed, deterministic)
    if all(needed):
        return grads
    return tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))


class Attention(torch.autograd.Function):
    """(output, logsumexp) of the forward op, both differentiable in query, key and value.

    `deterministic` asks for gradients that are the same bit for bit at every run, as
    `torch.use_deterministic_algorithms(True)` does at the time of the backward. `twice` makes the backward of torch
    operations wherever autograd records it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        corner: int,
        window_left: int,
        window_right: int,
        deterministic: bool,
        twice: bool,
    ) -> tuple[Tensor, Tensor]:
        return ops.run_forward(query, key, value, scale, corner, window_left, window_right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *settings, deterministic, twice = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.settings = tuple(settings)
        ctx.deterministic = deterministic
        ctx.twice = twice
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = tuple(ctx.needs_input_grad[:3])
        if grad_output is None and grad_logsumexp is None:
            return (None,) * 9
        if ctx.twice and _graph_is_built():
            query, key, value = saved[:3]
            grads = double_backward.gradients(
                (*needed, False, False), grad_output, grad_logsumexp, query, key, value, ctx.settings
            )[:3]
        else:
            arguments = (needed, grad_output, grad_logsumexp, saved, ctx.settings, ctx.deterministic)
            grads = _only_once(_gradients, *arguments) if _graph_is_built() else _gradients(*arguments)
        return (*grads, None, None, None, None, None, None)


class EagerAttention(torch.autograd.Function):
    """The output of `Attention` in the drop-in's usual call, where neither torch.func nor a compiler looks on.

    It saves the time on the host of a setup_context and of arguments that are always the same.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, corner: int) -> Tensor:
        output, logsumexp = ops.eager_forward(query, key, value, scale, corner)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.settings = (scale, corner, -1, -1)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        arguments = (ctx.needs_input_grad[:3], grad_output, None, ctx.saved_tensors, ctx.settings, False)
        grads = _only_once(_gradients, *arguments) if _graph_is_built() else _gradients(*arguments)
        return (*grads, None, None)


def _modified_gradients(
    needed: tuple[bool, bool, bool, bool, bool],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    saved: tuple[Tensor, ...],
    modifiers: tuple[Any, ...],
    sinks: Tensor | None,
    settings: tuple[Any, ...],
    deterministic: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias and sinks, None where not needed."""
    of_op, of_sinks = needed[:4], needed[4]
    grads: list[Tensor | None] = [None] * 4
    if any(of_op):
        found = run_backward_modified(grad_output, grad_logsumexp, saved, settings, modifiers, of_op, deterministic)
        grads = [grad if need else None for grad, need in zip(found, of_op, strict=True)]
    grads.append(_sink_gradient(grad_output, grad_logsumexp, saved[3], saved[4], sinks) if of_sinks else None)
    return tuple(grads)


def _sink_gradient(
    grad_output: Tensor | None, grad_logsumexp: Tensor | None, output: Tensor, logsumexp: Tensor, sinks: Tensor | None
) -> Tensor:
    """The sink's weight is exp(sink - logsumexp), its value zero: -weight (sum_d dO O - dlogsumexp), over all rows."""
    assert sinks is not None
    column = sinks.view(1, -1, 1)
    weight = torch.exp(column - logsumexp).masked_fill(logsumexp == float("-inf"), 0.0)
    delta = torch.zeros_like(logsumexp)
    if grad_output is not None:
        delta = delta + (grad_output.to(logsumexp.dtype) * output.to(logsumexp.dtype)).sum(-1)
    if grad_logsumexp is not None:
        delta = delta - grad_logsumexp
    return -(weight * delta).sum((0, 2))


class ModifiedAttention(torch.autograd.Function):
    """(output, logsumexp) of the forward op with modifiers, differentiable in query, key, value, bias and sinks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        corner: int,
        window_left: int,
        window_right: int,
        mask: Tensor | None,
        bias: Tensor | None,
        key_lengths: Tensor | None,
        alibi_slopes: Tensor | None,
        sinks: Tensor | None,
        state: Tensor | None,
        dropout_p: float,
        softcap: float,
        deterministic: bool,
        twice: bool,
    ) -> tuple[Tensor, Tensor]:
        settings = (scale, corner, window_left, window_right)
        tensors = (mask, bias, key_lengths, alibi_slopes, sinks, state)
        return modified.run_forward(query, key, value, *settings, *tensors, dropout_p, softcap)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value = inputs[:3]
        ctx.save_for_backward(query, key, value, *output, *inputs[7:13])
        ctx.settings = inputs[3:7]
        ctx.numbers = inputs[13:15]
        ctx.deterministic, ctx.twice = inputs[15:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: under checkpoint each look computes the forward again
        if grad_output is None and grad_logsumexp is None:
            return (None,) * 17
        saved, (mask, bias, key_lengths, alibi_slopes, sinks, state) = tensors[:5], tensors[5:]
        modifiers = (mask, bias, key_lengths, alibi_slopes, state, *ctx.numbers)
        needs = ctx.needs_input_grad
        needed = (*needs[:3], needs[8], needs[11])
        if ctx.twice and _graph_is_built():
            query, key, value = saved[:3]
            grads = double_backward.gradients(
                needed, grad_output, grad_logsumexp, query, key, value, ctx.settings, modifiers, sinks
            )
        else:
            arguments = (needed, grad_output, grad_logsumexp, saved, modifiers, sinks, ctx.settings, ctx.deterministic)
            grads = (
                _only_once(_modified_gradients, *arguments) if _graph_is_built() else _modified_gradients(*arguments)
            )
        of_query, of_key, of_value, of_bias, of_sinks = grads
        return (of_query, of_key, of_value, *(None,) * 5, of_bias, None, None, of_sinks, *(None,) * 5)


# torch binds the arguments to the signature of `forward` at every call, which took half of the host's time of a forward
# and backward. These two are given all of their arguments by position, so there is nothing to bind.
POSITIONAL = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)])
for _function in (Attention, ModifiedAttention):
    _function.forward.__signature__ = POSITIONAL  # type: ignore[union-attr]

# `Function.apply` itself without what it does first for torch.func, which takes longer than all that follows.
eager_apply: dict[Any, Callable[..., Any]] = {
    function: super(torch.autograd.Function, function).apply  # type: ignore[misc]
    for function in (Attention, EagerAttention, ModifiedAttention)
}
