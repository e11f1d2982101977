"""The specification itself: against torch's math backend, and against loops that follow the formula literally."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import CORNERS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kittens_torch import reference


def _inputs(heads: int = 4, heads_k: int = 2, length_q: int = 5, length_k: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, heads, length_q, 6, dtype=torch.float64),
        torch.randn(2, heads_k, length_k, 6, dtype=torch.float64),
        torch.randn(2, heads_k, length_k, 3, dtype=torch.float64),
    )


def _math(*arguments: Any, **keywords: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*arguments, **keywords, enable_gqa=True)


def _by_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
    mask: Tensor,
    bias: Tensor,
    key_lengths: Tensor,
    softcap: float,
    alibi_slopes: Tensor,
    sinks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, length_q, _ = query.shape
    length_k, group = key.shape[2], heads // key.shape[1]
    output = torch.zeros(batch, heads, length_q, value.shape[3], dtype=torch.float64)
    logsumexp = torch.zeros(batch, heads, length_q, dtype=torch.float64)
    left, right = window or (None, None)
    for b in range(batch):
        for h in range(heads):
            for i in range(length_q):
                diagonal = i if causal == "upper_left" else i + length_k - length_q
                total = math.exp(sinks[h])
                for j in range(length_k):
                    hidden = causal is not None and j > diagonal
                    hidden |= left is not None and j < diagonal - left
                    hidden |= right is not None and j > diagonal + right
                    hidden |= j >= key_lengths[b] or not bool(mask[b, 0, i, j])
                    if hidden:
                        continue
                    logit = scale * float(query[b, h, i] @ key[b, h // group, j])
                    logit = softcap * math.tanh(logit / softcap)
                    logit += float(bias[0, h, i, j]) - float(alibi_slopes[h]) * abs(i + length_k - length_q - j)
                    total += math.exp(logit)
                    output[b, h, i] += math.exp(logit) * value[b, h // group, j]
                output[b, h, i] /= total
                logsumexp[b, h, i] = math.log(total)
    return output, logsumexp


@pytest.mark.parametrize("causal", CORNERS)
@pytest.mark.parametrize("window", [None, (2, None), (None, 1), (1, 2)])
@pytest.mark.parametrize(("length_q", "length_k"), [(5, 7), (7, 5), (6, 6)])
def test_everything_at_once(causal: str | None, window: Any, length_q: int, length_k: int) -> None:
    tensors = _inputs(length_q=length_q, length_k=length_k)
    keywords = {
        "causal": causal,
        "window": window,
        "mask": torch.rand(2, 1, length_q, length_k) > 0.3,
        "bias": torch.randn(1, 4, length_q, length_k, dtype=torch.float64),
        "key_lengths": torch.tensor([length_k, 3]),
        "softcap": 2.0,
        "alibi_slopes": torch.rand(4, dtype=torch.float64),
        "sinks": torch.randn(4, dtype=torch.float64),
        "scale": 0.7,
    }
    output, logsumexp = reference.attention(*tensors, **keywords)
    expected, expected_logsumexp = _by_loops(*tensors, **keywords)
    assert torch.allclose(output, expected, atol=1e-12) and torch.allclose(logsumexp, expected_logsumexp, atol=1e-12)


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.5])
def test_torchs_math_backend(scale: float | None) -> None:
    tensors = _inputs()
    assert torch.allclose(reference.attention(*tensors, scale=scale)[0], _math(*tensors, scale=scale), atol=1e-12)
    causal = reference.attention(*tensors, causal="upper_left", scale=scale)[0]
    assert torch.allclose(causal, _math(*tensors, is_causal=True, scale=scale), atol=1e-12)
    mask, bias = torch.rand(5, 7) > 0.5, torch.randn(2, 1, 5, 7, dtype=torch.float64)
    mask[2] = False
    assert torch.allclose(reference.attention(*tensors, mask=mask)[0], _math(*tensors, attn_mask=mask), atol=1e-12)
    assert torch.allclose(reference.attention(*tensors, bias=bias)[0], _math(*tensors, attn_mask=bias), atol=1e-12)


def test_rows_without_keys() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in _inputs(length_q=5, length_k=2))
    output, logsumexp = reference.attention(query, key, value, causal="lower_right")
    assert not output[:, :, :3].any() and output[:, :, 3:].all()
    assert torch.equal(logsumexp == float("-inf"), torch.arange(5).expand(2, 4, 5) < 3)
    output.sum().backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (query, key, value)) and not query.grad[:, :, :3].any()
    output, logsumexp = reference.attention(query, key[:, :, :0], value[:, :, :0])
    assert not output.any() and (logsumexp == float("-inf")).all()
    sinks = torch.randn(4, dtype=torch.float64)
    output, logsumexp = reference.attention(query, key, value, key_lengths=torch.tensor([0, 0]), sinks=sinks)
    assert not output.any() and torch.allclose(logsumexp, sinks.view(1, 4, 1).expand(2, 4, 5))


def test_poison_that_no_row_sees() -> None:
    query, key, value = _inputs(length_q=3, length_k=7)
    clean = reference.attention(query, key, value, key_lengths=torch.tensor([4, 7]), causal="upper_left")
    key[:, :, 3:] = float("nan")
    value[:, :, 3:] = float("inf")
    poisoned = reference.attention(query, key, value, key_lengths=torch.tensor([4, 7]), causal="upper_left")
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_gradients() -> None:
    tensors = [tensor.requires_grad_() for tensor in _inputs(length_q=3, length_k=4)]
    assert torch.autograd.gradcheck(lambda *t: reference.attention(*t, causal="lower_right", softcap=3.0), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: reference.attention(*t)[0], tensors)


@pytest.mark.parametrize("causal", CORNERS)
def test_visible_keys(causal: str | None) -> None:
    for length_q, length_k in ((2, 5), (5, 2), (4, 4)):
        visible = reference.visible_keys(length_q, length_k, causal)
        full = torch.ones(length_q, length_k, dtype=torch.bool)
        diagonal = {None: length_k + length_q, "upper_left": 0, "lower_right": length_k - length_q}[causal]
        assert torch.equal(visible, full.tril(diagonal))
