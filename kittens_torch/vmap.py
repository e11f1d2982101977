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


# Where the modified ops' tensors are among their arguments.
_MASK, _BIAS, _KEY_LENGTHS, _ALIBI_SLOPES, _SINKS = range(7, 12)


def batch_over_modified(op: Callable[..., tuple[Tensor, ...]]) -> None:
    """Registers the rule for a forward op with modifiers: as `batch_over`, but the modifiers broadcast.

    A modifier that is not mapped and has one entry for all batches stays as it is. Mapped sinks, of which the op takes
    one set, come in after it.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))
        if dims[_SINKS] is not None:
            sinks = arguments[_SINKS].movedim(dims[_SINKS], 0)
            without = [None if place == _SINKS else argument for place, argument in enumerate(arguments)]
            (output, logsumexp), _ = rule(
                info, tuple(None if place == _SINKS else dim for place, dim in enumerate(dims)), *without
            )
            return _with_sinks(output, logsumexp, sinks), (0, 0)
        query = arguments[0]
        batch = query.shape[0] if dims[0] is None else query.movedim(dims[0], 0).shape[1]
        folded = []
        for place, (argument, dim) in enumerate(zip(arguments, dims, strict=True)):
            if place < 3 or place == _KEY_LENGTHS:
                argument = _fold(argument, dim, size)
            elif place in (_MASK, _BIAS, _ALIBI_SLOPES) and isinstance(argument, Tensor):
                argument = _fold_broadcast(argument, dim, size, batch, 2 if place == _ALIBI_SLOPES else 4)
            elif isinstance(argument, Tensor) and dim is not None:
                argument = argument.select(dim, 0)  # The batches differ, so one state draws differently for each.
            folded.append(argument)
        return tuple(_unfold(result, size, batch) for result in op(*folded)), (0, 0)

    torch.library.register_vmap(op, rule)  # type: ignore[arg-type]


def _with_sinks(output: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Of a call without sinks: output (size, B, H, L, Dv) and logsumexp (size, B, H, L), with sinks (size, H)."""
    joint = torch.logaddexp(logsumexp, sinks[:, None, :, None])
    share = torch.exp(logsumexp - joint).masked_fill(logsumexp == -float("inf"), 0.0)
    return (output * share.unsqueeze(-1)).to(output.dtype), joint


def _fold_broadcast(argument: Tensor, dim: int | None, size: int, batch: int, rank: int) -> Tensor:
    """A modifier of up to `rank` dims, whose first may be 1 or missing, for size * batch batches."""
    if dim is None and (argument.dim() < rank or argument.shape[0] == 1):
        return argument
    argument = argument.unsqueeze(0) if dim is None else argument.movedim(dim, 0)
    if argument.dim() == rank:  # without a batch
        argument = argument.unsqueeze(1)
    return argument.expand(size, batch, *argument.shape[2:]).flatten(0, 1)


# Of the backward ops with modifiers.
_FORWARD_TENSORS = 7
_BACKWARD_MASK, _BACKWARD_BIAS, _BACKWARD_KEY_LENGTHS, _BACKWARD_SLOPES = range(11, 15)
_NEED_BIAS = 21


def batch_over_modified_backward(op: Callable[..., tuple[Tensor, ...]]) -> None:
    """Registers the rule for a backward op with modifiers: batches as in `batch_over_modified`, so that dropout agrees.

    A bias whose gradient is asked for gets all batches, so that the gradient of each element of the mapped dimension is
    its own.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))
        query, bias, bias_dim = arguments[2], arguments[_BACKWARD_BIAS], dims[_BACKWARD_BIAS]
        batch = query.shape[0] if dims[2] is None else query.movedim(dims[2], 0).shape[1]
        folded = []
        for place, (argument, dim) in enumerate(zip(arguments, dims, strict=True)):
            if place < _FORWARD_TENSORS or place == _BACKWARD_KEY_LENGTHS:
                argument = _fold(argument, dim, size)
            elif place == _BACKWARD_BIAS and arguments[_NEED_BIAS]:
                argument = argument.unsqueeze(0) if dim is None else argument.movedim(dim, 0)
                argument = argument.expand(size, batch, *argument.shape[2:]).flatten(0, 1)
            elif place in (_BACKWARD_MASK, _BACKWARD_BIAS, _BACKWARD_SLOPES) and isinstance(argument, Tensor):
                argument = _fold_broadcast(argument, dim, size, batch, 2 if place == _BACKWARD_SLOPES else 4)
            elif isinstance(argument, Tensor) and dim is not None:
                argument = argument.select(dim, 0)
            folded.append(argument)
        *grads, of_bias = (_unfold(result, size, batch) for result in op(*folded))
        if arguments[_NEED_BIAS] and (bias.shape[0] if bias_dim is None else bias.movedim(bias_dim, 0).shape[1]) == 1:
            of_bias = of_bias.sum(1, keepdim=True)
        return (*grads, of_bias), (0,) * 4

    torch.library.register_vmap(op, rule)  # type: ignore[arg-type]
