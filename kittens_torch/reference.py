"""The specification of every operator, in eager torch.

Nothing here is fast and nothing depends on a kernel. In float64 it is what the kernels are measured against; in the
dtype of the inputs it is "the same formula in the input dtype" of the tolerance rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention", "visible_keys"]


def visible_keys(
    length_q: int,
    length_k: int,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Bool (length_q, length_k): True where query row i may see key j under `causal` and `window` alone.

    The diagonal is j = i for causal="upper_left", else j = i + length_k - length_q. Causal hides the keys right of the
    diagonal; window=(left, right) leaves `left` keys before it and `right` keys after it, None being open.
    """
    row = torch.arange(length_q, device=device).unsqueeze(1)
    column = torch.arange(length_k, device=device).unsqueeze(0)
    diagonal = row if causal == "upper_left" else row + (length_k - length_q)
    visible = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
    if causal is not None:
        visible = visible & (column <= diagonal)
    left, right = window if window is not None else (None, None)
    if left is not None:
        visible = visible & (column >= diagonal - left)
    if right is not None:
        visible = visible & (column <= diagonal + right)
    return visible


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kept: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of (B, Hq, Lq, D) queries over (B, Hk, Lk, D) keys and (B, Hk, Lk, Dv) values, Hq a multiple of Hk.

    logits = c tanh(scale q.k / c) + bias - slope |i + Lk - Lq - j|, with c = softcap and no tanh when c is 0. A key is
    visible when causal, window, mask (True = visible) and key_lengths (B) all admit it. `sinks` (Hq) is one more logit
    of every row: it takes weight, counts in the logsumexp and has no value. alibi_slopes is (Hq) or (B, Hq). Of the
    normalised weights, dropout leaves those where the bool `kept` (B, Hq, Lq, Lk) holds, scaled by 1 / (1 - dropout_p).
    Returns the output (B, Hq, Lq, Dv) and the natural-log logsumexp (B, Hq, Lq), both computed in and of the dtype of
    the query. A row without a logit has output 0 and logsumexp -inf. Differentiable (also twice).
    """
    batch, heads, length_q, head_dim = query.shape
    heads_k, length_k = key.shape[1], key.shape[2]
    if scale is None:
        scale = head_dim**-0.5

    visible = visible_keys(length_q, length_k, causal, window, query.device).expand(batch, heads, -1, -1)
    if mask is not None:
        visible = visible & mask
    if key_lengths is not None:
        column = torch.arange(length_k, device=query.device)
        visible = visible & (column < key_lengths.view(batch, 1, 1, 1))

    key = key.repeat_interleave(heads // max(heads_k, 1), dim=1)
    value = value.repeat_interleave(heads // max(heads_k, 1), dim=1)
    # What no row can see must not reach a result, and 0 * NaN is NaN.
    unseen = ~visible.any(dim=-2).unsqueeze(-1)
    value = value.masked_fill(unseen, 0.0)
    key = key.masked_fill(unseen, 0.0)

    logits = (query * scale) @ key.transpose(-2, -1)
    if softcap != 0.0:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if alibi_slopes is not None:
        row = torch.arange(length_q, device=query.device).unsqueeze(1)
        column = torch.arange(length_k, device=query.device)
        distance = (row + (length_k - length_q) - column).abs()
        logits = logits - alibi_slopes.view(-1, heads, 1, 1).to(logits.dtype) * distance
    logits = logits.masked_fill(~visible, float("-inf"))

    # The sink is one more column; without sinks it is -inf, which also gives rows of no key something to reduce over.
    extra = logits.new_full((heads,), float("-inf")) if sinks is None else sinks.to(logits.dtype)
    logits = torch.cat([logits, extra.view(1, heads, 1, 1).expand(batch, heads, length_q, 1)], dim=-1)

    maximum = logits.detach().amax(dim=-1, keepdim=True)
    empty = maximum == float("-inf")
    maximum = maximum.masked_fill(empty, 0.0)
    weights = torch.exp(logits - maximum)
    total = weights.sum(dim=-1, keepdim=True).masked_fill(empty, 1.0)
    weights = (weights / total)[..., :length_k]
    if kept is not None:
        weights = weights * kept / (1.0 - dropout_p)
    output = weights @ value
    logsumexp = (maximum + torch.log(total)).masked_fill(empty, float("-inf"))
    return output, logsumexp.squeeze(-1)
