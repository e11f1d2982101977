"""Which machine a call runs on, and what happens when none of ours can take it."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops

try:
    from . import _plan
except ImportError:
    _plan = None  # type: ignore[assignment]

MODES = ("warn", "error", "silent")
KERNEL_DTYPES = {
    "cuda": (torch.float16, torch.bfloat16),
    "cpu": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    # Shapes and strides only.
    "meta": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def _constant_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, without the import of torch._dynamo, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class FallbackWarning(UserWarning):
    """A valid call has no kernel of ours and went to torch."""


class FallbackError(RuntimeError):
    """A valid call has no kernel of ours and `set_fallback("error")` is in force."""


_mode = "warn"
_warned: set[str] = set()


def set_fallback(mode: str) -> str:
    """What happens to a valid call that no kernel of ours covers: it goes to torch, after a warning once per reason
    ("warn", the default) or quietly ("silent"), or FallbackError is raised ("error").

    Returns the mode that was in force. Every reason warns anew after a call of this function. ValueError for any other
    mode.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed: {', '.join(repr(allowed) for allowed in MODES)}")
    before, _mode = _mode, mode
    _warned.clear()
    return before


@_constant_while_tracing
def fell_back(reason: str) -> bool:
    """Records that a call goes to torch because of `reason`. Under torch.compile this happens once, while tracing."""
    if _mode == "error":
        raise FallbackError(f"no kernel takes this call ({reason}), and set_fallback('error') is in force")
    if _mode == "warn" and reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"this call goes to torch: {reason}", FallbackWarning, stacklevel=4)
    return True


@functools.cache
def _gpu_missing(index: int) -> str:
    if not torch._C._dispatch_has_kernel_for_dispatch_key("kittens_torch::forward", "CUDA"):
        return "this build of kittens_torch has no CUDA kernels"
    if index >= torch.cuda.device_count():
        return ""  # A fake tensor, traced for a machine that has the GPU.
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return f"the CUDA kernels need compute capability 9.0, cuda:{index} has {capability[0]}.{capability[1]}"
    return ""


@_constant_while_tracing
def gpu_missing(index: int) -> str:
    """Why the CUDA kernels cannot run on this GPU, or the empty string."""
    return _gpu_missing(index)


@functools.cache
def every_gpu_runs() -> bool:
    """Whether the kernels run on every visible GPU: then a call need not look at its device's index."""
    return all(not _gpu_missing(index) for index in range(torch.cuda.device_count()))


def machine_missing(device: torch.device, dtype: torch.dtype) -> str:
    """Why no machine of ours takes tensors of this device and dtype, or the empty string."""
    allowed = KERNEL_DTYPES.get(device.type)
    if allowed is None:
        return f"no kernels for device type {device.type}"
    if dtype not in allowed:
        return f"no {device.type} kernels for {dtype}"
    if device.type == "cpu" and dtype == torch.float64 and ops.checking():
        return "the checked machine has float16, bfloat16 and float32"
    if device.type == "cuda":
        return gpu_missing(device.index)
    return ""


@_constant_while_tracing
def transforms_being_traced() -> str:
    """What torch.func does at this point of a graph that torch.compile traces: "derivative", "vmap" alone, or ""."""
    if torch._C._functorch.maybe_current_level() is None:
        return ""
    kinds = {interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack()}
    return "vmap" if kinds == {torch._C._functorch.TransformType.Vmap} else "derivative"


def has_plan() -> bool:
    """Whether the plan module was built."""
    return _plan is not None


CHECKED_THREADS = 2  # what the checked flavour runs on, whatever torch's setting


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    corner: int,
    window_left: int = -1,
    window_right: int = -1,
    checked_configuration: int | None = None,
    modified: bool = False,
    sinks: bool = False,
    softcap: bool = False,
) -> Any:
    """The plan module's answer for operands of the forward op. Only where `has_plan()`.

    checked_configuration: the configuration that `checked_machine` forces (-1: none) where the checking flavour runs.
    modified: whether something modifies the scores beyond a scale, a key interval and sinks.
    sinks: whether there are sinks; softcap: a soft cap.
    """
    assert _plan is not None
    checked = checked_configuration is not None
    batch, heads, length_q, head_dim = query.shape
    heads_k, length_k, value_dim = *key.shape[1:3], value.shape[3]
    if query.device.type == "cuda":
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    else:
        processors = CHECKED_THREADS if checked else torch.get_num_threads()
    return _plan.forward(
        machine="sm90" if checked or query.device.type == "cuda" else "cpu",
        dtype=str(query.dtype).removeprefix("torch."),
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        length_q=length_q,
        length_k=length_k,
        head_dim=head_dim,
        value_dim=value_dim,
        corner=corner,
        window_left=window_left,
        window_right=window_right,
        processors=processors,
        configuration=checked_configuration if checked_configuration is not None else -1,
        modified=modified,
        sinks=sinks,
        softcap=softcap,
    )


_prefers_torch: dict[tuple[Any, ...], bool] = {}
_REMEMBERED_PLANS = 4096


def is_differentiated(*operands: Tensor | None) -> bool:
    """Whether the gradient of one of them is wanted."""
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def gpu_prefers_torch(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float) -> bool:
    """Whether torch runs a call of the drop-in with a mask or dropout faster than our kernels on the GPU.

    On an H200, time of the best of torch's kernels over ours: a bool mask 3.4 to 25, its backward 1.4 (half of the keys
    padding) to 10 (documents), but 0.63 for a mask of random bits; an additive mask 1.06 (dense) and 0.79 (T5's), its
    backward 0.73; dropout 1.1 to 1.4, its backward 0.34 to 0.53. The gradient of a bias is made by one kernel of
    torch's alone: T5's 1.9 forward and 1.03 backward, 1.18 in all.
    """
    if dropout_p > 0.0 and is_differentiated(query, key, value, attn_mask):
        return True
    return attn_mask is not None and attn_mask.dtype != torch.bool and not is_differentiated(attn_mask)


def cpu_prefers_torch(query: Tensor, key: Tensor, value: Tensor, corner: int, modified: bool = False) -> bool:
    """Whether torch runs this plain call of the drop-in faster than our cpu machine. False without the plan module.

    A call whose gradient is wanted, or with something that modifies the scores, goes to torch: neither was measured.
    """
    if _plan is None:
        return False
    if modified:
        return True
    if is_differentiated(query, key, value):
        return True
    known = (query.dtype, query.shape, key.shape, value.shape, corner, torch.get_num_threads())
    try:
        answer = _prefers_torch.get(known)
    except TypeError:  # symbolic sizes, as of make_fx, have no hash: the graph is for all lengths
        return False
    if answer is None:
        if len(_prefers_torch) >= _REMEMBERED_PLANS:
            _prefers_torch.clear()
        answer = _prefers_torch[known] = plan(query, key, value, corner).prefer_torch
    return answer
