"""Which weights dropout keeps, in torch operations: the rule of csrc/attention/dropout.h."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Weights are dropped in multiples of 1 / 32768."""
    return min(int(p * 32768 + 0.5), 32767)


def keep_scale(p: float) -> float:
    """What the kept weights are multiplied by."""
    return 32768 / (32768 - threshold(p))


def _philox(key: tuple[Tensor, Tensor], counter: list[Tensor]) -> list[Tensor]:
    """Philox4x32-7 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011). 32-bit words as int64."""
    low, high = key
    for _ in range(7):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # modulo 2^64
        counter = [
            (second >> 32 & LOW) ^ counter[1] ^ low,
            second & LOW,
            (first >> 32 & LOW) ^ counter[3] ^ high,
            first & LOW,
        ]
        low, high = (low + 0x9E3779B9) & LOW, (high + 0xBB67AE85) & LOW
    return counter


def _kept(state: Tensor, planes: int, length_q: int, length_k: int, p: float) -> Tensor:
    """Bool (planes, length_q, length_k). One call of the generator serves eight weights."""
    row_groups, column_groups = -(-length_q // 16), -(-length_k // 16)
    plane, row, column = (
        torch.arange(count, device=state.device).view(shape)
        for count, shape in (
            (planes, (planes, 1, 1)),
            (row_groups * 8, (1, row_groups * 8, 1)),
            (column_groups * 4, (1, 1, column_groups * 4)),
        )
    )
    words = _philox((state[0] & LOW, state[0] >> 32 & LOW), [column, row, plane, state[1] & LOW])
    draws = torch.stack([part & 0x7FFF for word in words for part in (word, word >> 16)])
    draws = draws.view(2, 2, 2, planes, row_groups, 8, column_groups, 4).permute(3, 4, 0, 5, 6, 1, 7, 2)
    kept = draws.reshape(planes, row_groups * 16, column_groups * 16) >= threshold(p)
    return kept[:, :length_q, :length_k]


class _Kept(torch.autograd.Function):
    """A function only so that it can have the rule that the ops have under vmap: mapped elements are more batches."""

    @staticmethod
    def forward(state: Tensor, scores: Tensor, p: float) -> Tensor:
        batch, heads, length_q, length_k = scores.shape
        return _kept(state, batch * heads, length_q, length_k, p).view(scores.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], state: Tensor, scores: Tensor, p: float) -> tuple[Tensor, int]:
        size = info.batch_size
        if in_dims[0] is not None:
            state = state.select(in_dims[0], 0)
        scores = scores.expand(size, *scores.shape) if in_dims[1] is None else scores.movedim(in_dims[1], 0)
        return _Kept.apply(state, scores.flatten(0, 1), p).unflatten(0, (size, -1)), 0


def kept(state: Tensor, scores: Tensor, p: float) -> Tensor:
    """Bool, of the shape of `scores` (batch, heads, Lq, Lk): the weights that the kernels keep under this state."""
    return _Kept.apply(state, scores.detach(), p)
