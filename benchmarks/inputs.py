"""Fresh N(0, 1) inputs of a shape, with the masks and biases its row asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .modifiers import NO_MODIFIERS, Modifiers
from .presets import Shape


@dataclass(frozen=True)
class Inputs:
    """query, key, value and the gradient of the output, all (batch, heads, length, head_dim) and contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor | None
    modifiers: Modifiers = NO_MODIFIERS

    @property
    def attended(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_inputs(shape: Shape, device: torch.device, direction: str, generator: torch.Generator) -> Inputs:
    """Random normal inputs; never zeros, which draw less power and so run faster than real data."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=shape.dtype, device=device, generator=generator)

    modifiers = shape.make_modifiers(device, generator)
    grad_output = None
    if direction == "bwd":
        grad_output = normal(shape.batch, shape.heads, shape.length_q, shape.value_dim)
        if (blind := modifiers.blind_rows()) is not None:
            grad_output.masked_fill_(blind, 0.0)  # padding: no loss comes from these rows
    return Inputs(
        query=normal(shape.batch, shape.heads, shape.length_q, shape.head_dim),
        key=normal(shape.batch, shape.heads_k, shape.length_k, shape.head_dim),
        value=normal(shape.batch, shape.heads_k, shape.length_k, shape.value_dim),
        grad_output=grad_output,
        modifiers=modifiers,
    )


def cut(inputs: Inputs, shape: Shape) -> Inputs:
    """The same numbers as a plain ``shape`` takes them, which must hold the same pairs.

    A larger batch has the equal parts of each sequence as sequences of their own; a smaller length keeps what is first.
    """

    def part(tensor: Tensor, length: int) -> Tensor:
        parts = shape.batch // tensor.shape[0]
        if parts > 1:
            return tensor.unflatten(2, (parts, length)).transpose(1, 2).flatten(0, 1).contiguous()
        return tensor[:, :, :length].contiguous()

    return Inputs(
        query=part(inputs.query, shape.length_q),
        key=part(inputs.key, shape.length_k),
        value=part(inputs.value, shape.length_k),
        grad_output=None if inputs.grad_output is None else part(inputs.grad_output, shape.length_q),
    )
