"""The ops under fake tensors, opcheck, torch.compile and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import CORNERS, dtype_of, inputs, leaves, normal
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import kittens_torch
from kittens_torch import attention, backward, dispatch, ops
from kittens_torch import scaled_dot_product_attention as drop_in

pytestmark = pytest.mark.usefixtures("only_ours")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _bhld(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.bfloat16)


# Every layout of a query: name -> (B, H, L, D) tensor.
QUERIES: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: _bhld(2, 3, 5, 8),
    "length before heads": lambda: _bhld(2, 5, 3, 8).transpose(1, 2),
    "slice of packed qkv": lambda: _bhld(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2),
    "heads outside": lambda: _bhld(3, 2, 5, 8).transpose(0, 1),
    "length outside": lambda: _bhld(5, 2, 3, 8).permute(1, 2, 0, 3),
    "length, heads, batch": lambda: _bhld(5, 3, 2, 8).permute(2, 1, 0, 3),
    "columns outside": lambda: _bhld(2, 8, 3, 5).permute(0, 2, 3, 1),
    "last stride 2": lambda: _bhld(2, 3, 5, 16)[..., ::2],
    "length 1": lambda: _bhld(2, 3, 1, 8),
    "length 1, moved": lambda: _bhld(2, 1, 3, 8).transpose(1, 2),
    "batch 1": lambda: _bhld(1, 3, 5, 8),
    "batch 1, moved": lambda: _bhld(1, 5, 3, 8).transpose(1, 2),
    "one head": lambda: _bhld(2, 1, 5, 8),
    "one head, moved": lambda: _bhld(5, 2, 1, 8).permute(1, 2, 0, 3),
    "all ones": lambda: _bhld(1, 1, 1, 8),
    "one column": lambda: _bhld(2, 5, 3, 1).transpose(1, 2),
    "expanded heads": lambda: _bhld(2, 1, 5, 8).expand(2, 3, 5, 8),
    "expanded heads, moved": lambda: _bhld(5, 2, 1, 8).permute(1, 2, 0, 3).expand(2, 3, 5, 8),
    "expanded batch": lambda: _bhld(1, 5, 3, 8).transpose(1, 2).expand(2, 3, 5, 8),
    "all expanded": lambda: _bhld(1, 1, 1, 8).expand(2, 3, 5, 8),
    "equal strides": lambda: torch.as_strided(_bhld(400), (2, 3, 5, 8), (40, 40, 8, 1)),
    "many batches": lambda: _bhld(2000, 1, 1, 8),
    "no batch": lambda: _bhld(0, 5, 3, 8).transpose(1, 2),
    "no rows": lambda: _bhld(2, 0, 3, 8).transpose(1, 2),
}


def _metadata(tensors: tuple[Tensor, ...]) -> list[Any]:
    return [(tuple(t.shape), t.stride(), t.dtype, t.device) for t in tensors]


@devices
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("name", QUERIES)
def test_fake_outputs_are_the_real_ones(device: str, name: str, value_dim: int) -> None:
    query = QUERIES[name]().to(device)
    key = normal(query.shape[0], query.shape[1], 4, query.shape[3], dtype=torch.bfloat16, device=device)
    value = normal(query.shape[0], query.shape[1], 4, value_dim, dtype=torch.bfloat16, device=device)
    operands = (query, key, value)
    real = _metadata(ops.forward(*operands, 0.5, 1, -1, -1))
    with FakeTensorMode() as mode:
        assert _metadata(ops.forward(*(mode.from_tensor(t) for t in operands), 0.5, 1, -1, -1)) == real
    meta = ops.forward(
        *(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in operands), 0.5, 1, -1, -1
    )
    assert [entry[:3] for entry in _metadata(meta)] == [entry[:3] for entry in real]
    if device == "cpu" and query.shape[0] < 100:  # a tile takes the checking flavour milliseconds
        assert _metadata(ops.checked_forward(*operands, 0.5, 1, -1, -1, -1, 0)) == real


@devices
@pytest.mark.parametrize("name", QUERIES)
def test_fake_gradients_are_the_real_ones(device: str, name: str) -> None:
    query = QUERIES[name]().to(device)
    output, logsumexp = ops.forward(query, query, query, 0.5, 1, -1, -1)
    operands = (output, None, query, query, query, output, logsumexp)
    for needed in ((True, True, True), (False, True, False)):
        real = _metadata(backward.backward(*operands, 0.5, 1, -1, -1, *needed))
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) if t is not None else None for t in operands]
            assert _metadata(backward.backward(*fake, 0.5, 1, -1, -1, *needed)) == real


@devices
@pytest.mark.parametrize("name", ["contiguous", "length before heads", "expanded heads", "length 1", "no rows"])
def test_opcheck(device: str, name: str) -> None:
    query = QUERIES[name]().to(device)
    output, logsumexp = ops.forward(query, query, query, 0.5, 2, 3, -1)
    torch.library.opcheck(ops.forward, (query, query.clone(), query.clone(), 0.5, 2, 3, -1))
    torch.library.opcheck(
        backward.backward,
        (output, logsumexp, query, query.clone(), query.clone(), output, logsumexp, 0.5, 2, 3, -1, True, True, True),
        rtol=1e-2,
        atol=1e-2,
    )
    if device == "cpu":
        torch.library.opcheck(ops.checked_forward, (query, query.clone(), query.clone(), 0.5, 2, 3, -1, -1, 1))


def _same_as_eager(
    function: Callable[..., Any], tensors: tuple[Tensor, ...], backend: str = "aot_eager", **options: Any
) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend, **options)
    operands, copies = leaves(*tensors), leaves(*tensors)
    output, expected = compiled(*operands), function(*copies)
    for mine, eager in zip(
        torch.utils._pytree.tree_leaves(output), torch.utils._pytree.tree_leaves(expected), strict=True
    ):
        assert torch.equal(mine, eager) and mine.stride() == eager.stride()
    grad = normal(1).to(tensors[0].device)
    for result in (output, expected):
        loss = sum((t.float() * grad).square().sum() for t in torch.utils._pytree.tree_leaves(result))
        loss.backward()
    for operand, copy in zip(operands, copies, strict=True):
        assert torch.allclose(operand.grad, copy.grad, atol=1e-6, rtol=1e-3)
        assert operand.grad.stride() == copy.grad.stride()


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "drop-in": lambda q, k, v: drop_in(q, k, v),
    "causal and scale": lambda q, k, v: drop_in(q, k, v, is_causal=True, scale=0.3),
    "negative scale": lambda q, k, v: drop_in(q, k, v, scale=-0.3),
    "rank 3": lambda q, k, v: drop_in(q[0], k[0], v[0]),
    "rank 5": lambda q, k, v: drop_in(q[None], k[None], v[None]),
    "broadcast": lambda q, k, v: drop_in(q, k[:1, :1], v[:1, :1]),
    "attention": lambda q, k, v: kittens_torch.attention(q, k, v, causal="lower_right", window=(3, None)),
    "with logsumexp": lambda q, k, v: kittens_torch.attention(q, k, v, return_lse=True),
    "moved": lambda q, k, v: drop_in(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))) + 1,
}


@devices
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *((name, False) for name in FUNCTIONS),
        *((name, True) for name in ("causal and scale", "rank 5", "with logsumexp")),
    ],
)
def test_fullgraph(device: str, name: str, dynamic: bool) -> None:
    tensors = inputs(device, torch.bfloat16, batch=2, heads=4, length_q=10, length_k=12, head_dim=16)
    _same_as_eager(FUNCTIONS[name], tensors, dynamic=dynamic)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_tracing_for_a_gpu_that_is_not_here() -> None:
    has_kernels = not dispatch.gpu_missing(0)
    with FakeTensorMode():
        query = torch.empty(2, 5, 3, 8, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        if has_kernels:
            output = drop_in(query, query, query)
            assert output.device.type == "cuda" and output.stride() == query.stride()
        else:
            with pytest.raises(kittens_torch.FallbackError, match="no CUDA kernels"):
                drop_in(query, query, query)
    assert not torch.cuda.is_initialized()


@devices
def test_fullgraph_grouped_heads(device: str) -> None:
    tensors = inputs(device, torch.bfloat16, batch=2, heads=4, heads_k=2, length_q=10, length_k=12, head_dim=16)
    _same_as_eager(lambda q, k, v: drop_in(q, k, v, enable_gqa=True), tensors)


@devices
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "soft cap"])
def test_one_tensor_as_query_key_and_value(device: str, options: dict[str, float]) -> None:
    """A compiler traces no autograd function that is given a tensor twice."""

    def attend(tensor: Tensor) -> Tensor:
        return kittens_torch.attention(tensor, tensor, tensor, **options)

    tensor = torch.randn(1, 2, 30, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    outputs = attend(tensor), torch.compile(attend, fullgraph=True, backend="aot_eager")(tensor)
    grads = [torch.autograd.grad(output.sum(), tensor)[0] for output in outputs]
    assert torch.equal(*outputs)
    torch.testing.assert_close(*grads, rtol=1e-2, atol=1e-2)


@devices
def test_default_backend(device: str) -> None:
    """Through inductor, with surrounding work that it may lay out as it likes."""
    tensors = inputs(device, torch.bfloat16, batch=2, heads=4, length_q=10, length_k=12, head_dim=16)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        return drop_in(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    _same_as_eager(block, tensors, backend="inductor")


def test_one_graph_for_all_lengths() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return drop_in(q, k, v, is_causal=True).float().square().sum()

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 6, 17, 70, 130):
        operands = leaves(*inputs("cpu", torch.bfloat16, batch=2, length_q=length, length_k=length + 3, head_dim=16))
        compiled(*operands).backward()
        copies = leaves(*operands)
        forward(*copies).backward()
        assert all(torch.allclose(a.grad, b.grad, rtol=1e-2, atol=1e-3) for a, b in zip(operands, copies, strict=True))
    assert counter.frame_count <= 2


def test_no_grad_graph_holds_one_op() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, examples: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        torch.compile(lambda q, k, v: drop_in(q, k, v), fullgraph=True, backend=keep)(*inputs("cpu", torch.bfloat16))
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert calls.count(ops.forward) == 1 and len(calls) == 2  # and its first output


def test_fallback_compiles() -> None:
    before = kittens_torch.set_fallback("warn")
    query, key, value = inputs("cpu", torch.float32, length_q=5, length_k=7, head_dim=300)
    mask = torch.ones(5, 7, dtype=torch.bool).tril(3)
    try:
        compiled = torch.compile(lambda q, k, v, m: drop_in(q, k, v, m), fullgraph=True, backend="aot_eager")
        with pytest.warns(kittens_torch.FallbackWarning, match="300"):
            output = compiled(query, key, value, mask)
    finally:
        kittens_torch.set_fallback(before)
    assert torch.allclose(output, torch.nn.functional.scaled_dot_product_attention(query, key, value, mask))


@devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_modified_scores_compile(device: str, dynamic: bool) -> None:
    """Masks, biases, sinks and dropout in one graph, whatever the lengths."""

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        masked = drop_in(q, k, v, mask)
        modified = attention(q, k, v, mask=mask, bias=bias, sinks=sinks, softcap=5.0, causal="lower_right")
        assert isinstance(modified, Tensor)
        return masked + modified

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = attention(q, k, v, dropout_p=0.5)
        assert isinstance(output, Tensor)
        return output

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (5, 70):
        query, key, value = inputs(device, dtype_of(device), heads=2, length_q=length, length_k=90, head_dim=16)
        mask, bias = torch.rand(1, 2, length, 90, device=device) > 0.3, torch.randn(length, 90, device=device)
        sinks = torch.randn(2, device=device)
        output = compiled(query, key, value, mask, bias, sinks)
        expected = forward(query, key, value, mask, bias, sinks)
        assert torch.allclose(output.float(), expected.float(), atol=2e-2 if device == "cuda" else 1e-5)
        random = torch.compile(dropped, fullgraph=True, backend="aot_eager")(query, key, value)
        zeros = attention(query, key, value * 0 + 1, dropout_p=0.5)
        assert random.shape == query.shape and isinstance(zeros, Tensor) and zeros.std() > 0


@devices
def test_modified_op_is_well_described(device: str) -> None:
    query, key, value = inputs(device, dtype_of(device), batch=2, heads=2, length_q=20, length_k=30, head_dim=16)
    mask, bias = torch.rand(2, 1, 20, 30, device=device) > 0.3, torch.randn(1, 2, 20, 30, device=device)
    lengths, slopes = torch.tensor([3, 30], dtype=torch.int32, device=device), torch.rand(2, device=device)
    state = torch.tensor([1, 2], device=device)
    settings = (0.3, 2, -1, -1)
    for tensors, p, cap in (
        ((mask, bias, lengths, slopes, slopes, state), 0.25, 3.0),
        ((None, None, None, None, None, None), 0.0, 0.0),
    ):
        torch.library.opcheck(ops.forward_modified, (query, key, value, *settings, *tensors, p, cap))


def test_autocast_compiles() -> None:
    tensors = inputs("cpu", torch.float32, length_q=5, head_dim=8)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return drop_in(q, k, v)

    output = torch.compile(forward, fullgraph=True, backend="aot_eager")(*tensors)
    assert output.dtype == torch.bfloat16 and torch.equal(output, forward(*tensors))


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return drop_in(q, k, v, is_causal=True)

    batch = torch.export.Dim("batch", min=2)
    query, key, value = inputs("cpu", torch.float32, batch=3, length_q=6, head_dim=8)
    program = torch.export.export(Model(), (query, key, value), dynamic_shapes=({0: batch}, {0: batch}, {0: batch}))
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(ops.forward) == 1
    wider = inputs("cpu", torch.float32, batch=5, length_q=6, head_dim=8)
    assert torch.equal(program.module()(*wider), drop_in(*wider, is_causal=True))


@pytest.mark.parametrize("corner", range(len(CORNERS)))
def test_make_fx_with_symbolic_sizes(corner: int) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = inputs("cpu", torch.float32, batch=2, length_q=6, head_dim=8)
    traced = make_fx(lambda q, k, v: ops.forward(q, k, v, 0.5, corner, -1, -1), tracing_mode="symbolic")(*tensors)
    for length in (6, 9):
        other = inputs("cpu", torch.float32, batch=2, length_q=length, head_dim=8)
        assert all(
            torch.equal(a, b) for a, b in zip(traced(*other), ops.forward(*other, 0.5, corner, -1, -1), strict=True)
        )
