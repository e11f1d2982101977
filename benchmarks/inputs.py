"""Fresh N(0, 1) inputs of a shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .presets import Shape


@dataclass(frozen=True)
class Inputs:
    """query, key, value and the gradient of the output, all (batch, heads, length, head_dim) and contiguous."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor | None

    @property
    def attended(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def make_inputs(shape: Shape, device: torch.device, direction: str, generator: torch.Generator) -> Inputs:
    """Random normal inputs; never zeros, which draw less power and so run faster than real data."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=shape.dtype, device=device, generator=generator)

    return Inputs(
        query=normal(shape.batch, shape.heads, shape.length_q, shape.head_dim),
        key=normal(shape.batch, shape.heads_k, shape.length_k, shape.head_dim),
        value=normal(shape.batch, shape.heads_k, shape.length_k, shape.value_dim),
        grad_output=normal(shape.batch, shape.heads, shape.length_q, shape.value_dim) if direction == "bwd" else None,
    )
