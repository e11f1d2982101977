"""The gradients of attention as differentiable torch operations, for `attention(..., double_backward=True)`.

The formulas are those at the head of backward.py, in float32 (float64 for float64), with all weights in memory. Nothing
here is a kernel of ours, so autograd and torch.func differentiate it as often as they like.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dropout, reference

NO_MODIFIERS = (None, None, None, None, None, 0.0, 0.0)
_CORNERS = (None, "upper_left", "lower_right")


def _visible(
    query: Tensor,
    key: Tensor,
    interval: tuple[int, int, int],
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
) -> Tensor:
    """Bool (batch, heads, Lq, Lk), the keys that each row sees."""
    batch, heads, length_q, _ = query.shape
    length_k = key.shape[2]
    corner, *sides = interval
    left, right = (None if side < 0 else side for side in sides)
    visible = reference.visible_keys(length_q, length_k, _CORNERS[corner], (left, right), query.device)
    visible = visible.expand(batch, heads, length_q, length_k)
    if mask is not None:
        visible = visible & mask
    if bias is not None:
        visible = visible & (bias.detach() != float("-inf"))
    if key_lengths is not None:
        visible = visible & (torch.arange(length_k, device=query.device) < key_lengths.view(batch, 1, 1, 1))
    return visible


def _normalised(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the keys, weight of the sink (..., 1), and where a row has no score at all (..., 1)."""
    heads = scores.shape[1]
    sink = scores.new_full((heads,), float("-inf")) if sinks is None else sinks.to(scores.dtype)
    scores = torch.cat([scores, sink.view(1, heads, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    largest = scores.detach().amax(-1, keepdim=True)  # any constant of a row gives the same weights
    empty = largest == float("-inf")
    weights = torch.exp(scores - largest.masked_fill(empty, 0.0))
    weights = weights / weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    return weights[..., :-1], weights[..., -1:], empty


def gradients(
    needed: tuple[bool, bool, bool, bool, bool],
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    settings: tuple[float, int, int, int],
    modifiers: tuple[Any, ...] = NO_MODIFIERS,
    sinks: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias and sinks, None where not needed; differentiable in every tensor.

    settings: scale, corner, window_left, window_right; modifiers as of `backward.run_backward_modified`.
    """
    # The backward may run under the caller's autocast, which would round the products.
    with torch.autocast(query.device.type, enabled=False):
        scale, interval = settings[0], settings[1:]
        mask, bias, key_lengths, alibi_slopes, state, dropout_p, softcap = modifiers
        real = torch.float64 if query.dtype == torch.float64 else torch.float32
        heads, heads_k, length_q, length_k = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
        group = heads // max(heads_k, 1)
        visible = _visible(query, key, interval, mask, bias, key_lengths)
        # What no row sees must not reach a result, and 0 * NaN is NaN.
        unseen = ~visible.any(-2).unsqueeze(-1)
        queries = query.to(real)
        keys, values = (part.to(real).repeat_interleave(group, 1).masked_fill(unseen, 0.0) for part in (key, value))

        scores = scale * (queries @ keys.mT)
        capped = None
        if softcap != 0.0:
            capped = torch.tanh(scores / softcap)
            scores = softcap * capped
        if bias is not None:
            scores = scores + bias.to(real)
        if alibi_slopes is not None:
            row = torch.arange(length_q, device=query.device).unsqueeze(1)
            distance = (row + (length_k - length_q) - torch.arange(length_k, device=query.device)).abs()
            scores = scores - alibi_slopes.view(-1, heads, 1, 1) * distance
        weights, of_sink, empty = _normalised(scores.masked_fill(~visible, float("-inf")), sinks)

        # Nothing comes back through a row without a score, whatever its gradient.
        of_output = (
            query.new_zeros((*query.shape[:3], value.shape[3]), dtype=real) if grad_output is None else grad_output
        )
        of_output = of_output.to(real).masked_fill(empty, 0.0)
        grad_weights, kept_weights = of_output @ values.mT, weights
        if state is not None:
            factor = dropout.kept(state, weights, dropout_p) * dropout.keep_scale(dropout_p)
            grad_weights, kept_weights = grad_weights * factor, weights * factor
        grad_weights = grad_weights.masked_fill(~visible, 0.0)
        delta = (weights * grad_weights).sum(-1, keepdim=True)
        if grad_logsumexp is not None:
            delta = delta - grad_logsumexp.to(real).unsqueeze(-1).masked_fill(empty, 0.0)
        grad_scores = weights * (grad_weights - delta)
        grad_products = scale * grad_scores
        if capped is not None:
            grad_products = grad_products * (1 - capped * capped)

        def of_group(gradient: Tensor, like: Tensor) -> Tensor:
            return gradient.unflatten(1, (heads_k, group)).sum(2).to(like.dtype)

        of_query = (grad_products @ keys).to(query.dtype) if needed[0] else None
        of_key = of_group(grad_products.mT @ queries, key) if needed[1] else None
        of_value = of_group(kept_weights.mT @ of_output, value) if needed[2] else None
        of_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype) if needed[3] else None
        of_sinks = -(of_sink * delta).sum((0, 2, 3)) if needed[4] else None
        return of_query, of_key, of_value, of_bias, of_sinks
