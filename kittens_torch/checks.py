"""What a call must satisfy, checked before any launch.

Every refusal names the argument, its value and what is allowed. The exception classes are those a user of torch
expects: TypeError for the wrong kind of object, RuntimeError where torch's scaled_dot_product_attention raises
RuntimeError (tensors that do not fit each other), ValueError for scalars out of range.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NoReturn

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 256
# Any window at least this wide is open: lengths stay below it, and i + offset + window cannot overflow 64 bits.
WIDEST_WINDOW = 2**31 - 1


def refuse(argument: str, value: object, allowed: str, error: type[Exception] = RuntimeError) -> NoReturn:
    """The one way a call is refused."""
    raise error(f"{argument} is {value}; allowed: {allowed}")


def tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        refuse(argument, type(value).__name__, "a torch.Tensor", TypeError)


def strided(argument: str, value: Tensor) -> None:
    if value.is_nested or value.layout != torch.strided:
        refuse(f"layout of {argument}", "nested" if value.is_nested else value.layout, "torch.strided, not nested")


def number(argument: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(argument, repr(value), f"a whole number from {least} to {most}", TypeError)
    if not least <= value <= most:
        refuse(argument, value, f"a whole number from {least} to {most}", ValueError)


def flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        refuse(argument, repr(value), "True or False", TypeError)


def same_dtype_and_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    dtype = query.dtype
    if not (dtype == key.dtype == value.dtype):
        refuse(
            "dtype of (query, key, value)",
            f"({query.dtype}, {key.dtype}, {value.dtype})",
            "the same dtype for query, key and value (outside autocast nothing is cast)",
        )
    if not (query.device == key.device == value.device):
        refuse(
            "device of (query, key, value)",
            f"({query.device}, {key.device}, {value.device})",
            "the same device for query, key and value",
        )
    if dtype not in FLOATING and not (dtype.is_floating_point or dtype.is_complex):
        refuse("dtype of query", query.dtype, ", ".join(str(dtype) for dtype in FLOATING))


# The following take shapes: a tensor makes its shape anew each time that it is asked for it.


def rank_at_least_two(query: torch.Size, key: torch.Size, value: torch.Size) -> None:
    for argument, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 2:
            refuse(f"rank of {argument}", len(shape), "at least 2, (..., length, head dim)")


def rank_four(query: torch.Size, key: torch.Size, value: torch.Size) -> None:
    for argument, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 4:
            refuse(f"rank of {argument}", len(shape), "4, (batch, heads, length, head dim)")


def lengths_and_head_dims(query: torch.Size, key: torch.Size, value: torch.Size) -> None:
    """The last two dimensions of key and value against the query and each other."""
    if key[-1] != query[-1]:
        refuse("head dim of key", key[-1], f"{query[-1]}, the head dim of query")
    if value[-2] != key[-2]:
        refuse("length of value", value[-2], f"{key[-2]}, the length of key")


def head_dims_of_kernels(query: torch.Size, value: torch.Size) -> None:
    for argument, shape in (("query", query), ("value", value)):
        if not 1 <= shape[-1] <= MAX_HEAD_DIM:
            refuse(f"head dim of {argument}", shape[-1], f"1 to {MAX_HEAD_DIM}")


def batch_and_heads(query: torch.Size, key: torch.Size, value: torch.Size) -> None:
    """Equal batch, equal heads of key and value, dividing the heads of the query."""
    batch, heads, heads_k = query[0], query[1], key[1]
    for argument, shape in (("key", key), ("value", value)):
        if shape[0] != batch:
            refuse(f"batch of {argument}", shape[0], f"{batch}, the batch of query")
    if value[1] != heads_k:
        refuse("heads of value", value[1], f"{heads_k}, the heads of key")
    if (heads % heads_k if heads_k else heads) != 0:
        refuse("heads of key", heads_k, f"a divisor of {heads}, the heads of query")


def as_float(value: Any) -> float:
    """A number as a float, infinite where it is beyond all of them."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def scale(value: object) -> float:
    """`scale` as a finite float. A 0-d tensor is read, as torch does."""
    if isinstance(value, Tensor) and value.requires_grad:
        refuse("scale", "a tensor that requires a gradient", "None or a number; scale the query instead", TypeError)
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        refuse("scale", repr(value), "None or a number", TypeError)
    number = as_float(value)
    if not -math.inf < number < math.inf:
        refuse("scale", number, "None or any finite number", ValueError)
    return number


def dropout(value: object, error: type[Exception] = RuntimeError) -> float:
    """`dropout_p` in [0, 1]; torch raises RuntimeError beyond it."""
    if not isinstance(value, (int, float)):
        refuse("dropout_p", repr(value), "a number from 0 to 1", TypeError)
    if not 0.0 <= value <= 1.0:
        refuse("dropout_p", value, "0 to 1", error)
    return float(value)


def mask(attn_mask: Tensor, dtype: torch.dtype, device: torch.device, logits_shape: tuple[int, ...]) -> None:
    """A mask for logits of `logits_shape` = (..., Lq, Lk)."""
    if attn_mask.dtype not in (torch.bool, torch.float32, dtype):
        others = "" if dtype == torch.float32 else f", {dtype}"
        refuse("dtype of attn_mask", attn_mask.dtype, f"torch.bool, torch.float32{others} (float32 or as the query)")
    on_device("attn_mask", attn_mask, device)
    broadcasts("attn_mask", attn_mask, logits_shape)


def on_device(argument: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        refuse(f"device of {argument}", value.device, f"{device}, the device of query")


def broadcasts(argument: str, value: Tensor, logits_shape: tuple[int, ...]) -> None:
    shape = tuple(value.shape)
    padded = (1,) * (len(logits_shape) - len(shape)) + shape
    fits = len(padded) == len(logits_shape) and all(
        size == 1 or size == wanted
        for size, wanted in zip(padded, logits_shape, strict=True)  # no `in`: symbolic sizes
    )
    if not fits:
        refuse(f"shape of {argument}", shape, f"any shape that broadcasts to {logits_shape}")


def bool_mask(value: object, device: torch.device, logits_shape: tuple[int, ...]) -> None:
    tensor("mask", value)
    assert isinstance(value, Tensor)
    strided("mask", value)
    if value.dtype != torch.bool:
        refuse("dtype of mask", value.dtype, "torch.bool (True: visible); an additive mask is `bias`")
    on_device("mask", value, device)
    broadcasts("mask", value, logits_shape)


def additive(value: object, dtype: torch.dtype, device: torch.device, logits_shape: tuple[int, ...]) -> None:
    tensor("bias", value)
    assert isinstance(value, Tensor)
    strided("bias", value)
    if value.dtype not in (torch.float32, dtype):
        others = "" if dtype == torch.float32 else f", {dtype}"
        refuse("dtype of bias", value.dtype, f"torch.float32{others} (float32 or as the query); a bool mask is `mask`")
    on_device("bias", value, device)
    broadcasts("bias", value, logits_shape)


def key_lengths(value: object, device: torch.device, batch: int) -> None:
    tensor("key_lengths", value)
    assert isinstance(value, Tensor)
    strided("key_lengths", value)
    if value.dtype not in (torch.int32, torch.int64):
        refuse("dtype of key_lengths", value.dtype, "torch.int32 or torch.int64")
    if tuple(value.shape) != (batch,):
        refuse("shape of key_lengths", tuple(value.shape), f"({batch},), one number of keys for each batch")
    on_device("key_lengths", value, device)


def of_heads(
    argument: str, value: object, device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]
) -> None:
    """A floating number for each head, of one of the `shapes`."""
    tensor(argument, value)
    assert isinstance(value, Tensor)
    strided(argument, value)
    if value.dtype not in (torch.float32, dtype):
        others = "" if dtype == torch.float32 else f", {dtype}"
        refuse(f"dtype of {argument}", value.dtype, f"torch.float32{others} (float32 or as the query)")
    if tuple(value.shape) not in shapes:
        refuse(f"shape of {argument}", tuple(value.shape), " or ".join(str(shape) for shape in shapes))
    on_device(argument, value, device)


def softcap(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse("softcap", repr(value), "0 (none) or a positive number", TypeError)
    if not 0 <= as_float(value) < math.inf:
        refuse("softcap", value, "0 (none) or a positive finite number", ValueError)
    return float(value)


def causal(value: object) -> int:
    """The op's corner: 0 none, 1 upper left, 2 lower right."""
    if value is None:
        return 0
    if value == "upper_left":
        return 1
    if value == "lower_right":
        return 2
    refuse("causal", repr(value), "None, 'upper_left' or 'lower_right'", ValueError)


def window(value: object) -> tuple[int, int]:
    """(left, right) as the op takes them: -1 open."""
    if value is None:
        return -1, -1
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        refuse("window", repr(value), "None or a pair (left, right)", TypeError)
    return _window_side("left", value[0]), _window_side("right", value[1])


def _window_side(side: str, value: object) -> int:
    if value is None:
        return -1
    if isinstance(value, bool):
        refuse(f"window {side}", value, "None (open) or a number of keys", TypeError)
    try:
        keys = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        refuse(f"window {side}", repr(value), "None (open) or a number of keys", TypeError)
    if keys < 0:
        refuse(f"window {side}", keys, "None (open) or a number of keys >= 0", ValueError)
    return min(keys, WIDEST_WINDOW)
