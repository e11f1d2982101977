"""Which weights dropout keeps, worked out apart from the kernels."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

U32 = numpy.uint64(0xFFFFFFFF)


def philox(key: int, *counter: numpy.ndarray, rounds: int = 7) -> list[numpy.ndarray]:
    """Philox4x32 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011), seven rounds."""
    c = [numpy.asarray(part, dtype=numpy.uint64) for part in counter]
    low, high = key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        first, second = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        shift = numpy.uint64(32)
        c = [
            (second >> shift) ^ c[1] ^ numpy.uint64(low),
            second & U32,
            (first >> shift) ^ c[3] ^ numpy.uint64(high),
            first & U32,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return c


def kept(state: Tensor, p: float, batch: int, heads: int, length_q: int, length_k: int) -> Tensor:
    """The weights that dropout keeps, by the rule written down in dropout.h."""
    seed, offset = (int(number) & (2**64 - 1) for number in state)
    threshold = min(int(p * 32768 + 0.5), 32767)
    plane, row, column = numpy.ogrid[: batch * heads, :length_q, :length_k]
    row_group, column_group = row // 16 * 8 + row % 8, column // 16 * 4 + column % 8 // 2
    element = row // 8 % 2 * 4 + column // 8 % 2 * 2 + column % 2
    words = philox(seed, column_group, row_group, plane, numpy.full_like(plane, offset & 0xFFFFFFFF))
    word = numpy.choose(numpy.broadcast_to(element // 2, words[0].shape), words)
    value = (word >> (element % 2 * 16).astype(numpy.uint64)) & numpy.uint64(0x7FFF)
    return torch.from_numpy((value >= threshold).reshape(batch, heads, length_q, length_k))


def share_dropped(p: float) -> float:
    """What becomes of `dropout_p`: weights are dropped in multiples of 1 / 32768."""
    return min(int(p * 32768 + 0.5), 32767) / 32768
