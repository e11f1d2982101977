"""Launches that follow each other: each begins while the one before it ends, alone and in graphs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import normal
from torch import Tensor

from kittens_torch import backward, ops

pytestmark = pytest.mark.gpu

SHAPES = [(1, 2, 64), (4, 16, 512), (1, 8, 2048), (40, 16, 130)]


def _chain(query: Tensor, key: Tensor, value: Tensor, corner: int, synchronised: bool) -> Tensor:
    """Every call reads what the one before it wrote; an operation of torch in between now and then."""
    settings = (query.shape[-1] ** -0.5, corner, -1, -1)
    for index in range(8):
        output, logsumexp = ops.forward(query, key, value, *settings)
        if synchronised:
            torch.cuda.synchronize()
        query, key, value = backward.backward(
            output, None, query, key, value, output, logsumexp, *settings, True, True, True, True
        )
        if synchronised:
            torch.cuda.synchronize()
        if index % 3 == 0:
            query = query * 1.5
        # Gradients shrink from call to call.
        query, key, value = (tensor / tensor.float().std().to(tensor.dtype) for tensor in (query, key, value))
    return query


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("corner", [0, 1])
def test_each_call_sees_what_the_one_before_it_wrote(shape: tuple[int, int, int], head_dim: int, corner: int) -> None:
    batch, heads, length = shape
    tensors = [normal(batch, heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    exact = _chain(*tensors, corner, synchronised=True)
    assert exact.isfinite().all()
    assert torch.equal(_chain(*tensors, corner, synchronised=False), exact)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _chain(*tensors, corner, synchronised=False)
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, exact)


def test_graphs_on_two_streams() -> None:
    """Each launch in a graph has a tile counter of its own: graphs may run beside each other and beside plain calls."""
    tensors = [normal(4, 16, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    settings = (128**-0.5, 1, -1, -1)
    exact = ops.forward(*tensors, *settings)[0]
    graphs, outputs, streams = [], [], [torch.cuda.Stream() for _ in range(2)]
    for _ in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs.append([ops.forward(*tensors, *settings)[0] for _ in range(10)])
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        assert torch.equal(ops.forward(*tensors, *settings)[0], exact)
    torch.cuda.synchronize()
    for output in (tensor for captured in outputs for tensor in captured):
        assert torch.equal(output, exact)


def test_the_first_call_of_a_process_is_captured() -> None:
    program = """
import torch, kittens_torch
query, key, value = (torch.randn(4, 16, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    output = kittens_torch.scaled_dot_product_attention(query, key, value, is_causal=True)
graph.replay()
exact = kittens_torch.scaled_dot_product_attention(query, key, value, is_causal=True)
assert torch.equal(output, exact)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
