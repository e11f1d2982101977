"""What torch does with our calls: exported, packed by AOTInductor, counted, profiled, copied, in threads."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import check_gradients, check_result, dtype_of, inputs, leaves, normal
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import kittens_torch
from kittens_torch import modified, ops
from kittens_torch.integrations.intervals import Band, Interval, IntervalMask

pytestmark = pytest.mark.usefixtures("only_ours")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """Self-attention with grouped heads and weights of its own; `attend` is any function of query, key and value."""

    def __init__(self, attend: Callable[..., Any], width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.attend, self.heads = attend, heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, width // 2) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.query(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2)
        key, value = (
            part(tokens).unflatten(2, (self.heads // 2, -1)).transpose(1, 2) for part in (self.key, self.value)
        )
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))


ATTENDS: dict[str, Callable[..., Any]] = {
    "drop-in": functools.partial(kittens_torch.scaled_dot_product_attention, is_causal=True, enable_gqa=True),
    "attention": functools.partial(kittens_torch.attention, causal="lower_right", window=(9, None), scale=0.2),
}
every_attend = pytest.mark.parametrize("name", ATTENDS)


def block(name: str, device: str = "cpu") -> tuple[Block, Tensor]:
    torch.manual_seed(3)
    dtype = dtype_of(device)
    return Block(ATTENDS[name]).to(device, dtype), normal(2, 50, 64, device=device, dtype=dtype)


def targets(program: torch.export.ExportedProgram) -> list[Any]:
    return [node.target for node in program.graph.nodes]


# torch.export and AOTInductor


@devices
@every_attend
def test_exported_with_dynamic_batch_and_length(name: str, device: str) -> None:
    module, tokens = block(name, device)
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(module, (tokens,), dynamic_shapes=(sizes,))
    assert targets(program).count(ops.forward) == 1, "our op, and nothing of torch's attention"
    restored = io.BytesIO()
    torch.export.save(program, restored)
    restored.seek(0)
    loaded = torch.export.load(restored).module()
    for batch, length in ((2, 50), (3, 7), (5, 131)):
        other = normal(batch, length, 64, device=device, dtype=tokens.dtype)
        assert torch.equal(loaded(other), module(other))


def test_exported_model_of_torchs_function_follows_the_switch(outcomes: list[Any]) -> None:
    module = Block(functools.partial(F.scaled_dot_product_attention, enable_gqa=True))
    tokens = normal(2, 50, 64)
    exported = torch.export.export(module, (tokens,)).module()
    expected = exported(tokens)
    assert not outcomes
    with kittens_torch.enabled():
        torch.testing.assert_close(exported(tokens), expected)
    assert len(outcomes) == 1


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")
def test_packed_by_aot_inductor(tmp_path: Path) -> None:
    """A package for any length, run here and in a process that has not traced the model."""
    module, tokens = block("drop-in")
    sizes = {1: torch.export.Dim("length", min=2, max=4096)}
    with torch.no_grad():
        program = torch.export.export(module, (tokens,), dynamic_shapes=(sizes,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
        packed = torch._inductor.aoti_load_package(path)
        for length in (50, 7, 131):
            other = normal(2, length, 64)
            torch.testing.assert_close(packed(other), module(other))
        torch.save((other, module(other)), tmp_path / "expected.pt")
    code = f"""
import torch, kittens_torch  # whose library has the op
given, expected = torch.load({str(tmp_path / "expected.pt")!r})
torch.testing.assert_close(torch._inductor.aoti_load_package({path!r})(given), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(kittens_torch.__file__).parents[1])


# Compiled


@devices
@pytest.mark.parametrize("enabled", [False, True])
def test_no_recompilation_per_length(device: str, enabled: bool, outcomes: list[Any]) -> None:
    """torch's default: a graph for the first length, one for all others, forward and backward."""
    counter = CompileCounterWithBackend("aot_eager")
    module, tokens = block("drop-in", device)
    if enabled:
        module.attend = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    if enabled:
        kittens_torch.enable()
    try:
        for length in (50, 51, 64, 7, 130, 257):
            other = normal(2, length, 64, device=device, dtype=tokens.dtype)
            module.zero_grad()
            output = compiled(other)
            output.sum().backward()
            gradient = module.query.weight.grad.clone()
            module.zero_grad()
            expected = module(other)
            expected.sum().backward()
            tolerance = {"atol": 1e-5, "rtol": 1e-4} if device == "cpu" else {"atol": 0.05, "rtol": 0.05}
            torch.testing.assert_close(output, expected, **tolerance)
            size = module.query.weight.grad.abs().max()
            assert (gradient - module.query.weight.grad).abs().max() <= (1e-5 if device == "cpu" else 0.05) * size
    finally:
        kittens_torch.disable()
    assert counter.frame_count == 2 and (len(outcomes) == 12) == enabled


@pytest.mark.gpu
@every_attend
def test_reduce_overhead(name: str) -> None:
    """Inductor with CUDA graphs."""
    module, tokens = block(name, "cuda")
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):  # warm-up, capture, replays
            other = torch.randn_like(tokens)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(compiled(other), module(other), atol=2e-2, rtol=2e-2)


# Counted and profiled


def counted(function: Callable[[], Any]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


SIZES = {"batch": 2, "heads": 6, "heads_k": 2, "length_q": 20, "length_k": 31, "head_dim": 16, "value_dim": 24}
PAIRS = 2 * 2 * 6 * 20 * 31


@devices
def test_operations_of_forward_and_backward(device: str) -> None:
    query, key, value = leaves(*inputs(device, dtype_of(device), **SIZES))
    told = counted(lambda: kittens_torch.attention(query, key, value, causal="lower_right").sum().backward())
    assert told == {"kittens_torch.forward": PAIRS * (16 + 24), "kittens_torch.backward": PAIRS * (3 * 16 + 2 * 24)}


@pytest.mark.parametrize(
    ("needed", "products"), [("query", (2, 1)), ("key", (2, 1)), ("value", (1, 1)), ("query key", (3, 1))]
)
def test_operations_of_some_gradients(needed: str, products: tuple[int, int]) -> None:
    query, key, value = inputs("cpu", torch.float32, **SIZES)
    for name, operand in (("query", query), ("key", key), ("value", value)):
        operand.requires_grad_(name in needed.split())
    told = counted(lambda: kittens_torch.attention(query, key, value).sum().backward())
    assert told["kittens_torch.backward"] == PAIRS * (products[0] * 16 + products[1] * 24)


@pytest.mark.parametrize("checked", [False, True])
def test_operations_are_torchs(checked: bool) -> None:
    """Two products, as torch's own matrix products count, also of the checking flavour and of fake tensors."""
    sizes = {**SIZES, "heads_k": 6}
    query, key, value = inputs("cpu", torch.float32, **sizes)
    with sdpa_kernel(SDPBackend.MATH):
        torchs = counted(lambda: F.scaled_dot_product_attention(query, key, value))

    def ours() -> Tensor:
        if checked:
            with kittens_torch.checked_machine():
                return kittens_torch.scaled_dot_product_attention(query, key, value)
        return kittens_torch.scaled_dot_product_attention(query, key, value)

    assert sum(counted(ours).values()) == sum(torchs.values()) == PAIRS * 40
    on_meta = [operand.to("meta") for operand in (query, key, value)]
    assert sum(counted(lambda: ops.forward(*on_meta, 1.0, 0, -1, -1)).values()) == PAIRS * 40


@pytest.mark.parametrize("first", ["kittens_torch", "torch.utils.flop_counter"])
def test_formulas_are_registered_in_any_order(first: str) -> None:
    code = f"""
import sys, torch, {first}, kittens_torch
assert ("torch.utils.flop_counter" in sys.modules) == ({first!r} != "kittens_torch")
from torch.utils.flop_counter import flop_registry
ours = [op for op in flop_registry if str(op).startswith("kittens_torch")]
assert torch.ops.kittens_torch.forward in ours and torch.ops.kittens_torch.backward in ours
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(kittens_torch.__file__).parents[1])


@devices
def test_names_in_a_profile(device: str) -> None:
    query, key, value = leaves(*inputs(device, dtype_of(device)))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        kittens_torch.attention(query, key, value).sum().backward()
        torch.cuda.synchronize() if device == "cuda" else None
    names = {entry.key for entry in profiled.key_averages()}
    assert {"kittens_torch::forward", "kittens_torch::backward"} <= names
    if device == "cuda":
        kernels = {event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA}
        assert any("kittens" in name for name in kernels), kernels


# Copied


@devices
@every_attend
def test_modules_are_copied_and_pickled(name: str, device: str) -> None:
    module, tokens = block(name, device)
    expected = module(tokens)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(other(tokens), expected)
        other.query.weight.data.zero_()
        assert not torch.equal(other(tokens), expected) and torch.equal(module(tokens), expected)


def test_results_that_are_not_tensors_are_copied_and_pickled() -> None:
    query, key, value = inputs("cpu", torch.float32)
    plan = kittens_torch.explain(query, key, value)
    with kittens_torch.report() as report:
        kittens_torch.attention(query, key, value)
    present = torch.rand(2, 7) > 0.3
    mask = IntervalMask(Interval(Band(3, 0), 2), 2, 5, 7, torch.device("cpu"), present)
    for again in (copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))):
        assert again(plan) == plan
        assert again(report).calls == report.calls and len(report.calls) == 1
        other = again(mask)
        assert isinstance(other, IntervalMask) and other.interval == mask.interval and other.shape == mask.shape
        assert torch.equal(other.dense(), mask.dense())


# Threads and devices


@devices
def test_calls_from_several_threads(device: str) -> None:
    """Each thread has shapes of its own; forward and backward give what they give alone."""
    problems = [
        {"batch": 1 + n % 2, "heads": 2 + 2 * (n % 3), "heads_k": 2, "length_q": 40 + 17 * n, "head_dim": 32 + 8 * n}
        for n in range(8)
    ]
    operands = [leaves(*inputs(device, dtype_of(device), **problem)) for problem in problems]
    settings = [{"causal": [None, "lower_right"][n % 2]} for n in range(8)]

    def run(n: int) -> tuple[Tensor, ...]:
        output, logsumexp = kittens_torch.attention(*operands[n], return_lse=True, **settings[n])
        return output, logsumexp, *torch.autograd.grad(output, operands[n], output.detach())

    alone = [run(n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, list(range(8)) * 4))
    for n, results in enumerate(together):
        assert len(results) == len(alone[n % 8]) == 5
        for mine, expected in zip(results[:2], alone[n % 8], strict=False):
            assert torch.equal(mine, expected)
        if n < 8:
            check_result(results[0], results[1], *operands[n], **settings[n])
            check_gradients(results[2:], *operands[n], results[0].detach(), **settings[n])


def test_first_calls_of_a_process_from_several_threads() -> None:
    """Whatever is set up at a first call is set up once."""
    code = """
import torch, kittens_torch, threading
query = torch.randn(2, 4, 100, 64)
barrier, results = threading.Barrier(8), []

def run():
    barrier.wait()
    results.append(kittens_torch.attention(query, query, query, causal="upper_left"))

threads = [threading.Thread(target=run) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
assert len(results) == 8 and all(torch.equal(result, results[0]) for result in results)
torch.testing.assert_close(results[0], expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(kittens_torch.__file__).parents[1])


def test_masks_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one thread knows of a mask may go while another looks for it."""
    query, key, value = inputs("cpu", torch.float32, length_q=200, length_k=400, head_dim=8)
    masks = [torch.rand(200, 400) > 0.3 for _ in range(3)]
    expected = [kittens_torch.attention(query, key, value, mask=mask) for mask in masks]

    class Interrupted(tuple[Any, ...]):
        """As after another thread had its turn between two steps."""

        def owner(self) -> Any:
            modified._known.clear()
            return self[0]()

        version = property(lambda self: self[1])
        classes = property(lambda self: self[2])

    for name, known in list(modified._known.items()):
        modified._known[name] = Interrupted(known)  # type: ignore[assignment]
    for mask, exact in zip(masks, expected, strict=True):
        assert torch.equal(kittens_torch.attention(query, key, value, mask=mask), exact)

    monkeypatch.setattr(modified, "REMEMBERED", 1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def run(index: int) -> bool:
        mask = index % len(masks)
        return torch.equal(kittens_torch.attention(query, key, value, mask=masks[mask]), expected[mask])

    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, range(200)))
    finally:
        sys.setswitchinterval(before)
