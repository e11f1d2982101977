"""Host time of an eager call: what Python, the dispatcher and the launch cost before the GPU begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .peers import Unavailable, first_line, require
from .timing import HostSampler, Timing, interleave

# So small that the GPU is done with a call before the next one arrives; a full launch queue would be waited for.
SIZE = (1, 2, 64, 64)
CALLS = 100


@dataclass(frozen=True)
class HostTime:
    """Seconds of host time per call, and what the call is compared with: the names of other calls."""

    name: str
    timing: Timing
    compared_with: tuple[str, ...]


def host_calls(device: torch.device) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Every call by name, and the reason for those that cannot be made here."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (torch.randn(SIZE, device=device, dtype=dtype) for _ in range(3))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    gradient = torch.randn(SIZE, device=device, dtype=dtype)

    def with_grad(function: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        return lambda: function(*leaves)

    def with_backward(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*leaves), leaves, gradient)

    calls: dict[str, Callable[[], object]] = {
        "torch.add": lambda: torch.add(query, key),
        "torch.empty_like": lambda: torch.empty_like(query),
        "F.sdpa": lambda: F.scaled_dot_product_attention(query, key, value),
        "F.sdpa with grad": with_grad(F.scaled_dot_product_attention),
        "F.sdpa forward and backward": with_backward(F.scaled_dot_product_attention),
        # What autograd itself takes for one operation on three tensors.
        "torch.addcmul forward and backward": with_backward(torch.addcmul),
    }
    missing: dict[str, str] = {}
    try:
        ours = require("kittens_torch")
    except Unavailable as error:
        missing["kittens"] = str(error)
        return calls, missing
    scale = SIZE[-1] ** -0.5
    calls |= {
        "kittens op": lambda: torch.ops.kittens_torch.forward(query, key, value, scale, 0, -1, -1),
        "kittens sdpa": lambda: ours.scaled_dot_product_attention(query, key, value),
        "kittens attention": lambda: ours.attention(query, key, value),
        "kittens sdpa with grad": with_grad(ours.scaled_dot_product_attention),
        "kittens sdpa forward and backward": with_backward(ours.scaled_dot_product_attention),
    }
    return calls, missing


def compared_with(name: str) -> tuple[str, ...]:
    """The calls a call of ours is set against: its like in torch, and torch.add for those without gradients."""
    if not name.startswith("kittens"):
        return ()
    if name.endswith(("with grad", "forward and backward")):
        return (name.replace("kittens sdpa", "F.sdpa"),)
    return ("torch.add", "F.sdpa")


def measure_host(
    device: torch.device, seconds: float, repeats: int | None, progress: Callable[[str], None]
) -> tuple[list[HostTime], dict[str, str]]:
    """Host time of every call, sampled in turns, and the reason for each call that fails."""
    calls, missing = host_calls(device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    samplers = {}
    for name, call in calls.items():
        progress(name)
        try:
            for _ in range(3):
                call()
            wait()
        except Exception as error:  # one call that fails leaves the others measurable
            missing[name] = f"{type(error).__name__}: {first_line(error)}"
            continue
        samplers[name] = HostSampler(call, wait)
    timings = interleave(samplers, seconds=seconds, repeats=repeats, maximum_calls=CALLS)
    times = [
        HostTime(name, timing, tuple(other for other in compared_with(name) if other in timings))
        for name, timing in timings.items()
    ]
    return times, missing
