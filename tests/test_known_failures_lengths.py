"""As test_known_failures: the rows on packs and caches, as far as lengths by batch and empty dimensions say them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_forward, check_gradients, inputs, leaves, normal, usual_place
from torch import Tensor

from kittens_torch import attention
from kittens_torch import scaled_dot_product_attention as drop_in

pytestmark = pytest.mark.usefixtures("only_ours")


@usual_place
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("length_q", [1, 3])
def test_row_13_slots_of_a_cache_that_are_not_in_use(
    device: str, dtype: torch.dtype, poison: float, length_q: int
) -> None:
    """Dao-AILab/flash-attention#1745: slots from the length on do not reach the output, whatever they hold."""
    cache = [normal(2, 128, 2, 64, device=device, dtype=dtype) for _ in range(2)]
    query = normal(2, length_q, 4, 64, device=device, dtype=dtype).transpose(1, 2)
    lengths = torch.tensor([1, 96], device=device)
    grad_output = torch.randn_like(query)

    def results() -> list[Tensor]:
        operands = [tensor.detach().requires_grad_() for tensor in (query, *(part.transpose(1, 2) for part in cache))]
        output = attention(*operands, key_lengths=lengths, deterministic=True)
        assert isinstance(output, Tensor)
        return [output.detach(), *torch.autograd.grad(output, operands, grad_output)]

    for fill in (0.0, poison):
        for part in cache:
            part[0, 1:], part[1, 96:] = fill, fill
        found = results()
        if fill == 0.0:
            clean = found
    for name, poisoned, exact in zip(("output", "query", "key", "value"), found, clean, strict=True):
        assert poisoned.isfinite().all(), name
        assert torch.equal(poisoned, exact), name


@usual_place
def test_row_33_one_query_row_groups_and_a_batch_without_keys(device: str, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#1537: a query of one row over groups of heads; a batch that has no key is 0."""
    lengths = [3, 0, 5]
    operands = inputs(device, dtype, batch=3, heads=9, heads_k=3, length_q=1, length_k=5)
    query, key, value = leaves(*operands)
    output, logsumexp = attention(
        query, key, value, key_lengths=torch.tensor(lengths, device=device), return_lse=True, deterministic=True
    )
    assert output.shape == query.shape
    grad_output = torch.randn_like(output)
    grads = torch.autograd.grad(output, (query, key, value), grad_output)
    for batch, length in enumerate(lengths):
        part = slice(batch, batch + 1)
        if length == 0:
            assert not output[part].any() and (logsumexp[part] == float("-inf")).all()
            assert not any(grad[part].any() for grad in grads)
            continue
        alone = [query[part], key[part, :, :length], value[part, :, :length]]
        check_forward(*(tensor.detach() for tensor in alone))
        mine = (grads[0][part], grads[1][part, :, :length], grads[2][part, :, :length])
        check_gradients(mine, *alone, grad_output[part])
        torch.testing.assert_close(output[part], attention(*alone), atol=1e-2, rtol=1e-2)
        assert not grads[1][part, :, length:].any() and not grads[2][part, :, length:].any()
    single = inputs(device, dtype, heads=21, heads_k=7, length_q=1, head_dim=120)
    its_value = single[2].repeat_interleave(3, dim=1)
    torch.testing.assert_close(drop_in(*single, enable_gqa=True, is_causal=True), its_value)


def _poison_memory(tensors: list[Tensor], times: int = 3) -> None:
    """What the allocator hands out next, of these sizes, holds NaN."""
    for _ in range(times):
        held = [torch.full_like(tensor, float("nan")) for tensor in tensors for _ in range(4)]
        del held


@usual_place
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [None, "lower_right"])
def test_row_34_keys_without_queries(device: str, dtype: torch.dtype, head_dim: int, causal: str | None) -> None:
    """Dao-AILab/flash-attention#2562: gradients of keys that no query sees are 0, not what lay in memory."""
    for length_q, length_k in ((0, 70), (40, 60), (24, 20), (0, 100)):
        sizes: dict[str, Any] = {"heads": 4, "heads_k": 1, "length_q": length_q, "length_k": length_k}
        query, key, value = leaves(*inputs(device, dtype, **sizes, head_dim=head_dim))
        grad_output = torch.randn_like(query)
        output = attention(query, key, value, causal=causal)
        assert isinstance(output, Tensor)
        _poison_memory([query, key, value])
        grads = torch.autograd.grad(output, (query, key, value), grad_output)
        if length_q == 0:
            assert grads[0].shape == query.shape and output.shape == query.shape
            assert not grads[1].any() and not grads[2].any()
        else:
            check_gradients(grads, query, key, value, grad_output, causal=causal)


@usual_place
def test_row_36_lengths_past_the_end_of_the_buffer(device: str, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#638: a length beyond the keys, or below 0, reaches no neighbour, in either pass."""
    size = 64 * 4 * 128
    buffer = torch.full((2 * size + 4096,), float("nan"), device=device, dtype=dtype)
    key, value = (buffer[part * size :][:size].view(1, 64, 4, 128).transpose(1, 2).normal_() for part in range(2))
    sentinels = buffer[2 * size :]
    query = normal(1, 4, 2, 128, device=device, dtype=dtype)
    grad_output = torch.randn_like(query)

    def results(length: int) -> list[Tensor]:
        operands = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        lengths = torch.tensor([length], device=device)
        output = attention(*operands, key_lengths=lengths, deterministic=True)
        assert isinstance(output, Tensor)
        return [output.detach(), *torch.autograd.grad(output, operands, grad_output)]

    within = results(64)
    assert all(tensor.isfinite().all() for tensor in within)
    for length in (65, 66, 4096, 2**31 - 1, 2**31 + 64, 2**40):
        assert all(torch.equal(mine, right) for mine, right in zip(results(length), within, strict=True)), length
    for length in (0, -1, -(2**31), -(2**40)):
        assert not any(tensor.any() for tensor in results(length)), length
    assert sentinels.isnan().all()
    assert all(torch.equal(mine, right) for mine, right in zip(results(64), within, strict=True)), "a call afterwards"
