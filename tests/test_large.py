"""Tensors of more than 2^31 elements: every offset must be 64 bits wide. Needs some 20 GB of GPU memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kittens_torch
from kittens_torch import reference

pytestmark = [pytest.mark.gpu, pytest.mark.large]

LIMIT = 1 << 31


def random(*shape: int) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()


def assert_rows(output: Tensor, query: Tensor, key: Tensor, value: Tensor, where: tuple[int, int], rows: slice) -> None:
    """The rows of one head against float64; all of them see every key."""
    batch, head = where
    operands = (query[batch, head, rows], key[batch, head], value[batch, head])
    exact, _ = reference.attention(*(operand.double()[None, None] for operand in operands))
    assert (output[batch, head, rows].double() - exact[0, 0]).abs().max() < 2e-2


def test_many_query_rows() -> None:
    length = LIMIT // 128 // 2 + 1000
    query, key, value = random(1, 2, length, 128), random(1, 2, 200, 128), random(1, 2, 200, 128)
    assert query.numel() > LIMIT
    output = kittens_torch.attention(query, key, value)
    for head in (0, 1):
        for rows in (slice(0, 200), slice(length - 200, length)):
            assert_rows(output, query, key, value, (0, head), rows)


def test_many_heads_of_keys() -> None:
    batch, heads, length = 66, 32, 8000
    key, value, query = (
        random(batch, heads, length, 128),
        random(batch, heads, length, 128),
        random(batch, heads, 64, 128),
    )
    assert key.numel() > LIMIT
    output = kittens_torch.attention(query, key, value)
    for where in ((0, 0), (batch - 1, heads - 1), (batch // 2, 5)):
        assert_rows(output, query, key, value, where, slice(0, 64))


def test_far_apart_in_a_buffer() -> None:
    """Few elements, but strides that carry the last head beyond 2^31 elements."""
    buffer = torch.empty(LIMIT + (1 << 20), device="cuda", dtype=torch.bfloat16)
    query = buffer.as_strided((1, 2, 300, 64), (LIMIT, LIMIT, 64, 1)).normal_()
    output = kittens_torch.attention(query, query, query)
    for head in (0, 1):
        assert_rows(output, query, query, query, (0, head), slice(0, 300))
