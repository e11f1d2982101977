"""What a row does to the scores beyond scaling them and hiding keys after the diagonal."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Modifiers:
    """The tensors and numbers of one row, as `kittens_torch.attention` takes them.

    Attributes:
        mask: bool, True = visible, broadcasts to (B, Hq, Lq, Lk).
        bias: added to the scores, broadcasts to (B, Hq, Lq, Lk).
        bias_gradient: whether the backward pass makes the bias's gradient.
        window: (left, right) keys visible around the diagonal.
        softcap: scores become softcap * tanh(scores / softcap); 0 for none.
        alibi_slopes: (Hq), float32.
        sinks: (Hq), float32; the backward pass makes their gradient.
        dropout_p: share of the weights that is dropped.
        kept: bool (B, Hq, Lq, Lk), the weights a call did not drop, where that is known.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    bias_gradient: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    kept: Tensor | None = None

    @property
    def none(self) -> bool:
        tensors = (self.mask, self.bias, self.alibi_slopes, self.sinks)
        return all(t is None for t in tensors) and not (self.window or self.softcap or self.dropout_p)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors whose gradients the backward pass makes: the bias, then the sinks."""
        return tuple(t for t in (self.bias, self.sinks) if t is not None and t.requires_grad)

    def differentiated(self, dtype: torch.dtype | None = None) -> Modifiers:
        """The same with leaves of their own, of ``dtype`` if that is given; itself where nothing has a gradient."""
        changed = {}
        if self.bias is not None and self.bias_gradient:
            changed["bias"] = self.bias.detach().to(dtype or self.bias.dtype).requires_grad_()
        if self.sinks is not None:
            changed["sinks"] = self.sinks.detach().to(dtype or self.sinks.dtype).requires_grad_()
        return replace(self, **changed) if changed else self  # type: ignore[arg-type]

    def of_head(self, batch: int, head: int) -> Modifiers:
        """Views for one head: mask, bias and kept are (Lq or 1, Lk), slopes and sinks have no dimension."""
        return replace(
            self,
            mask=matrix(self.mask, batch, head),
            bias=matrix(self.bias, batch, head),
            kept=matrix(self.kept, batch, head),
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes[head],
            sinks=None if self.sinks is None else self.sinks[head],
        )

    def blind_rows(self) -> Tensor | None:
        """Query rows that see no key, broadcasting to (B, Hq, Lq, 1); None where there is none."""
        if self.mask is None:
            return None
        blind = ~self.mask.any(-1, keepdim=True)
        return blind if bool(blind.any()) else None


NO_MODIFIERS = Modifiers()


def matrix(tensor: Tensor | None, batch: int, head: int) -> Tensor | None:
    """The (rows, keys) of one head of a tensor whose first two dimensions may broadcast."""
    if tensor is None:
        return None
    return tensor[batch if tensor.shape[0] > 1 else 0, head if tensor.shape[1] > 1 else 0]


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """The given rows of a (Lq or 1, Lk) tensor."""
    return tensor if tensor.shape[0] == 1 else tensor[rows]


def visible(rows: Tensor, length_q: int, length_k: int, causal: bool, modifiers: Modifiers) -> Tensor | None:
    """Bool (R, Lk) or (1, Lk): the keys that query rows of one head see; None where they see all."""
    columns = torch.arange(length_k, device=rows.device)
    distance = columns - (rows[:, None] + length_k - length_q)
    parts = []
    if causal:
        parts.append(columns <= rows[:, None])
    if modifiers.window is not None:
        parts += [distance >= -modifiers.window[0], distance <= modifiers.window[1]]
    if modifiers.mask is not None:
        parts.append(rows_of(modifiers.mask, rows))
    if not parts:
        return None
    result = parts[0]
    for part in parts[1:]:
        result = result & part
    return result


def modified_scores(scores: Tensor, rows: Tensor, length_q: int, modifiers: Modifiers) -> Tensor:
    """Soft cap, bias and ALiBi of one head. What is added is added in float32 at least, and the sum rounded once."""
    dtype, wide = scores.dtype, torch.promote_types(scores.dtype, torch.float32)
    if modifiers.softcap:
        scores = modifiers.softcap * torch.tanh(scores / modifiers.softcap)
    if modifiers.bias is not None:
        scores = (scores.to(wide) + rows_of(modifiers.bias, rows).to(wide)).to(dtype)
    if modifiers.alibi_slopes is not None:
        columns = torch.arange(scores.shape[-1], device=scores.device)
        distance = (rows[:, None] + scores.shape[-1] - length_q - columns).abs()
        scores = (scores.to(wide) - modifiers.alibi_slopes.to(wide) * distance).to(dtype)
    return scores


def weights_of(scores: Tensor, seen: Tensor | None, rows: Tensor, modifiers: Modifiers) -> Tensor:
    """Softmax over the visible keys, and the sink; rows without a key get weights 0. Then dropout as `kept` has it."""
    blind = None
    if seen is not None:
        blind = ~seen.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen, float("-inf")).masked_fill(blind, 0.0)
    if modifiers.sinks is not None:
        sink = modifiers.sinks.to(scores.dtype).expand(scores.shape[0], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[:, :-1]
    else:
        weights = scores.softmax(-1)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    if modifiers.kept is not None:
        weights = weights * rows_of(modifiers.kept, rows) / (1.0 - modifiers.dropout_p)
    return weights
