"""Overrides of torch's fused backward operators on the GPU, for `enable`: our kernel makes the gradients.

Forward and backward agree on what they hand over, the output and the natural-log logsumexp, whichever of torch's
kernel and ours made it, so that `enable` and `disable` may come between them.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import call
from .backward import run_backward


def _gradients(
    grad_output: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    corner: int,
    scale: float | None,
) -> tuple[Tensor, ...] | None:
    """Gradients of query, key and value in the layouts of these, or None where torch's own kernel has to run.

    saved: query, key, value, output, logsumexp (B, H, L).
    """
    query, key, value, _, logsumexp = saved
    factor = query.shape[3] ** -0.5 if scale is None else scale
    if factor < call.SMALLEST_FLOAT32 or call.fused_has_no_kernel(query, key, value, 0.0, corner, factor):
        return None
    if logsumexp.shape != query.shape[:3] or logsumexp.dtype != torch.float32:
        return None
    saved = (*saved[:4], logsumexp.contiguous())
    grads = run_backward(grad_output, None, saved, (factor, corner, -1, -1), (True, True, True), False)
    # Of an input that is not dense, compiled graphs expect the strides that torch derives from its.
    expected = (torch.empty_like(operand) for operand in (query, key, value))
    return tuple(
        grad if grad.stride() == like.stride() else like.copy_(grad) for grad, like in zip(grads, expected, strict=True)
    )


def flash_backward(torchs: Any) -> Callable[..., Any]:
    """The override of `_scaled_dot_product_flash_attention_backward`, given torch's own kernel."""

    def kernel(
        keys: Any,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        corner = 0 if not is_causal else call.UPPER_LEFT if query.shape[2] == key.shape[2] else call.LOWER_RIGHT
        ours = None
        if dropout_p == 0.0:
            ours = _gradients(grad_output, (query, key, value, output, logsumexp), corner, scale)
        if ours is not None:
            return ours
        saved = (grad_output, query, key, value, output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
        return torchs.call_boxed(keys, *saved, dropout_p, is_causal, philox_seed, philox_offset, scale=scale)

    return kernel


def cudnn_backward(torchs: Any) -> Callable[..., Any]:
    """The override of `_scaled_dot_product_cudnn_attention_backward`, given torch's own kernel."""

    def kernel(
        keys: Any,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        attn_bias: Tensor | None,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        ours = None
        plain = dropout_p == 0.0 and (attn_bias is None or attn_bias.numel() == 0)
        if plain and logsumexp.dim() == 4 and logsumexp.shape[3] == 1:
            saved = (query, key, value, output, logsumexp.squeeze(3))
            corner = call.UPPER_LEFT if is_causal else 0
            ours = _gradients(grad_output, saved, corner, scale)
        if ours is not None:
            return ours
        rest = (philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)
        return torchs.call_boxed(keys, grad_output, query, key, value, output, logsumexp, *rest, scale=scale)

    return kernel
