"""The backward ops: what they return to fake tensors, their vmap rule, and the flavour in force.

With P = exp(scale q k^T - logsumexp) and delta_i = sum_d dO_id O_id - dlogsumexp_i (Dao et al., FlashAttention,
appendix B): dV = P^T dO,  dP = dO V^T,  dS = P (dP - delta),  dQ = scale dS K,  dK = scale dS^T Q.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .vmap import batch_over

backward = torch.ops.kittens_torch.backward.default
checked_backward = torch.ops.kittens_torch.checked_backward.default


def _fake_gradients(
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
    need_query: bool,
    need_key: bool,
    need_value: bool,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each gradient like its input, in dtype and layout; an empty tensor where none is asked for."""
    needed = ((query, need_query), (key, need_key), (value, need_value))
    grads = (
        ops.empty_in_layout_of(operand, operand.shape, operand.dim()) if need else operand.new_empty(0)
        for operand, need in needed
    )
    return next(grads), next(grads), next(grads)


for _name in ("backward", "checked_backward"):
    torch.library.register_fake(f"kittens_torch::{_name}", _fake_gradients)
batch_over(backward)
batch_over(checked_backward)


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
    return backward(grad_output, grad_logsumexp, *saved, *settings, *needed, deterministic)
