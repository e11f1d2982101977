"""As test_known_failures: the rows on what a call reads and writes, and on results that repeat bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import inputs, leaves, normal, usual_place
from torch import Tensor

from kittens_torch import attention
from kittens_torch import scaled_dot_product_attention as drop_in

pytestmark = pytest.mark.usefixtures("only_ours")


@usual_place
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("masked", [False, True])
def test_row_13_views_of_a_poisoned_buffer(device: str, dtype: torch.dtype, poison: float, masked: bool) -> None:
    """Dao-AILab/flash-attention#1745: what lies behind the length is multiplied by nothing, also in the backward."""
    buffers = [normal(2, 2, 128, 64, device=device, dtype=dtype) for _ in range(3)]
    grad_output = normal(2, 2, 100, 64, device=device, dtype=dtype)
    mask = torch.rand(2, 1, 100, 128, device=device) > 0.3

    def results() -> list[Tensor]:
        views = [buffer[:, :, :100].detach().requires_grad_() for buffer in buffers]
        keywords = {"mask": mask[..., :100]} if masked else {}
        output = attention(*views, **keywords, deterministic=True)
        assert isinstance(output, Tensor)
        return [output.detach(), *torch.autograd.grad(output, views, grad_output)]

    for buffer in buffers:
        buffer[:, :, 100:] = 0.0
    clean = results()
    for buffer in buffers:
        buffer[:, :, 100:] = poison
    for name, poisoned, exact in zip(("output", "query", "key", "value"), results(), clean, strict=True):
        assert poisoned.isfinite().all(), name
        assert torch.equal(poisoned, exact), name


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("deterministic", [False, True])
def test_row_18_many_short_sequences(deterministic: bool) -> None:
    """Dao-AILab/flash-attention#1500: the sums of dQ, counted in whole tiles, are more than 2^31."""
    shape = (16500, 16, 20, 64)
    query, key, value, grad_output = (
        torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(4)
    )

    def gradients(chosen: slice | list[int]) -> tuple[Tensor, ...]:
        operands = leaves(query[chosen], key[chosen], value[chosen])
        output = attention(*operands, deterministic=deterministic)
        assert isinstance(output, Tensor)
        return torch.autograd.grad(output, operands, grad_output[chosen])

    some = [0, 16383, 16384, 16499]
    for name, many, few in zip(("query", "key", "value"), gradients(slice(None)), gradients(some), strict=True):
        assert torch.equal(many[some], few), name


@pytest.mark.gpu
@pytest.mark.large
def test_row_19_a_cache_past_2_31_elements() -> None:
    """Dao-AILab/flash-attention#772: keys and values of one layer, views of the cache of all, 2^30 elements a batch."""
    cache = torch.empty(5, 4096, 32, 2, 32, 128, device="cuda", dtype=torch.float16)
    key, value = (cache[:, :, 7, part].normal_().transpose(1, 2) for part in (0, 1))
    assert key.stride() == (1 << 30, 128, 262144, 1)
    query = normal(5, 32, 3, 128, device="cuda", dtype=torch.float16)
    grad_output = torch.randn_like(query)
    lengths = torch.tensor([4096, 1, 77, 4000, 4096], device="cuda")

    def results(key: Tensor, value: Tensor, **keywords: Any) -> list[Tensor]:
        operands = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output = attention(*operands, deterministic=True, **keywords)
        assert isinstance(output, Tensor)
        return [output.detach(), *torch.autograd.grad(output, operands, grad_output)]

    for keywords in ({}, {"causal": "lower_right"}, {"key_lengths": lengths}):
        far, near = results(key, value, **keywords), results(key.contiguous(), value.contiguous(), **keywords)
        for name, one, other in zip(("output", "query", "key", "value"), far, near, strict=True):
            assert one.isfinite().all() and torch.equal(one, other), name


@pytest.fixture
def torchs_switch() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def _runs_beside_other_work(times: int, **keywords: Any) -> list[list[Tensor]]:
    """Output, logsumexp and gradients of the same call, while a second stream keeps the GPU busy."""
    tensors = inputs("cuda", torch.bfloat16, batch=2, heads=16, heads_k=4, length_q=2048, head_dim=128)
    grad_output = normal(2, 16, 2048, 128, device="cuda", dtype=torch.bfloat16)
    bias = normal(1, 16, 1, 2048, device="cuda")
    other, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(times):
        with torch.cuda.stream(side):
            for _ in range(10):
                other = other.sin()
        operands = leaves(*tensors, bias)
        settings = {"causal": "lower_right", **keywords}
        output, logsumexp = attention(*operands[:3], bias=operands[3], return_lse=True, **settings)
        grads = torch.autograd.grad(output, operands, grad_output)
        plain = leaves(*tensors)
        without = attention(*plain, **settings)
        more = torch.autograd.grad(without, plain, grad_output)
        results.append([output.detach(), logsumexp.detach(), without.detach(), *grads, *more])
    torch.cuda.synchronize()
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["argument", "torch's switch"])
def test_row_41_deterministic_gradients(by: str, request: pytest.FixtureRequest) -> None:
    """Dao-AILab/flash-attention#2244: 30 runs, bit for bit, those of the bias included."""
    if by == "torch's switch":
        request.getfixturevalue("torchs_switch")
    first, *others = _runs_beside_other_work(30, deterministic=True if by == "argument" else None)
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
def test_row_41_outputs_repeat_without_asking() -> None:
    first, *others = _runs_beside_other_work(10)
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(again[:3], first[:3], strict=True))


@usual_place
def test_row_44_nothing_that_is_given_is_written(device: str, dtype: torch.dtype) -> None:
    """vllm-project/flash-attention#148: no op of ours has a written argument, in its schema or in fact."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("kittens_torch::")]
    assert {schema.name.split("::")[1] for schema in schemas} >= {"forward", "forward_modified", "backward"}
    assert not any(schema.is_mutable for schema in schemas)
    operands = leaves(*inputs(device, dtype, length_q=100, length_k=130))
    mask = torch.rand(1, 1, 100, 130, device=device) > 0.4
    bias = normal(1, 2, 100, 130, device=device, dtype=dtype).requires_grad_()
    grad_output = normal(1, 2, 100, 64, device=device, dtype=dtype)
    given = [*operands, mask, bias, grad_output]
    before = [tensor.detach().clone() for tensor in given]
    torch.autograd.grad(attention(*operands, mask=mask, bias=bias), [*operands, bias], grad_output)
    torch.autograd.grad(drop_in(*operands, is_causal=True), operands, grad_output)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))
