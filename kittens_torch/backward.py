"""The backward ops: what they return to fake tensors, their vmap rule, and the flavour in force.

With P = exp(scale q k^T - logsumexp) and delta_i = sum_d dO_id O_id - dlogsumexp_i (Dao et al., FlashAttention,
appendix B): dV = P^T dO,  dP = dO V^T,  dS = P (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q.

The modified ops know masks, a bias, key lengths, a soft cap, ALiBi slopes and dropout (reference.attention). With z = 0
where dropout drops a weight and 1 / (1 - p) elsewhere: dV = (z P)^T dO and dS = P (z dP - delta); dS is the gradient of
the bias, and times the soft cap's derivative what goes on to dQ and dK.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import modified, ops
from .vmap import batch_over, batch_over_modified_backward

backward = torch.ops.kittens_torch.backward.default
checked_backward = torch.ops.kittens_torch.checked_backward.default
backward_modified = torch.ops.kittens_torch.backward_modified.default
checked_backward_modified = torch.ops.kittens_torch.checked_backward_modified.default


def _fake_gradients(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    corner: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    need_query: bool = True,
    need_key: bool = True,
    need_value: bool = True,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each gradient like its input, in dtype and layout; an empty tensor where none is asked for."""
    needed = ((query, need_query), (key, need_key), (value, need_value))
    grads = (
        ops.empty_in_layout_of(operand, operand.shape, operand.dim()) if need else operand.new_empty(0)
        for operand, need in needed
    )
    return next(grads), next(grads), next(grads)


def _fake_modified_gradients(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    corner: int,
    window_left: int,
    window_right: int,
    mask: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_state: Tensor | None,
    dropout_p: float,
    softcap: float,
    need_query: bool,
    need_key: bool,
    need_value: bool,
    need_bias: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As without modifiers; the gradient of the bias is contiguous, in the bias's shape and dtype."""
    forward = (grad_output, grad_logsumexp, query, key, value, output, logsumexp)
    interval = (scale, corner, window_left, window_right)
    grads = _fake_gradients(*forward, *interval, need_query, need_key, need_value)
    like = query if bias is None else bias
    return *grads, like.new_empty(like.shape if need_bias else 0)


for _name in ("backward", "checked_backward"):
    torch.library.register_fake(f"kittens_torch::{_name}", _fake_gradients)
    torch.library.register_fake(f"kittens_torch::{_name}_modified", _fake_modified_gradients)
batch_over(backward)
batch_over(checked_backward)
batch_over_modified_backward(backward_modified)
batch_over_modified_backward(checked_backward_modified)


def run_backward(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    saved: tuple[Tensor, ...],
    settings: tuple[Any, ...],
    needed: tuple[bool, bool, bool],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op on the flavour in force: gradients of query, key and value, empty where not needed.

    saved: query, key, value, output, logsumexp; settings: scale, corner, window_left, window_right, as of the forward.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    seed = ops.checked_seed()
    if seed is not None and saved[0].device.type == "cpu":
        return checked_backward(grad_output, grad_logsumexp, *saved, *settings, *needed, deterministic, -1, seed)
    if needed == (True, True, True) and not deterministic:
        # Each argument that is the op's default, and not given, saves its conversion.
        return backward(grad_output, grad_logsumexp, *saved, *ops.without_defaults(settings))
    return backward(grad_output, grad_logsumexp, *saved, *settings, *needed, deterministic)


LONGEST_STEP = 1 << 30  # elements from row to row, or key to key, of a mask: the kernels take less


def _within_reach(mask: Tensor | None) -> Tensor | None:
    """The mask or bias itself, or a copy of one that lies too far apart. Compiled graphs make none: the op refuses."""
    if mask is None or torch.compiler.is_compiling():
        return mask
    if all(size == 1 or step < LONGEST_STEP for size, step in zip(mask.shape[-2:], mask.stride()[-2:], strict=True)):
        return mask
    once = mask[tuple(slice(1) if step == 0 else slice(None) for step in mask.stride())]
    return once.contiguous().expand(mask.shape)


def run_backward_modified(
    grad_output: Tensor | None,
    grad_logsumexp: Tensor | None,
    saved: tuple[Tensor, ...],
    settings: tuple[Any, ...],
    modifiers: tuple[Any, ...],
    needed: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The modified backward op on the flavour in force: gradients of query, key, value, bias, empty where not needed.

    saved and settings as of `run_backward`; modifiers: mask, bias, key_lengths, alibi_slopes, dropout_state, dropout_p,
    softcap. Sinks are in the logsumexp.
    """
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    mask, bias, *others = modifiers
    mask = _within_reach(mask)
    modifiers = (mask, _within_reach(bias), *others)
    arguments = (grad_output, grad_logsumexp, *saved, *settings, *modifiers, *needed, deterministic)
    seed = ops.checked_seed()
    if seed is not None and saved[0].device.type == "cpu":
        return checked_backward_modified(*arguments, -1, seed)
    return backward_modified(*arguments, -1, *modified.classes_of(mask, saved[0], saved[1], *settings[1:4]))
