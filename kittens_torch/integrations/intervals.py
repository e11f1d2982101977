"""Masks of transformers as key intervals: what a mask function means, and a mask that stays an interval until used."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Band(NamedTuple):
    """Visible keys before and after the query's own position, None for an open side."""

    left: int | None
    right: int | None

    def within(self, other: Band) -> Band:
        """The keys visible in both."""
        return Band(
            *(min((s for s in sides if s is not None), default=None) for sides in zip(self, other, strict=True))
        )


class Interval(NamedTuple):
    """Key j is visible to query i iff -left <= j - (i + offset) <= right."""

    band: Band
    offset: int

    def dense(self, length_q: int, length_k: int, device: torch.device) -> Tensor:
        """The bool mask (length_q, length_k), True where visible."""
        places = torch.arange(length_q, device=device)[:, None] + self.offset
        distances = torch.arange(length_k, device=device)[None] - places
        visible = torch.ones_like(distances, dtype=torch.bool)
        if self.band.left is not None:
            visible &= distances >= -self.band.left
        if self.band.right is not None:
            visible &= distances <= self.band.right
        return visible


def band_of(mask_function: Callable[..., Any], masking_utils: Any) -> Band | None:
    """The band of a mask function of `transformers.masking_utils`, or None for one that is no band or not known.

    A composed function is known by the function that made it and by the constants it holds, so that nothing is guessed
    from a name or from the configuration of a model.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Band(None, 0)
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Band(None, None)
    made_by, held = _origin(mask_function, masking_utils)
    if made_by == "and_masks":
        band = Band(None, None)
        for part in held["mask_functions"]:
            of_part = band_of(part, masking_utils)
            if of_part is None:
                return None
            band = band.within(of_part)
        return band
    if made_by == "sliding_window_overlay":  # k > q - window
        return Band(held["sliding_window"] - 1, None)
    if made_by == "sliding_window_bidirectional_overlay":  # |q - k| <= window
        return Band(held["sliding_window"], held["sliding_window"])
    if made_by == "packed_sequence_mask_function":
        sequences = held["packed_sequence_mask"]
        return Band(None, None) if bool((sequences == sequences[:, :1]).all()) else None
    return None


def looks_for_packing(mask_function: Callable[..., Any], masking_utils: Any) -> bool:
    """Whether the mask keeps packed sequences apart, which transformers 4.57 asks for without knowing of any."""
    made_by, held = _origin(mask_function, masking_utils)
    if made_by == "and_masks":
        return any(looks_for_packing(part, masking_utils) for part in held["mask_functions"])
    return made_by == "packed_sequence_mask_function"


def _origin(mask_function: Callable[..., Any], masking_utils: Any) -> tuple[str, dict[str, Any]]:
    """The function of transformers that made this one and what it holds, or ("", {}) for one of somebody else."""
    if getattr(mask_function, "__module__", None) != masking_utils.__name__ or not inspect.isfunction(mask_function):
        return "", {}
    held = inspect.getclosurevars(mask_function).nonlocals
    return mask_function.__qualname__.partition(".<locals>")[0], dict(held)


class IntervalMask(Tensor):
    """A bool mask (batch, 1, length_q, length_k) of transformers that knows its interval and has no memory.

    padding: bool (batch, length_k), False for keys that no row sees; None: there are none. Our attention reads both.
    Whoever else computes with the mask, slices it or converts it, gets the dense
    mask that it stands for.
    """

    interval: Interval
    padding: Tensor | None

    @staticmethod
    def __new__(
        cls,
        interval: Interval,
        batch: int,
        length_q: int,
        length_k: int,
        device: torch.device,
        padding: Tensor | None = None,
    ) -> IntervalMask:
        sizes = (batch, 1, length_q, length_k)
        mask: IntervalMask = Tensor._make_wrapper_subclass(cls, sizes, dtype=torch.bool, device=device)
        mask.interval, mask.padding = interval, padding
        return mask

    def dense(self) -> Tensor:
        """The mask in memory, shared by the batch where there is no padding."""
        visible = self.interval.dense(self.shape[2], self.shape[3], self.device)
        return (visible if self.padding is None else visible & self.padding[:, None, None]).expand(*self.shape)

    def __deepcopy__(self, known: dict[int, Any]) -> IntervalMask:
        batch, _, length_q, length_k = self.shape
        padding = None if self.padding is None else self.padding.clone()
        return IntervalMask(self.interval, batch, length_q, length_k, self.device, padding)

    def __repr__(self) -> str:  # type: ignore[override]
        padded = "" if self.padding is None else " with padding"
        return f"IntervalMask({self.interval}{padded}, size={tuple(self.shape)}, device={self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(IntervalMask, IntervalMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)
