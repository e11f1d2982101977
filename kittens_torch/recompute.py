"""Gradients of the forward op by recomputing the weights chunk by chunk in plain torch.

With S = scale q k^T, P = exp(S - logsumexp) and Delta_i = sum_d dO_id O_id (Dao et al., FlashAttention, appendix B):
dV = P^T dO,  dP = dO V^T,  dS = P (dP - Delta + dlogsumexp),  dQ = scale dS K,  dK = scale dS^T Q.

One op, so that compiled graphs hold one node whatever the lengths are. Memory is O(length): the weights exist for one
chunk of batch entries and query rows at a time. Accumulation is in float32 (float64 for float64 inputs).
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops import empty_in_layout_of
from .vmap import batch_over

# Elements of one weight chunk: 32 MiB of float32, of which about four are alive at a time.
CHUNK_ELEMENTS = 1 << 23
# Rows a chunk should keep before batch entries are taken one by one, so that the products stay matrix products.
CHUNK_ROWS = 128

_library = torch.library.Library("kittens_torch", "FRAGMENT")
_library.define(
    "recompute_backward(Tensor? grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    "Tensor output, Tensor logsumexp, float scale, int corner, int window_left, int window_right, "
    "bool need_query, bool need_key, bool need_value) -> (Tensor, Tensor, Tensor)"
)


def _chunks(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


class _Visibility:
    """The interval of keys a query row may see, as the op's corner and window define it."""

    def __init__(self, length_q: int, length_k: int, corner: int, window_left: int, window_right: int) -> None:
        self.length_k = length_k
        self.offset = 0 if corner == 1 else length_k - length_q
        self.left = window_left
        self.right = window_right if corner == 0 else 0

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Keys [low, high) that at least one of the rows [start, stop) may see; empty when high <= low."""
        low = max(start + self.offset - self.left, 0) if self.left >= 0 else 0
        high = min(stop + self.offset + self.right, self.length_k) if self.right >= 0 else self.length_k
        return low, high

    def hidden(self, rows: tuple[int, int], columns: tuple[int, int], device: torch.device) -> Tensor | None:
        """Bool (rows, columns), True where the key is hidden; None when nothing can be."""
        if self.left < 0 and self.right < 0:
            return None
        diagonal = torch.arange(*rows, device=device).unsqueeze(1) + self.offset
        column = torch.arange(*columns, device=device)
        hidden = torch.zeros(diagonal.shape[0], column.shape[0], dtype=torch.bool, device=device)
        if self.left >= 0:
            hidden |= column < diagonal - self.left
        if self.right >= 0:
            hidden |= column > diagonal + self.right
        return hidden


@torch.no_grad()
def _recompute_backward(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    corner: int,
    window_left: int,
    window_right: int,
    need_query: bool,
    need_key: bool,
    need_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty_gradients(query, key, value, need_query, need_key, need_value)
    grad_query, grad_key, grad_value = grads
    for grad in grads:
        grad.zero_()
    if query.numel() == 0 or key.numel() == 0 or value.numel() == 0:
        return grads

    batch, heads, length_q, _ = query.shape
    heads_k, length_k = key.shape[1:3]
    group = heads // heads_k
    dtype = logsumexp.dtype
    visibility = _Visibility(length_q, length_k, corner, window_left, window_right)

    def grouped(rows: Tensor) -> Tensor:
        """(b, Hq, rows, width) as (b, Hk, group * rows, width): a group's heads are more rows of one product."""
        entries, _, length, width = rows.shape
        return rows.to(dtype).reshape(entries, heads_k, group * length, width).contiguous()

    per_row = heads * length_k
    entries = min(max(CHUNK_ELEMENTS // (per_row * min(length_q, CHUNK_ROWS)), 1), batch)
    rows_per_chunk = min(max(CHUNK_ELEMENTS // (per_row * entries), 1), length_q)
    for first, last in _chunks(batch, entries):
        keys, values = key[first:last].to(dtype), value[first:last].to(dtype)
        key_sum, value_sum = torch.zeros_like(keys), torch.zeros_like(values)
        for start, stop in _chunks(length_q, rows_per_chunk):
            low, high = visibility.span(start, stop)
            if high <= low:
                continue
            piece = (slice(first, last), slice(None), slice(start, stop))
            seen = (slice(None), slice(None), slice(low, high))
            hidden = visibility.hidden((start, stop), (low, high), query.device)
            hidden = hidden.repeat(group, 1) if hidden is not None else None

            rows = grouped(query[piece])
            # A row without a key has logsumexp -inf; +inf makes its weights 0.
            shift = grouped(logsumexp[piece].unsqueeze(-1)).nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.inf)
            weights = (rows @ keys[seen].transpose(-2, -1)).mul_(scale).sub_(shift).exp_()
            if hidden is not None:
                weights.masked_fill_(hidden, 0.0)

            grad_rows = grouped(grad_output[piece]) if grad_output is not None else None
            if need_value and grad_rows is not None:
                value_sum[seen] += weights.transpose(-2, -1) @ grad_rows
            if not (need_query or need_key):
                continue
            grad_shift = torch.zeros_like(shift)
            if grad_logsumexp is not None:
                grad_shift += grouped(grad_logsumexp[piece].unsqueeze(-1))
            if grad_rows is not None:
                grad_shift -= (grad_rows * grouped(output[piece])).sum(dim=-1, keepdim=True)
                grad_scores = (grad_rows @ values[seen].transpose(-2, -1)).add_(grad_shift).mul_(weights)
            else:
                grad_scores = weights.mul_(grad_shift)
            if hidden is not None:
                grad_scores.masked_fill_(hidden, 0.0)  # A hidden NaN times a weight of 0 is NaN.
            grad_scores.mul_(scale)
            if need_query:
                grad_query[piece] = (grad_scores @ keys[seen]).view(last - first, heads, stop - start, -1)
            if need_key:
                key_sum[seen] += grad_scores.transpose(-2, -1) @ rows
        if need_key:
            grad_key[first:last] = key_sum
        if need_value:
            grad_value[first:last] = value_sum
    return grads


def _empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, need_query: bool, need_key: bool, need_value: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Each gradient like its input, in dtype and layout; an empty tensor where none is asked for."""
    needed = ((query, need_query), (key, need_key), (value, need_value))
    grads = (
        empty_in_layout_of(operand, operand.shape, operand.dim()) if need else operand.new_empty(0)
        for operand, need in needed
    )
    return next(grads), next(grads), next(grads)


_library.impl("recompute_backward", _recompute_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("kittens_torch::recompute_backward", lib=_library)
def _(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    corner: int,
    window_left: int,
    window_right: int,
    need_query: bool,
    need_key: bool,
    need_value: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradients(query, key, value, need_query, need_key, need_value)


recompute_backward = torch.ops.kittens_torch.recompute_backward.default
batch_over(recompute_backward)
