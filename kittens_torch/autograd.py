"""Autograd of the forward op: entered only where grad mode is on and an input needs a gradient."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .backward import run_backward

SECOND_DERIVATIVE = (
    "kittens_torch has no second derivative of attention. For the part of the model that is differentiated twice call "
    "torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)."
)


def _gradients(
    needed: tuple[bool, bool, bool],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    saved: tuple[Tensor, ...],
    settings: tuple[Any, ...],
    deterministic: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grads = run_backward(grad_output, grad_logsumexp, saved, settings, needed, deterministic)
    return tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))  # type: ignore[return-value]


class _Backward(torch.autograd.Function):
    """The first derivative as a node of its own under create_graph=True, so that a second one is refused, not wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        needed: tuple[bool, bool, bool],
        settings: tuple[Any, ...],
        deterministic: bool,
        grad_output: Tensor | None,
        grad_logsumexp: Tensor | None,
        *saved: Tensor,
    ) -> tuple[Tensor | None, ...]:
        return _gradients(needed, grad_output, grad_logsumexp, saved, settings, deterministic)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass  # Having it is what torch.func asks for; nothing is saved.

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(SECOND_DERIVATIVE)


class Attention(torch.autograd.Function):
    """(output, logsumexp) of the forward op, both differentiable in query, key and value.

    `deterministic` asks for gradients that are the same bit for bit at every run, as
    `torch.use_deterministic_algorithms(True)` does at the time of the backward.
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
    ) -> tuple[Tensor, Tensor]:
        return ops.run_forward(query, key, value, scale, corner, window_left, window_right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *settings, deterministic = inputs
        ctx.save_for_backward(query, key, value, *output)
        ctx.settings = tuple(settings)
        ctx.deterministic = deterministic
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        needed = tuple(ctx.needs_input_grad[:3])
        if grad_output is None and grad_logsumexp is None:
            grads: tuple[Tensor | None, ...] = (None, None, None)
        elif torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = _Backward.apply(needed, ctx.settings, ctx.deterministic, grad_output, grad_logsumexp, *saved)
        else:
            grads = _gradients(needed, grad_output, grad_logsumexp, saved, ctx.settings, ctx.deterministic)
        return (*grads, None, None, None, None, None)
