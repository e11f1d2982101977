"""Turns every `torch.nn.functional.scaled_dot_product_attention` of the process over to our kernels, and back.

The switch is the registry of flash attention implementations that torch has since 2.11, where we are "kittens". Under
it lie overrides of the operators that torch's own choice of a backend ends in, one for each of its fused kernels, on
their device keys alone. So all that torch does above them stays torch's: autocast, the checks and their messages,
`sdpa_kernel` contexts, tracing, `vmap`, autograd. The alternatives lose some of it: an override of the composite
`scaled_dot_product_attention` would have to come with autograd, autocast and batching of its own, and a replaced
`torch.nn.functional` attribute is not seen by modules that imported the function by name, nor by compiled graphs.

The outputs of the forward operators are those that torch's backward operators ask for (the layout of the query, and
the natural-log logsumexp in the shape of each backend), so that `disable` may come between forward and backward. On
the GPU the backward operators are ours too (`enable_backward`); on the CPU torch's are faster and stay, and so does
torch's kernel where there is a mask. Dropout stays torch's on both: its backward has to drop the same weights.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.attention as torch_attention
from torch import Tensor

from . import call, checks, dispatch, ops
from .enable_backward import cudnn_backward, flash_backward

NAME = "kittens"
TORCH_IS_FASTER = "torch's own kernel is faster for this call on this CPU, or was not measured against ours"
MASKED = "attn_mask: torch's own kernels have the faster backward pass; attention(...) runs ours"


class Outcome(NamedTuple):
    """What became of one call that torch handed to an override, for `report`: its query and scale as they came, and
    what our kernel gets."""

    query: Tensor
    scale: float
    operands: call.Operands
    # Why torch's own kernel ran, or the empty string.
    reason: str


watchers: list[Callable[[Outcome], None]] = []


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    corner: int,
    scale: float | None,
) -> tuple[Tensor, Tensor] | None:
    """(output in the layout of the query, logsumexp) from our kernel, or None where torch's own kernel has to run."""
    factor = query.shape[3] ** -0.5 if scale is None else scale
    reason = call.fused_has_no_kernel(query, key, value, dropout_p, corner, factor)
    if reason:
        dispatch.fell_back(reason)
    elif (
        query.device.type == "cpu"
        and factor > 0.0
        and not ops.checking()
        and dispatch.cpu_prefers_torch(query, key, value, corner)
    ):
        reason = TORCH_IS_FASTER
    folded, positive = (query, factor) if reason else call.fold_scale(query, factor)
    _tell(query, factor, call.Operands(folded, key, value, positive, corner, -1, -1), reason)
    if reason:
        return None
    output, logsumexp = ops.run_forward(folded, key, value, positive, corner, -1, -1)
    if output.stride() != query.stride() and output.shape == query.shape:
        # A query that is not dense: compiled graphs expect the strides that torch derives from its.
        expected = torch.empty_like(query)
        if expected.stride() != output.stride():
            output = expected.copy_(output)
    return output, logsumexp


def _tell(query: Tensor, scale: float, operands: call.Operands, reason: str) -> None:
    for watch in watchers:
        watch(Outcome(query, scale, operands, reason))


# One override for each fused kernel of torch: each is given torch's own kernel, takes the arguments of the operator's
# schema, and returns its outputs. The warnings of `fell_back` count on the depth of these calls: they point at the
# caller of torch's function.


def _flash_for_cpu(torchs: Any) -> Callable[..., Any]:
    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        corner = call.UPPER_LEFT if is_causal else 0
        if attn_mask is not None:
            if watchers:
                _tell(query, 1.0, call.Operands(query, key, value, 1.0, corner, -1, -1), MASKED)
            return torchs.call_boxed(keys, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        # First what stays with torch: there every microsecond of ours is one more.
        stays = (
            query.shape[3] <= checks.MAX_HEAD_DIM
            and (scale is None or scale > 0.0)  # with another one torch's kernel gives NaN for a causal call
            and dispatch.cpu_prefers_torch(query, key, value, corner)
            and not ops.checking()
            and not watchers
        )
        ours = None if stays else _forward(query, key, value, dropout_p, corner, scale)
        if ours is None and scale is None:  # an argument that is not passed saves its conversion
            return torchs.call_boxed(keys, query, key, value, dropout_p, is_causal)
        if ours is None:
            return torchs.call_boxed(keys, query, key, value, dropout_p, is_causal, scale=scale)
        output, logsumexp = ours
        # (B, H, L) in the memory order of (B, L, H), as torch's kernel leaves it and compiled graphs expect it.
        return output, logsumexp.transpose(1, 2).contiguous().transpose(1, 2)

    return kernel


def _flash(torchs: Any) -> Callable[..., Any]:
    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        # The lower-right corner: this operator is also what torch's `causal_lower_right` calls.
        corner = 0 if not is_causal else call.UPPER_LEFT if query.shape[2] == key.shape[2] else call.LOWER_RIGHT
        ours = None
        if not return_debug_mask:
            ours = _forward(query, key, value, dropout_p, corner, scale)
        if ours is None:
            return torchs.call_boxed(keys, query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)
        rng_state = query.new_empty(2, dtype=torch.uint64)
        unused = query.new_empty((), dtype=torch.uint64)
        return (*ours, None, None, query.shape[2], key.shape[2], rng_state, unused, query.new_empty(0))

    return kernel


def _cudnn(torchs: Any) -> Callable[..., Any]:
    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        corner = call.UPPER_LEFT if is_causal else 0
        ours = None
        if attn_bias is not None:
            if watchers:
                _tell(query, 1.0, call.Operands(query, key, value, 1.0, corner, -1, -1), MASKED)
        elif not return_debug_mask:
            ours = _forward(query, key, value, dropout_p, corner, scale)
        if ours is None:
            return torchs.call_boxed(
                keys,
                query,
                key,
                value,
                attn_bias,
                compute_log_sumexp,
                dropout_p,
                is_causal,
                return_debug_mask,
                scale=scale,
            )
        output, logsumexp = ours
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        return (output, logsumexp.unsqueeze(3), None, None, query.shape[2], key.shape[2], seed, offset, None)

    return kernel


# torch's memory-efficient kernel and its math are not here: `sdpa_kernel` chooses them by name, and torch alone only
# where we have no kernel either, but for operands that neither flash nor cuDNN takes.
OVERRIDES: tuple[tuple[str, str, Callable[[Any], Callable[..., Any]]], ...] = (
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _flash_for_cpu),
    ("_scaled_dot_product_flash_attention", "CUDA", _flash),
    ("_scaled_dot_product_flash_attention_backward", "CUDA", flash_backward),
    ("_scaled_dot_product_cudnn_attention", "CUDA", _cudnn),  # what torch prefers on an H100 or H200
    ("_scaled_dot_product_cudnn_attention_backward", "CUDA", cudnn_backward),
)


# The overrides of late. torch looks a kernel up and runs it without a lock or a reference of its own: one that is freed
# while another thread is about to run it, or runs it, ends the process.
_late: deque[Any] = deque(maxlen=1024)


class _Handle:
    """The overrides in force; the registry holds it, and calls `remove` before anything else takes their place."""

    def __init__(self) -> None:
        self._library = torch.library.Library("aten", "IMPL")
        for operator, key, override in OVERRIDES:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", key):
                continue  # CUDA, under a torch without it
            torchs = torch.library.get_kernel(f"aten::{operator}", key)
            with warnings.catch_warnings():
                # torch says once in a process that a kernel is overridden, which is what was asked for.
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                self._library.impl(operator, override(torchs), key, with_keyset=True, allow_override=True)
            _late.append(torch.library.get_kernel(f"aten::{operator}", key))

    def remove(self) -> None:
        self._library._destroy()


torch_attention.register_flash_attention_impl(NAME, register_fn=_Handle)
_before: str | None = None
_switching = threading.RLock()  # of two threads that switch at once, one would override the other's override


def is_enabled() -> bool:
    """Whether torch's attention is ours at the moment."""
    return torch_attention.current_flash_attention_impl() == NAME


def enable() -> None:
    """Runs every `torch.nn.functional.scaled_dot_product_attention` of this process on our kernels, until `disable`.

    It reaches all code that calls torch's function, in `torch.nn` and elsewhere, in eager mode and in compiled graphs,
    in all threads. What torch would give to its flash or cuDNN kernel comes to us, and on the GPU its backward pass as
    well; gradients on the CPU, and whatever torch gives to its memory-efficient kernel or its math (`sdpa_kernel`,
    float32 on a GPU, a mask with a gradient, unequal head dims on the CPU), stay torch's. A call that none of our
    kernels covers, or with dropout, runs torch's kernel after a warning once per reason (`set_fallback`). On the CPU a
    call with a mask, or that torch is expected to run faster, stays there as well, without a warning. A second
    derivative torch refuses as without us; its math under `sdpa_kernel(SDPBackend.MATH)` has it.

    The same as `torch.nn.attention.activate_flash_attention_impl("kittens")`. Another implementation of that registry
    that is active gives way, and comes back at `disable`. Enabling twice is enabling once.
    """
    global _before
    with _switching:
        if is_enabled():
            return
        before = torch_attention.current_flash_attention_impl()
        torch_attention.activate_flash_attention_impl(NAME)
        _before = before


def disable() -> None:
    """Gives torch its own attention kernels back. Does nothing where ours are not enabled."""
    global _before
    with _switching:
        if not is_enabled():
            return
        before, _before = _before, None
        torch_attention.restore_flash_attention_impl()
        if before is not None:
            torch_attention.activate_flash_attention_impl(before)


class _Context:
    """An open `enabled`: whether ours were enabled before it."""

    def __init__(self, before: bool) -> None:
        self.before = before


_open: list[_Context] = []  # in the order of their beginnings


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` while the context lasts, in all threads. At its end things are as they were at its beginning.

    Of contexts that overlap, in several threads, the last one to end sees to that.
    """
    with _switching:
        context = _Context(is_enabled())
        enable()
        _open.append(context)
    try:
        yield
    finally:
        with _switching:
            place = _open.index(context)
            del _open[place]
            if place < len(_open):  # one that began later goes on, and inherits what was before
                _open[place].before = context.before
            elif context.before:
                enable()
            else:
                disable()
