"""torch.func.vmap of the ops: the mapped dimension becomes part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _fold(argument: Any, dim: int | None, size: int) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    argument = argument.unsqueeze(0).expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
    return argument.flatten(0, 1)


def _unfold(result: Tensor, size: int, batch: int) -> Tensor:
    # A gradient that was not asked for is an empty vector without a batch.
    if result.dim() == 1:
        return result.expand(size, 0)
    return result.reshape(size, batch, *result.shape[1:])


def batch_over(op: Callable[..., tuple[Tensor, ...]]) -> None:
    """Registers the rule for an op whose tensors all start with the batch dimension."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))
        given = list(zip(arguments, dims, strict=True))
        results = op(*(_fold(argument, dim, size) for argument, dim in given))
        tensor, dim = next((argument, dim) for argument, dim in given if isinstance(argument, Tensor))
        batch = tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]
        return tuple(_unfold(result, size, batch) for result in results), (0,) * len(results)

    torch.library.register_vmap(op, rule)  # type: ignore[arg-type]
