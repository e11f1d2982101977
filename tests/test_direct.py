"""The short way to the forward op (`ops.direct_forward`): the same bits as the op, and whom it leaves to the op."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from helpers import every_place, inputs, usual_place
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kittens_torch import call, ops

UPPER_LEFT = call.UPPER_LEFT


def check_direct(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, corner: int = 0) -> Tensor:
    expected = ops.eager_forward(query, key, value, scale, corner)[0]
    output = ops.direct_forward(query, key, value, scale, corner)
    assert output is not None
    assert torch.equal(output, expected)
    assert output.dtype == expected.dtype and output.device == expected.device and output.shape == expected.shape
    assert [stride for stride, size in zip(output.stride(), output.shape, strict=True) if size > 1] == [
        stride for stride, size in zip(expected.stride(), expected.shape, strict=True) if size > 1
    ]
    assert not output.requires_grad and output._base is None and output._version == 0
    return output


@every_place
@pytest.mark.parametrize("corner", [0, UPPER_LEFT])
@pytest.mark.parametrize(("length_q", "length_k"), [(1, 1), (1, 700), (65, 64), (64, 257)])
def test_same_as_the_op(device: str, dtype: torch.dtype, corner: int, length_q: int, length_k: int) -> None:
    operands = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=length_q, length_k=length_k, head_dim=64)
    check_direct(*operands, corner=corner)
    check_direct(*operands, scale=0.3, corner=corner)


@usual_place
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (192, 128), (64, 128), (8, 256)])
def test_value_dims(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    check_direct(*inputs(device, dtype, length_q=50, head_dim=head_dim, value_dim=value_dim))


@usual_place
def test_layouts(device: str, dtype: torch.dtype) -> None:
    packed = torch.randn(2, 30, 3, 4, 64, device=device, dtype=dtype)
    check_direct(*(part.transpose(1, 2) for part in packed.unbind(2)))
    rows_first = torch.randn(2, 30, 4, 64, device=device, dtype=dtype).transpose(1, 2)
    check_direct(rows_first, rows_first, rows_first)
    one_row = torch.randn(2, 1, 4, 64, device=device, dtype=dtype).transpose(1, 2)
    check_direct(one_row, rows_first, rows_first)
    expanded = torch.randn(2, 1, 30, 64, device=device, dtype=dtype).expand(2, 4, 30, 64)
    check_direct(expanded, expanded, expanded)
    behind = torch.randn(3, 4, 30, 64, device=device, dtype=dtype)[1:]
    assert behind.storage_offset() > 0
    check_direct(behind, behind, behind)


@pytest.mark.gpu
def test_what_would_be_copied() -> None:
    """Memory that TMA cannot read is the op's: it copies, and its output is the same as ever."""
    flat = torch.randn(4 * 30 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    misaligned = flat[1:].view(1, 4, 30, 64)
    assert ops.direct_forward(misaligned, misaligned, misaligned, None, 0) is None
    odd = torch.randn(1, 4, 30, 65, device="cuda", dtype=torch.bfloat16)
    assert ops.direct_forward(odd, odd, odd, None, 0) is None


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Derived(Tensor):
    pass


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _profile() -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize("watching", [_Functions, _Operators, lambda: torch.device("cpu"), _profile])
@usual_place
def test_whoever_watches_sees_the_op(
    device: str, dtype: torch.dtype, watching: Callable[[], AbstractContextManager[Any]]
) -> None:
    operands = inputs(device, dtype, length_q=20)
    with watching():
        assert ops.direct_forward(*operands, None, 0) is None
    check_direct(*operands)


def test_under_transforms_and_traces() -> None:
    operands = inputs("cpu", torch.float32, batch=1, length_q=20)
    answers: list[Tensor | None] = []

    def call_it(query: Tensor) -> Tensor:
        answers.append(ops.direct_forward(query, *operands[1:], None, 0))
        return query

    torch.func.vmap(call_it)(operands[0].expand(3, *operands[0].shape))
    torch.func.grad(lambda query: call_it(query).sum())(operands[0])
    torch.jit.trace(call_it, operands[0], check_trace=False)
    assert answers and all(answer is None for answer in answers)


def test_tensors_that_are_not_plain() -> None:
    plain = torch.randn(1, 2, 8, 16, dtype=torch.float16)
    negative = torch.randn(1, 2, 8, 16, dtype=torch.complex64).to(torch.complex32).conj().imag
    assert negative.is_neg()
    zeros = torch._efficientzerotensor(1, 2, 8, 16, dtype=torch.float16)
    sparse, meta, whole = plain.to_sparse(), plain.to("meta"), plain.to(torch.int32)
    nested = torch.nested.nested_tensor([torch.randn(2, n, 16, dtype=torch.float16) for n in (3, 5)])
    derived = plain.as_subclass(_Derived)
    for odd in (negative, zeros, sparse, meta, whole, nested, derived, plain[0], None, 3):
        for operands in ((odd, plain, plain), (plain, odd, plain), (plain, plain, odd)):
            assert ops.direct_forward(*operands, None, 0) is None
    check_direct(*(torch.nn.Parameter(plain, requires_grad=False) for _ in range(3)))


def test_what_the_op_refuses_or_settles() -> None:
    query, key, value = (torch.randn(1, 4, 8, 16) for _ in range(3))
    for operands in (
        (query, key[:, :3], value[:, :3]),  # heads that do not divide
        (query, key, value[:, :, :5]),
        (query, key[..., :8], value),
        (query, key.double(), value),
        (query.expand(2, 4, 8, 16), key, value),
        (query[:, :, :0], key, value),
        (query, key[:, :, :0], value[:, :, :0]),
        (torch.randn(1, 4, 8, 300),) * 3,
    ):
        assert ops.direct_forward(*operands, None, 0) is None
    for scale in (-1.0, float("nan"), float("inf")):
        assert ops.direct_forward(query, key, value, scale, 0) is None
    assert ops.direct_forward(query, key, value, None, 7) is None
    for scale, corner in (("1", 0), (1.0, "0"), (1.0, None)):
        with pytest.raises(TypeError):
            ops.direct_forward(query, key, value, scale, corner)
    with pytest.raises(TypeError, match="query, key, value, scale and corner"):
        ops.direct_forward(query, key)
    check_direct(query, key, value)


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        output = ops.direct_forward(*inputs("cpu", torch.float32, length_q=20), None, 0)
    assert output is not None and output.is_inference()


def test_inputs_that_require_gradients() -> None:
    operands = [operand.requires_grad_() for operand in inputs("cpu", torch.float32, length_q=20)]
    with torch.no_grad():
        check_direct(*operands)


@usual_place
def test_threads(device: str, dtype: torch.dtype) -> None:
    cases = [inputs(device, dtype, length_q=20 + i) for i in range(4)]
    expected = [ops.eager_forward(*operands)[0] for operands in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            output = ops.direct_forward(*cases[i], None, 0)
            if output is None or not torch.equal(output, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_nothing_is_kept() -> None:
    query = torch.randn(1, 2, 8, 16)
    bad = torch.randn(1, 2, 8, 300)

    def objects() -> int:
        gc.collect()
        return sum(isinstance(known, Tensor) for known in gc.get_objects())

    before, references = objects(), sys.getrefcount(query)
    for _ in range(100):
        ops.direct_forward(query, query, query, None, 0)
        ops.direct_forward(bad, bad, bad, None, 0)
        ops.direct_forward(query.transpose(2, 3), query, query, None, 0)
    assert objects() <= before and sys.getrefcount(query) == references


@pytest.mark.gpu
def test_streams_and_graphs() -> None:
    operands = inputs("cuda", torch.bfloat16, length_q=700)
    expected = ops.eager_forward(*operands, None, UPPER_LEFT)[0]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output = ops.direct_forward(*operands, None, UPPER_LEFT)
    side.synchronize()
    assert output is not None and torch.equal(output, expected)
    output.record_stream(torch.cuda.current_stream())  # memory of torch's own allocator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.direct_forward(*operands, None, UPPER_LEFT)
    assert captured is not None
    for operand in operands:
        operand.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, ops.eager_forward(*operands, None, UPPER_LEFT)[0])


def drop_in(*operands: Any, **changes: Any) -> Tensor | None:
    """`ops.direct_drop_in` with the defaults of the drop-in but for `changes`."""
    arguments = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False} | changes
    return ops.direct_drop_in(*operands, *arguments.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_plain_call(dtype: torch.dtype) -> None:
    operands = inputs("cuda", dtype, heads=4, heads_k=4, length_q=50, length_k=70, head_dim=64)
    for is_causal in (False, True):
        for scale in (None, 0.3):
            output = drop_in(*operands, is_causal=is_causal, scale=scale)
            expected = ops.eager_forward(*operands, scale, UPPER_LEFT if is_causal else 0)[0]
            assert output is not None and torch.equal(output, expected)
    grouped = inputs("cuda", dtype, heads=4, heads_k=2, length_q=50, head_dim=64)
    assert drop_in(*grouped) is None and drop_in(*grouped, enable_gqa=True) is not None
    wanted = [operand.clone().requires_grad_() for operand in operands]
    for i in range(3):
        mixed = [*operands[:i], wanted[i], *operands[i + 1 :]]
        assert drop_in(*mixed) is None
        with torch.no_grad():
            assert drop_in(*mixed) is not None
    with torch.autocast("cuda", dtype=dtype):
        assert drop_in(*operands) is None
    assert drop_in(*operands, attn_mask=torch.ones(50, 70, device="cuda", dtype=torch.bool)) is None


ODD_ARGUMENTS = [
    {"attn_mask": torch.ones(20, 20, dtype=torch.bool)},
    *({"dropout_p": p} for p in (0.1, 1.0, -0.5, "0", None, float("nan"))),
    *({"is_causal": causal} for causal in (1, 0, None, torch.tensor(True))),
    *({"scale": scale} for scale in (0.0, -1.0, float("inf"), float("nan"), 1e-40, 1e39, 1, "1")),
    *({"enable_gqa": grouped} for grouped in (1, 0, None)),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("odd", ODD_ARGUMENTS, ids=str)
def test_more_must_be_looked_at(device: str, odd: dict[str, Any]) -> None:
    operands = inputs(device, torch.bfloat16, length_q=20)
    assert (drop_in(*operands) is None) == (device == "cpu")
    assert drop_in(*operands, **odd) is None
    with pytest.raises(TypeError, match="query, key, value, attn_mask, dropout_p, is_causal, scale and enable_gqa"):
        ops.direct_drop_in(*operands)


def test_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the exchange functions, or a build without the module: every call takes the op."""
    with ExitStack() as stack:
        stack.enter_context(monkeypatch.context()).delattr(Tensor, "__dlpack_c_exchange_api__")
        declines, declines_too = ops._find_direct()
    operands = inputs("cpu", torch.float32, length_q=20)
    assert declines(*operands, None, 0) is None and declines_too(*operands, None, 0.0, False, None, False) is None
    again = ops._find_direct()[0](*operands, None, 0)
    assert again is not None
