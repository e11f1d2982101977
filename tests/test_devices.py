"""More than one GPU: a call runs on the device of its tensors, whatever device is current, and leaves the others alone.

The devices are of one kind, so the same numbers give the same results on each, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import check_gradients, inputs, leaves
from torch import Tensor

import kittens_torch
from kittens_torch import attention, dispatch
from kittens_torch import scaled_dot_product_attention as drop_in

CURRENT, OTHER = "cuda:0", "cuda:1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("only_ours"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
BATCH, HEADS, HEADS_K, LENGTH_Q, LENGTH_K, HEAD_DIM = 2, 4, 2, 300, 400, 64


def _mask(device: str) -> Tensor:
    """Large enough that what is known of it is remembered."""
    return (torch.rand(1, 1, LENGTH_Q, LENGTH_K) > 0.3).to(device)


def _everything(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    device = str(query.device)
    return attention(
        query,
        key,
        value,
        causal="lower_right",
        window=(350, None),
        mask=_mask(device),
        bias=torch.randn(1, HEADS, 1, LENGTH_K).to(device),
        key_lengths=torch.tensor([LENGTH_K, 123], device=device),
        softcap=20.0,
        alibi_slopes=torch.rand(HEADS).to(device),
        sinks=torch.randn(HEADS).to(device),
        dropout_p=0.2,
    )


def _enabled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with kittens_torch.enabled(), kittens_torch.report() as report:
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert [call.plan.machine for call in report.calls] == ["sm90"]
    return output


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "attention": lambda query, key, value: attention(query, key, value),
    "tiles from a counter": lambda query, key, value: attention(
        *(operand.repeat(20, 1, 1, 1) for operand in (query, key, value)), causal="lower_right"
    ),
    "drop-in": lambda query, key, value: drop_in(query, key, value, is_causal=True, enable_gqa=True),
    "copied inputs": lambda query, key, value: drop_in(
        *(operand[..., 1:] for operand in (query, key, value)), is_causal=True, enable_gqa=True
    ),
    "bool mask": lambda query, key, value: drop_in(query, key, value, _mask(str(query.device)), enable_gqa=True),
    "bias": lambda query, key, value: attention(
        query, key, value, bias=torch.randn(LENGTH_Q, LENGTH_K).to(query.device)
    ),
    "dropout": lambda query, key, value: attention(query, key, value, dropout_p=0.2),
    "everything": _everything,
    "enable": _enabled,
}
calls = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def _device_0_is_current() -> Iterator[None]:
    torch.cuda.set_device(CURRENT)
    yield
    assert torch.cuda.current_device() == 0


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def _allocations(device: str) -> int:
    """How many allocations there ever were."""
    return torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)


def _operands(device: str) -> list[Tensor]:
    """The same numbers on every device, and every generator in the same state."""
    torch.manual_seed(0)
    shapes = [(BATCH, HEADS, LENGTH_Q), (BATCH, HEADS_K, LENGTH_K), (BATCH, HEADS_K, LENGTH_K)]
    return [torch.randn(*shape, HEAD_DIM).to(device, torch.bfloat16).requires_grad_() for shape in shapes]


def _results(name: str, device: str) -> list[Tensor]:
    """Output and gradients of one call."""
    operands = _operands(device)
    output = CALLS[name](*operands)
    results = [output.detach(), *torch.autograd.grad(output.float().square().sum(), operands)]
    assert all(str(tensor.device) == device for tensor in results)
    return results


@calls
def test_row_46_a_device_that_is_not_the_current_one(name: str, deterministic: None) -> None:
    expected = [tensor.cpu() for tensor in _results(name, CURRENT)]
    assert all(tensor.isfinite().all() and tensor.any() for tensor in expected)
    torch.cuda.synchronize(CURRENT)
    before = _allocations(CURRENT)
    results = _results(name, OTHER)
    assert torch.cuda.current_device() == 0
    assert _allocations(CURRENT) == before, "the call allocates on the current device"
    for ours, exact in zip(results, expected, strict=True):
        assert torch.equal(ours.cpu(), exact)


@calls
def test_gradients_that_are_summed_in_any_order(name: str) -> None:
    expected, results = _results(name, CURRENT), _results(name, OTHER)
    for ours, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), exact.cpu(), atol=2e-2, rtol=2e-2)


@calls
def test_row_46_every_kernel_runs_on_the_device_of_the_tensors(name: str) -> None:
    for device in (CURRENT, OTHER):
        _results(name, device)
    operands = _operands(OTHER)
    torch.cuda.synchronize(OTHER)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        CALLS[name](*operands).float().sum().backward()
        torch.cuda.synchronize(OTHER)
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    own = "Activity Buffer Request"  # of the profiler, on no device
    assert {event.device_index for event in events if event.name != own} == {1}


def test_explain_leaves_the_devices_alone() -> None:
    query = _operands(OTHER)[0]
    before = _allocations(CURRENT)
    assert kittens_torch.explain(query, query, query, is_causal=True).machine == "sm90"
    assert _allocations(CURRENT) == before


def test_row_46_operands_on_two_devices_are_refused() -> None:
    query, key, value = _operands(CURRENT)
    for entry, grouped in ((attention, {}), (drop_in, {"enable_gqa": True})):
        for given in ((query, key.to(OTHER), value), (query, key, value.to(OTHER)), (query, key.cpu(), value)):
            with pytest.raises(RuntimeError, match=r"device of \(query, key, value\)"):
                entry(*given, **grouped)
    for device in (OTHER, "cpu"):
        with pytest.raises(RuntimeError, match=f"device of attn_mask is {device}"):
            drop_in(query, key, value, _mask(device), enable_gqa=True)
        for argument, tensor in {
            "mask": _mask(device),
            "bias": torch.zeros(LENGTH_Q, LENGTH_K, device=device),
            "key_lengths": torch.zeros(BATCH, dtype=torch.int32, device=device),
            "alibi_slopes": torch.zeros(HEADS, device=device),
            "sinks": torch.zeros(HEADS, device=device),
        }.items():
            with pytest.raises(RuntimeError, match=f"device of {argument} is {device}"):
                attention(query, key, value, **{argument: tensor})
    torch.cuda.synchronize(CURRENT)
    torch.cuda.synchronize(OTHER)
    assert attention(query, key, value).isfinite().all()


@pytest.mark.parametrize("sets_device", [False, True])
def test_row_46_two_threads_that_take_the_devices_in_turn(sets_device: bool, deterministic: None) -> None:
    masks = {device: _mask(CURRENT).to(device) for device in (CURRENT, OTHER)}

    def run(device: str, operands: list[Tensor]) -> list[Tensor]:
        output = attention(*operands, causal="lower_right") + attention(*operands, mask=masks[device])
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), operands)]

    operands = {device: _operands(device) for device in masks}
    expected = {device: run(device, operands[device]) for device in masks}
    torch.cuda.synchronize(CURRENT)
    torch.cuda.synchronize(OTHER)

    def work(first: int) -> None:
        for turn in range(40):
            device = (CURRENT, OTHER)[(first + turn) % 2]
            if sets_device:
                torch.cuda.set_device(device)
            for ours, exact in zip(run(device, operands[device]), expected[device], strict=True):
                assert torch.equal(ours, exact)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.parametrize("route", ["attention", "enable"])
def test_row_46_a_stream_of_another_device(route: str, outcomes: list[Any]) -> None:
    """Also in autograd's thread."""
    query, key, value = leaves(*inputs(OTHER, torch.bfloat16, length_q=70))
    side = torch.cuda.Stream(OTHER)
    side.wait_stream(torch.cuda.current_stream(OTHER))
    with torch.cuda.stream(side):
        torch.cuda.set_device(0)
        if route == "attention":
            output = attention(query, key, value)
        else:
            with kittens_torch.enabled():
                output = F.scaled_dot_product_attention(query, key, value)
        assert isinstance(output, Tensor)
        gradients = torch.autograd.grad(output, (query, key, value), output.detach())
    torch.cuda.synchronize(OTHER)
    assert torch.cuda.current_device() == 0 and {tensor.device.index for tensor in (output, *gradients)} == {1}
    check_gradients(gradients, query, key, value, output.detach())
    assert len(outcomes) == (route == "enable")


def test_a_graph_of_another_device_looks_at_its_masks_when_it_runs() -> None:
    """What is known of a mask is not kept from before the capture, also where the capturing device is not current."""
    operands = [tensor.detach() for tensor in _operands(OTHER)]
    mask = _mask(OTHER)
    stream = torch.cuda.Stream(OTHER)

    def run() -> Tensor:
        with torch.cuda.device(CURRENT):
            return attention(*operands, mask=mask)

    stream.wait_stream(torch.cuda.current_stream(OTHER))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize(OTHER)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    for seen in (slice(0, 70), slice(200, 300)):
        mask.zero_()
        mask[..., seen] = True
        torch.cuda.synchronize(OTHER)
        graph.replay()
        torch.cuda.synchronize(OTHER)
        assert torch.equal(captured, attention(*operands, mask=mask.clone()))


FIRST_CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "attention": lambda *operands: attention(*operands),
    "modified": lambda *operands: attention(
        *operands, mask=torch.ones(16, 16, dtype=torch.bool, device=operands[0].device), softcap=50.0
    ),
    "enable": lambda *operands: F.scaled_dot_product_attention(*operands),
}


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_row_46_the_first_call_of_a_process_is_on_another_device(name: str) -> None:
    """Dao-AILab/flash-attention#54: ones give ones, and device 0 has no memory of ours and no context."""
    path = os.pathsep.join([str(Path(kittens_torch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0 and result.stdout.strip() == "1 0 1", result.stderr


def _first_call(function: Callable[[Tensor, Tensor, Tensor], Any], device: str) -> None:
    """What an earlier call has left is gone when it is counted what the other device has."""
    other = CURRENT if device == OTHER else OTHER
    operands = [torch.ones(4, 32, 16, 64, device=device, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    before = torch.cuda.memory_allocated(other), _allocations(other), torch._C._cuda_hasPrimaryContext(0)
    output = function(*operands)
    grads = torch.autograd.grad(output.sum(), operands)
    torch.cuda.synchronize(device)
    for tensor, exact in zip((output, *grads), (1.0, 0.0, 0.0, 1.0), strict=True):
        assert str(tensor.device) == device
        assert torch.equal(tensor, torch.full_like(tensor, exact))
    assert torch.cuda.current_device() == 0
    after = torch.cuda.memory_allocated(other), _allocations(other), torch._C._cuda_hasPrimaryContext(0)
    assert after == before, f"{device}: {before} became {after}"


def _first_calls(name: str) -> None:
    """In a process of its own. Of equal keys each weight is 1 / 16, and a logit has no gradient."""
    kittens_torch.set_fallback("error")
    if name == "enable":
        kittens_torch.enable()
    done = []
    for device in (OTHER, CURRENT, OTHER):
        _first_call(FIRST_CALLS[name], device)
        done.append(device[-1])
    assert dispatch.every_gpu_runs()
    print(*done)


if __name__ == "__main__":
    _first_calls(sys.argv[1])
