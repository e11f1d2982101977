"""The forward op with modifiers, on the flavour in force.

What is known of a bool mask is remembered for when it comes again, as it does in each layer of a model.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from . import ops

Classes = tuple[Tensor | None, Tensor | None, Tensor | None]  # tiles, ranges, seen, as `classify_mask` makes them
NOTHING: Classes = (None, None, None)
REMEMBERED = 16  # masks
WORTHWHILE = 1 << 16  # elements: smaller masks are classified faster than they are found


class _Known(NamedTuple):
    owner: weakref.ref[Tensor]  # whose memory the mask is in
    version: int
    classes: Classes


_known: OrderedDict[tuple[Any, ...], _Known] = OrderedDict()


def _is_plain(mask: Tensor) -> bool:
    """Whether a mask has memory of its own whose changes torch counts, and this call is neither traced nor captured."""
    return (
        type(mask) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
        and not _python_dispatch._is_in_torch_dispatch_mode
        and not mask.is_inference()
        and not (mask.is_cuda and _is_capturing(mask.device))
    )


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream of this device is; torch's own function asks that of the current device."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def classes_of(
    mask: Tensor | None, query: Tensor, key: Tensor, corner: int, window_left: int, window_right: int
) -> Classes:
    """What an earlier call knows of this mask: the same memory, shape, strides and version, under the same interval.

    What changes the memory behind torch's back (a replayed graph, a kernel that does not count its writes) must count
    it: `mask.bitwise_or_(False)`, or a new tensor. NOTHING where the op has to look itself.
    """
    if mask is None or mask.numel() < WORTHWHILE or not _is_plain(mask):
        return NOTHING
    owner = mask if mask._base is None else mask._base
    stream = torch.cuda.current_stream(mask.device).cuda_stream if mask.is_cuda else 0
    place = (mask.data_ptr(), mask.shape, mask.stride(), mask.device, stream)
    name = (*place, query.shape[:3], key.shape[2], corner, window_left, window_right)
    # Taken out and put in at the end in single steps, which threads may mix: at worst one looks at its mask again.
    known = _known.pop(name, None)
    if known is None or known.owner() is not owner or known.version != mask._version:
        classes = ops.classify_mask(mask, query, key, corner, window_left, window_right)
        known = _Known(weakref.ref(owner), mask._version, classes)
    _known[name] = known
    while len(_known) > REMEMBERED:
        _known.popitem(last=False)
    return known.classes


def run_forward(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """(output, logsumexp). settings: those of `ops.forward_modified` up to the soft cap."""
    checked = ops.checked_configuration()
    if checked is not None and query.device.type == "cpu":
        return ops.checked_forward_modified(query, key, value, *settings, checked, ops.checked_seed())
    known = classes_of(settings[4], query, key, *settings[1:4])
    return ops.forward_modified(query, key, value, *settings, -1, *known)
