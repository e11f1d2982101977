"""As test_known_failures: the rows on time and memory, each against another call of the same minute on a quiet GPU."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import normal
from torch import Tensor

import kittens_torch
from kittens_torch import FallbackWarning, attention
from kittens_torch import scaled_dot_product_attention as drop_in

MIB = 2**20
ROUNDS, CALLS = 15, 10
gpu_and_cpu = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _times(*functions: Callable[[], Any]) -> list[float]:
    """Microseconds a call: the median of rounds in which the functions take turns."""
    samples: list[list[float]] = [[] for _ in functions]
    for turn in range(ROUNDS + 3):
        for function, found in zip(functions, samples, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(5_000_000)  # so that the launches are ahead of the GPU
            begin.record()
            for _ in range(CALLS):
                function()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                found.append(begin.elapsed_time(end) * 1000 / CALLS)
    return [statistics.median(found) for found in samples]


def _extra_memory(function: Callable[[], Any]) -> int:
    """Bytes at the peak of a call above those before it, without what it returns."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = function()
    peak = torch.cuda.max_memory_allocated()
    tensors = results if isinstance(results, (tuple, list)) else [results]
    return peak - before - sum(tensor.nbytes for tensor in tensors)


def _kernels(function: Callable[[], Any]) -> list[str]:
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if name != "Activity Buffer Request"]  # the profiler's own


def _operands(length: int, packed: bool) -> list[Tensor]:
    """query, key and value of (4, 16, length, 128), contiguous or as views of one (B, L, 3, H, D)."""
    wide = normal(4, length, 3, 16, 128, device="cuda", dtype=torch.bfloat16)
    views = [wide[:, :, part].transpose(1, 2) for part in range(3)]
    return [(view if packed else view.contiguous()).detach().requires_grad_() for view in views]


def _forward(operands: list[Tensor], causal: str | None) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return attention(*operands, causal=causal)

    return run


def _both(operands: list[Tensor], causal: str | None) -> Callable[[], Any]:
    grad_output = torch.randn_like(operands[0])

    def run() -> Any:
        output = attention(*operands, causal=causal)
        return (output.detach(), *torch.autograd.grad(output, operands, grad_output))

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [None, "upper_left"])
@pytest.mark.parametrize("make", [_forward, _both])
def test_row_56_views_and_odd_lengths_cost_nothing(make: Callable[..., Callable[[], Any]], causal: str | None) -> None:
    """HazyResearch/ThunderKittens#41"""
    calls = {
        (length, packed): make(_operands(length, packed), causal)
        for length in (2048, 2000, 2049)
        for packed in (False, True)
    }
    times = dict(zip(calls, _times(*calls.values()), strict=True))
    whole = times[2048, False]
    for (length, packed), time in times.items():
        told = f"{time:.1f} us for length {length}{' in views' * packed}"
        assert not packed or time <= 1.10 * times[length, False], f"{told}, contiguous {times[length, False]:.1f}"
        assert packed or time <= (1.15 if length == 2049 else 1.10) * whole, f"{told}, of 2048 {whole:.1f}"
    for (length, packed), call in calls.items():
        rows = 4 * 16 * (length + 128)  # of all heads, in whole steps
        allowed = rows * 4 + 2 * MIB  # the logsumexp, which is not returned
        if make is _both:
            allowed += rows * (128 + 2) * 4  # dQ in float32, and two numbers a row
        assert _extra_memory(call) <= allowed, f"length {length}, packed {packed}"
        kernels = _kernels(call)
        others = [name for name in kernels if "kittens" not in name and not name.startswith("Memset")]
        assert kernels and not others, f"length {length}, packed {packed}"


SILENT: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype, dict[str, Any], str]] = {
    # query, key, value, dtype, keywords, and what the reason names where a GPU has no kernel
    "head dim 512": ((1, 16, 512), (1, 8, 512), (1, 8, 512), torch.bfloat16, {"is_causal": True}, "(512, 512)"),
    "head dims 192 and 128": ((1, 16, 192), (1, 8, 192), (1, 8, 128), torch.bfloat16, {"is_causal": True}, ""),
    "without a batch": ((16, 128), (8, 128), (8, 128), torch.bfloat16, {"is_causal": True}, ""),
    "bool mask": ((1, 16, 128), (1, 8, 128), (1, 8, 128), torch.bfloat16, {"attn_mask": True}, ""),
    "float32": ((1, 16, 128), (1, 8, 128), (1, 8, 128), torch.float32, {"is_causal": True}, "torch.float32"),
}  # fmt: skip


@gpu_and_cpu
@pytest.mark.parametrize("name", SILENT)
def test_row_57_no_silent_fall(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/transformers#46960: fused, or one warning for each reason, and `explain` says which."""
    *sizes, dtype, keywords, named = SILENT[name]
    length = 4096 if device == "cuda" else 100
    if device == "cpu":
        monkeypatch.setattr(kittens_torch.dispatch, "cpu_prefers_torch", lambda *operands: False)
        named = "" if name == "float32" else named
    if name == "head dim 512" and device == "cuda":
        length = 1024  # torch forms all scores
    query, key, value = (normal(*size[:-1], length, size[-1], device=device, dtype=dtype) for size in sizes)
    if "attn_mask" in keywords:
        keywords = {"attn_mask": torch.rand(length, length, device=device) > 0.5}
    arguments = {"enable_gqa": True, **keywords}
    plan = kittens_torch.explain(query, key, value, **arguments)
    before = kittens_torch.set_fallback("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                drop_in(query, key, value, **arguments)
    finally:
        kittens_torch.set_fallback(before)
    told = [str(entry.message) for entry in caught if entry.category is FallbackWarning]
    if named:
        assert plan.machine == "torch" and named in plan.reason
        assert len(told) == 1 and named in told[0]
        return
    assert plan.machine == ("cpu" if device == "cpu" else "sm90") and not told
    if device == "cuda":  # scores of all heads would be 512 MiB in bfloat16
        assert _extra_memory(lambda: drop_in(query, key, value, **arguments)) < 200 * MIB


@pytest.mark.gpu
def test_row_57_window_and_mask_are_fused() -> None:
    query, key, value = (normal(1, heads, 4096, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 8, 8))
    mask = torch.rand(4096, 4096, device="cuda") > 0.5
    extra = _extra_memory(lambda: attention(query, key, value, causal="lower_right", window=(1000, None), mask=mask))
    assert extra < 200 * MIB


def _with_backward(keywords: dict[str, Any], *operands: Tensor) -> Callable[[], Any]:
    grad_output = torch.randn_like(operands[0])

    def run() -> Any:
        output = attention(*operands, **keywords)
        return (output.detach(), *torch.autograd.grad(output, operands, grad_output))

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_row_59_masks_are_read_where_they_are(backward: bool) -> None:
    """ByteDance-Seed/Depth-Anything-3#268: neither repeated for each head nor converted."""
    cases = {
        "padding": (normal(1, 12, 8192, 64), torch.rand(1, 1, 1, 8192) > 0.5),
        "dense": (normal(1, 12, 4096, 64), torch.rand(1, 1, 4096, 4096) > 0.5),
    }
    for name, (tensor, mask) in cases.items():
        operands = [tensor.to("cuda", torch.bfloat16).requires_grad_() for _ in range(3)]
        keywords = {"mask": mask.to("cuda")}
        rows = 12 * (tensor.shape[2] + 128)
        allowed = rows * 4 + 2 * MIB
        if backward:
            allowed += rows * (64 + 2) * 4
            call = _with_backward(keywords, *operands)
        else:
            call = _with_no_gradient(keywords, *operands)
        extra = _extra_memory(call)
        assert extra <= allowed < 32 * MIB, f"{name}: {extra / MIB:.1f} MiB"


def _with_no_gradient(keywords: dict[str, Any], *operands: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return attention(*operands, **keywords)

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
def test_row_59_a_window_costs_its_share(backward: bool) -> None:
    operands = [normal(1, 16, 16384, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    make = _with_backward if backward else _with_no_gradient
    window, full = (make(keywords, *operands) for keywords in ({"window": (255, 0)}, {}))
    of_window, of_full = _times(window, full)
    assert of_window <= 0.15 * of_full, f"{of_window:.0f} us, full attention {of_full:.0f}"
    assert _extra_memory(window) < 16384 * 16384 // 2  # not even half of one mask


@pytest.mark.gpu
@pytest.mark.parametrize("heads_k", [8, 32])
@pytest.mark.parametrize("length", [512, 8192])
def test_row_58_decoding_time_does_not_jump_with_the_batch(heads_k: int, length: int) -> None:
    """Dao-AILab/flash-attention#1095: one query row a head, keys of one length. One batch more is hardly faster, and
    slower by no more than its keys and values are more to read, but where its heads no longer fit on the processors.
    A third is left for ranges of keys that fill the processors less evenly."""
    heads = 40 if heads_k == 8 else 32
    batches = [*range(1, 18), 31, 32, 33, 63, 64]
    shape = (batches[-1], length, heads_k, 128)
    cache = [torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)]
    query = normal(batches[-1], heads, 1, 128, device="cuda", dtype=torch.bfloat16)

    def decoding(batch: int) -> Callable[[], Any]:
        key, value = (part[:batch].transpose(1, 2) for part in cache)
        return _with_no_gradient({}, query[:batch], key, value)

    times = dict(zip(batches, _times(*map(decoding, batches)), strict=True))
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for batch in batches:
        if batch + 1 not in times:
            continue
        told = f"batch {batch}: {times[batch]:.1f} us, one more: {times[batch + 1]:.1f}"
        assert times[batch] <= 1.25 * times[batch + 1], told
        waves = [-(-number * heads // processors) for number in (batch, batch + 1)]
        assert waves[1] > waves[0] or times[batch + 1] <= 1.33 * times[batch] * (batch + 1) / batch, told
