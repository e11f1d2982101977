"""torch's own attention on our kernels: what is routed, that it is right, and that everything comes back."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import check_forward, check_gradients, dtype_of, inputs, leaves, normal, places
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.bias import causal_lower_right

import kittens_torch
from kittens_torch import ops
from kittens_torch.enable import Outcome

# `kittens_torch.enable` is the function.
enable = importlib.import_module("kittens_torch.enable")
pytestmark = pytest.mark.usefixtures("torchs_attention_as_before")

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
every_dtype = places(torch.float32, torch.bfloat16, torch.float16, torch.float64)
# The backends of torch that are overridden, by the device.
FUSED = {"cpu": [SDPBackend.FLASH_ATTENTION], "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]}
routes = pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for device, backends in FUSED.items()
        for backend in backends
    ],
)


def tolerance(device: str) -> dict[str, float]:
    return {"atol": 2e-5, "rtol": 1e-4} if device == "cpu" else {"atol": 3e-2, "rtol": 3e-2}


# The switch


def test_nested_and_repeated_use(outcomes: list[Outcome]) -> None:
    query, key, value = inputs("cpu", torch.float32)

    def is_ours() -> bool:
        outcomes.clear()
        F.scaled_dot_product_attention(query, key, value)
        assert enable.is_enabled() == bool(outcomes)
        return bool(outcomes)

    assert not is_ours()
    kittens_torch.disable()
    kittens_torch.enable()
    kittens_torch.enable()
    assert is_ours()
    with kittens_torch.enabled():
        assert is_ours()
    assert is_ours()
    kittens_torch.disable()
    assert not is_ours()
    with kittens_torch.enabled(), kittens_torch.enabled():
        assert is_ours()
        with kittens_torch.enabled():
            kittens_torch.disable()
            assert not is_ours()
        assert is_ours()
    assert not is_ours()
    with contextlib.suppress(KeyError), kittens_torch.enabled():
        raise KeyError
    assert not is_ours()


def test_registry_of_torch(outcomes: list[Outcome]) -> None:
    """The name in torch's registry does the same, and torch's way back as well."""
    query, key, value = inputs("cpu", torch.float32)
    activate_flash_attention_impl("kittens")
    assert enable.is_enabled() and current_flash_attention_impl() == "kittens"
    F.scaled_dot_product_attention(query, key, value)
    assert len(outcomes) == 1
    restore_flash_attention_impl()
    F.scaled_dot_product_attention(query, key, value)
    assert len(outcomes) == 1 and not enable.is_enabled()


class Other:
    """Another implementation of torch's registry."""

    log: list[str]

    def __init__(self) -> None:
        self.log.append("on")

    def remove(self) -> None:
        self.log.append("off")


def test_another_implementation_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Other.log = []
    register_flash_attention_impl("other", register_fn=Other)
    activate_flash_attention_impl("other")
    with kittens_torch.enabled():
        assert current_flash_attention_impl() == "kittens" and Other.log == ["on", "off"]
    assert current_flash_attention_impl() == "other" and Other.log == ["on", "off", "on"]
    kittens_torch.enable()
    activate_flash_attention_impl("other")  # takes over from us: there is nothing of ours to disable
    kittens_torch.disable()
    assert current_flash_attention_impl() == "other"
    restore_flash_attention_impl()
    kittens_torch.enable()  # and does not come back later
    kittens_torch.disable()
    assert current_flash_attention_impl() is None


@routes
def test_disable_restores_bit_for_bit(device: str, backend: SDPBackend) -> None:
    operators = [operator for operator, key, _ in enable.OVERRIDES if key == device.upper()]

    def results() -> list[Tensor]:
        torch.manual_seed(7)
        query, key, value = leaves(*inputs(device, dtype_of(device), length_q=200))
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
        return [output.detach(), *(gradients if device == "cpu" else ())]  # torch's on the GPU vary from run to run

    def registered() -> list[str]:
        return [torch._C._dispatch_dump(f"aten::{operator}") for operator in operators]

    before, tables = results(), registered()
    with kittens_torch.enabled():
        assert registered() != tables
    assert registered() == tables
    assert all(torch.equal(now, then) for now, then in zip(results(), before, strict=True))


def test_quiet_and_from_a_fresh_process() -> None:
    """torch's message about overridden kernels is not shown: overriding them is what was asked for."""
    program = """
import warnings; warnings.simplefilter("error")
import torch, kittens_torch
query = torch.randn(1, 2, 300, 64)
with kittens_torch.enabled():
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_thread(outcomes: list[Outcome]) -> None:
    query, key, value = inputs("cpu", torch.float32)
    with kittens_torch.enabled():
        threads = [threading.Thread(target=F.scaled_dot_product_attention, args=(query, key, value)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outcomes) == 4


@pytest.mark.parametrize("first_ends", [0, 1])
def test_contexts_that_overlap(first_ends: int) -> None:
    """As in two threads: it is on while one of them is open, and off afterwards."""
    contexts = [kittens_torch.enabled() for _ in range(2)]
    for context in contexts:
        context.__enter__()
    contexts[first_ends].__exit__(None, None, None)
    assert enable.is_enabled()
    contexts[1 - first_ends].__exit__(None, None, None)
    assert not enable.is_enabled()


SWITCHING = """
import threading, time, torch, kittens_torch
import torch.nn.functional as F
query, key, value = torch.randn(3, 1, 2, 40, 16)
expected = F.scaled_dot_product_attention(query, key, value)
end = time.monotonic() + 3
wrong = []

def switch():
    while time.monotonic() < end:
        with kittens_torch.enabled():
            pass
        kittens_torch.enable()
        kittens_torch.disable()

def call():
    while time.monotonic() < end:
        try:
            assert torch.allclose(F.scaled_dot_product_attention(query, key, value), expected, atol=1e-5)
        except Exception as error:
            wrong.append(error)

threads = [threading.Thread(target=target) for target in (switch, switch, call, call)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not wrong, (len(wrong), wrong[0])
"""


def test_switching_while_other_threads_call() -> None:
    """In a process of its own: without care it ends with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", SWITCHING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# Numbers


@every_dtype
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, -0.3, 0.0])
def test_outputs(
    device: str, dtype: torch.dtype, is_causal: bool, scale: float | None, outcomes: list[Outcome]
) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=3, length_q=130, head_dim=40)
    causal = "upper_left" if is_causal else None
    expected, _ = check_forward(query, key, value, causal=causal, scale=scale)
    for backend in FUSED[device]:
        outcomes.clear()
        with kittens_torch.enabled(), sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
        assert torch.equal(output, expected), "it must be our kernel's"
        assert output.dtype == dtype and [outcome.reason for outcome in outcomes] == [""]


@every_dtype
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(
    device: str, dtype: torch.dtype, is_causal: bool, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU our backward of our forward's outputs, on the CPU torch's."""
    causal = "upper_left" if is_causal else None
    runs = []
    module = importlib.import_module("kittens_torch.enable_backward")
    run_backward = module.run_backward
    monkeypatch.setattr(module, "run_backward", lambda *arguments: runs.append(1) or run_backward(*arguments))
    for backend in FUSED[device]:
        query, key, value = leaves(*inputs(device, dtype, batch=2, heads=3, length_q=130, head_dim=64))
        with kittens_torch.enabled(), sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            grad_output = normal(*output.shape, device=device, dtype=dtype)
            gradients = torch.autograd.grad(output, (query, key, value), grad_output)
        check_gradients(gradients, query, key, value, grad_output, causal=causal)
    assert [outcome.reason for outcome in outcomes] == [""] * len(FUSED[device])
    assert len(runs) == (len(FUSED[device]) if device == "cuda" else 0)


@routes
def test_enable_between_forward_and_backward(device: str, backend: SDPBackend) -> None:
    query, key, value = leaves(*inputs(device, dtype_of(device), length_q=70))
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value)
    with kittens_torch.enabled():
        gradients = torch.autograd.grad(output, (query, key, value), output.detach())
    check_gradients(gradients, query, key, value, output.detach())


@routes
def test_disable_between_forward_and_backward(device: str, backend: SDPBackend, outcomes: list[Outcome]) -> None:
    query, key, value = leaves(*inputs(device, dtype_of(device), length_q=70))
    with kittens_torch.enabled(), sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value)
    gradients = torch.autograd.grad(output, (query, key, value), output.detach())
    check_gradients(gradients, query, key, value, output.detach())
    assert len(outcomes) == 1


@routes
def test_grouped_heads(device: str, backend: SDPBackend, outcomes: list[Outcome]) -> None:
    query, key, value = leaves(*inputs(device, dtype_of(device), heads=6, heads_k=2, length_q=70))
    with kittens_torch.enabled(), sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        gradients = torch.autograd.grad(output, (query, key, value), output.detach())
    check_gradients(gradients, query, key, value, output.detach())
    assert [outcome.operands.key.shape[1] for outcome in outcomes] == [2], "the heads reach us unexpanded"


@pytest.mark.gpu
def test_lower_right_corner_of_torch(outcomes: list[Outcome]) -> None:
    query, key, value = leaves(*inputs("cuda", torch.bfloat16, length_q=70, length_k=200))
    with kittens_torch.enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value, causal_lower_right(70, 200))
        gradients = torch.autograd.grad(output, (query, key, value), output.detach())
    check_gradients(gradients, query, key, value, output.detach(), causal="lower_right")
    assert [outcome.reason for outcome in outcomes] == [""]


LAYOUTS = {
    "contiguous": lambda: normal(2, 3, 5, 8),
    "length before heads": lambda: normal(2, 5, 3, 8).transpose(1, 2),
    "slice of packed qkv": lambda: normal(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2),
    "length outside": lambda: normal(5, 2, 3, 8).permute(1, 2, 0, 3),
    "batch 1, moved": lambda: normal(1, 5, 3, 8).transpose(1, 2),
    "expanded heads": lambda: normal(2, 1, 5, 8).expand(2, 3, 5, 8),
    "expanded batch": lambda: normal(1, 5, 3, 8).transpose(1, 2).expand(2, 3, 5, 8),
    "padded rows": lambda: normal(2, 3, 5, 16)[..., :8],
}


@routes
@pytest.mark.parametrize("name", LAYOUTS)
def test_metadata_is_torchs(device: str, backend: SDPBackend, name: str, outcomes: list[Outcome]) -> None:
    """Sizes, strides, dtypes of every output that a compiled graph relies on, against those of torch's kernel."""
    query = LAYOUTS[name]().to(device, dtype_of(device))
    operators = {
        ("cpu", SDPBackend.FLASH_ATTENTION): (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, ()),
        ("cuda", SDPBackend.FLASH_ATTENTION): (torch.ops.aten._scaled_dot_product_flash_attention, ()),
        ("cuda", SDPBackend.CUDNN_ATTENTION): (torch.ops.aten._scaled_dot_product_cudnn_attention, (None, True)),
    }
    operator, more = operators[device, backend]

    def described(entry: Any) -> Any:
        if not isinstance(entry, Tensor):
            return entry
        return entry.shape, [s for s, n in zip(entry.stride(), entry.shape, strict=True) if n != 1], entry.dtype

    torchs = [described(entry) for entry in operator(query, query, query, *more)]
    with kittens_torch.enabled():
        ours = [described(entry) for entry in operator(query, query, query, *more)]
    assert len(outcomes) == 1 and ours[:6] == torchs[:6] and len(ours) == len(torchs)


# What else torch does with its attention


@devices
@pytest.mark.parametrize("training", [False, True])
def test_modules_of_torch(device: str, training: bool, outcomes: list[Outcome]) -> None:
    dtype = dtype_of(device)
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, device=device, dtype=dtype)
    heads = nn.MultiheadAttention(64, 4, batch_first=True, device=device, dtype=dtype)
    layer.train(training)
    heads.train(training)
    tokens = normal(2, 33, 64, device=device, dtype=dtype).requires_grad_(training)

    def run() -> list[Tensor]:
        with torch.set_grad_enabled(training):
            results = [layer(tokens), heads(tokens, tokens, tokens, need_weights=False)[0]]
            if training:
                results.extend(torch.autograd.grad(sum(r.square().sum() for r in results), [tokens]))
        return [result.detach() for result in results]

    expected = run()
    with kittens_torch.enabled():
        for mine, torchs in zip(run(), expected, strict=True):
            torch.testing.assert_close(mine, torchs, **tolerance(device))
    # In inference torch's layers have a fast path of their own, on the CPU without the attention function.
    assert len(outcomes) == 2 if training else device != "cpu" or not outcomes


@devices
def test_contexts_of_torch_keep_their_meaning(device: str, outcomes: list[Outcome]) -> None:
    query, key, value = inputs(device, dtype_of(device))
    with kittens_torch.enabled():
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(query, key, value)
        assert not outcomes
        with sdpa_kernel([SDPBackend.MATH, *FUSED[device]]):
            F.scaled_dot_product_attention(query, key, value)
        F.scaled_dot_product_attention(query, key, value)
        assert len(outcomes) == 2

    def told() -> list[str]:
        """What torch says of operands that a fused kernel may not take."""
        with (
            sdpa_kernel(FUSED[device]),
            warnings.catch_warnings(record=True) as caught,
            contextlib.suppress(RuntimeError),
        ):
            warnings.simplefilter("always")
            F.scaled_dot_product_attention(query, key, normal(1, 2, 64, 49).to(value))
        return [str(entry.message).partition(" (Triggered")[0] for entry in caught]

    expected = told()
    with kittens_torch.enabled():
        assert told() == expected and expected


@devices
def test_autocast(device: str, outcomes: list[Outcome]) -> None:
    query, key, value = inputs(device, torch.float32)
    with kittens_torch.enabled(), torch.autocast(device, dtype=torch.bfloat16):
        output = F.scaled_dot_product_attention(query, key, value)
    assert output.dtype == torch.bfloat16 and outcomes[0].operands.query.dtype == torch.bfloat16


@devices
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs(device: str, dynamic: bool, outcomes: list[Outcome]) -> None:
    """Compiled before or after, a graph follows the switch, with gradients and without a recompilation."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=counter)
    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query * 2, key, value, is_causal=True).transpose(1, 2).flatten(2)

    operands = leaves(*inputs(device, dtype_of(device), length_q=70))

    def run() -> list[Tensor]:
        output = model(*operands)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), operands)]

    expected = run()
    with kittens_torch.enabled():
        mine = run()
    assert len(outcomes) == 1 and counter.frame_count == 1
    for ours, torchs in zip(mine, expected, strict=True):
        torch.testing.assert_close(ours, torchs, **tolerance(device))
    assert torch.equal(run()[0], expected[0]) and len(outcomes) == 1


@pytest.mark.slow
@devices
def test_inductor(device: str, outcomes: list[Outcome]) -> None:
    """Its graphs assert the strides of every output they go on with."""
    torch._dynamo.reset()

    @torch.compile(fullgraph=True)
    def model(packed: Tensor) -> Tensor:
        query, key, value = packed.unflatten(2, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)

    packed = normal(2, 70, 3 * 2 * 32, device=device, dtype=dtype_of(device)).requires_grad_()
    results = []
    for on in (False, True):
        if on:
            kittens_torch.enable()
        output = model(packed)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), packed)])
    assert len(outcomes) == 1
    for mine, torchs in zip(*results, strict=True):
        torch.testing.assert_close(mine, torchs, **tolerance(device))


@devices
def test_vmap_and_checkpoint(device: str, outcomes: list[Outcome]) -> None:
    query, key, value = inputs(device, dtype_of(device), batch=6, length_q=40)
    expected = kittens_torch.attention(query, key, value)
    with kittens_torch.enabled():
        split = [operand.unflatten(0, (3, 2)) for operand in (query, key, value)]
        output = torch.func.vmap(F.scaled_dot_product_attention)(*split)
        assert torch.equal(output.flatten(0, 1), expected) and outcomes
        outcomes.clear()
        operands = leaves(query, key, value)
        result = torch.utils.checkpoint.checkpoint(F.scaled_dot_product_attention, *operands, use_reentrant=False)
        gradients = torch.autograd.grad(result, operands, result.detach())
    assert len(outcomes) == 2, "the forward pass runs again"
    check_gradients(gradients, query, key, value, result.detach())


@pytest.mark.gpu
def test_cuda_graph(outcomes: list[Outcome]) -> None:
    query, key, value = inputs("cuda", torch.bfloat16, length_q=200)
    with kittens_torch.enabled():
        expected = F.scaled_dot_product_attention(query, key, value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = F.scaled_dot_product_attention(query, key, value)
        query.copy_(normal(*query.shape))
        graph.replay()
    assert not torch.equal(output, expected)
    assert torch.equal(output, kittens_torch.attention(query, key, value))


def test_checked_machine(outcomes: list[Outcome]) -> None:
    query, key, value = inputs("cpu", torch.bfloat16, length_q=70)
    with kittens_torch.enabled(), kittens_torch.checked_machine(seed=3):
        output = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(output, kittens_torch.attention(query, key, value))
    assert ops.checking() is False and len(outcomes) == 1
