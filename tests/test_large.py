"""Tensors of more than 2^31 elements: every offset must be 64 bits wide. Needs some 20 GB of GPU memory."""

from __future__ import annotations

import pytest
import torch
from helpers import leaves
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


def near(name: str, ours: Tensor, exact: Tensor) -> None:
    """Sums over tens of thousands of keys or rows are small: the error counts by the largest of them."""
    error = (ours.double() - exact).abs().max()
    assert error < 0.02 * exact.abs().max(), f"{name}: error {error:.1e}, the largest is {exact.abs().max():.1e}"


@pytest.mark.parametrize("kind", ["mask of each head", "bias of all heads"])
def test_masks_of_many_elements(kind: str) -> None:
    """Tiles of which some keys are hidden, so that the mask itself is read; the last rows and keys against float64."""
    length, heads, last = 47000, 2, slice(47000 - 200, 47000)
    operands = leaves(*(random(1, heads, length, 64) for _ in range(3)))
    grad_output = random(1, heads, length, 64)
    if kind.startswith("mask"):
        mask, bias = torch.empty(1, heads, length, length, device="cuda", dtype=torch.bool).bernoulli_(0.5), None
        output, logsumexp = kittens_torch.attention(*operands, mask=mask, return_lse=True)
    else:
        mask, bias = None, random(1, 1, length, length).requires_grad_()
        assert bias.numel() > LIMIT
        output, logsumexp = kittens_torch.attention(*operands, bias=bias, return_lse=True)
    wanted = operands if bias is None else [*operands, bias]
    grads = torch.autograd.grad(output, wanted, grad_output)
    query, key, value = (tensor.detach()[0].double() for tensor in operands)
    output, logsumexp, output_gradient = output.detach()[0], logsumexp.detach()[0].double(), grad_output[0].double()
    delta = (output_gradient * output.double()).sum(-1)

    def of(head: int, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
        """The weights and the gradients of the scores of some rows and keys."""
        scores = query[head, rows] @ key[head, keys].T / 8
        if bias is not None:
            scores += bias.detach()[0, 0, rows, keys].double()
        if mask is not None:
            scores.masked_fill_(~mask[0, head, rows, keys], float("-inf"))
        weights = (scores - logsumexp[head, rows, None]).exp()
        return weights, weights * (output_gradient[head, rows] @ value[head, keys].T - delta[head, rows, None])

    grad_bias = torch.zeros_like(query[0, last] @ key[0, last].T)
    for head in range(heads):
        weights, score_gradients = of(head, last, slice(None))
        near("weights", weights.sum(-1), torch.ones_like(weights[:, 0]))
        near("output", output[head, last], weights @ value[head])
        near("query", grads[0][0, head, last], score_gradients @ key[head] / 8)
        grad_bias += score_gradients[:, last]
        weights, score_gradients = of(head, slice(None), last)
        near("key", grads[1][0, head, last], score_gradients.T @ query[head] / 8)
        near("value", grads[2][0, head, last], weights.T @ output_gradient[head])
    if bias is not None:
        near("bias", grads[3][0, 0, last, last], grad_bias)
