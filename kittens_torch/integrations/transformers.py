"""Hugging Face transformers: `attn_implementation="kittens"`.

transformers keeps two tables by the same name, of attention functions and of functions that make their masks. Our mask
function leaves causal, sliding-window and full attention an interval, and padding a mask of the keys beside it, which
our kernels take as such; whatever else a model masks (packed sequences, chunks, images in text, static caches) becomes
the dense mask that "sdpa" would get, which they take as well.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import importlib
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import call, checks, dispatch, functional, ops
from ..explain import Plan
from .intervals import Band, Interval, IntervalMask, band_of, looks_for_packing
from .loading import when_loaded

NAME = "kittens"
OLDEST = (4, 57)
_LOADED_WITH_MODELS = "transformers.modeling_utils"
# transformers' own way to torch: it knows when torch wants the keys repeated over groups.
_sdpa: Any = None
_torch_attention = torch.nn.functional.scaled_dot_product_attention
_FUNCTION = "kittens_torch.integrations.transformers.attention_forward"
_EVERYTHING = Band(None, None)


def register() -> None:
    """Adds "kittens" to the attention implementations of transformers (4.57 or newer), with its masks.

    Then `from_pretrained(..., attn_implementation="kittens")` and `model.set_attn_implementation("kittens")` work.
    Importing kittens_torch does this by itself as soon as transformers has loaded its models, in whatever order the two
    are imported; calling it again changes nothing. ImportError where transformers is missing or older.
    """
    transformers = importlib.import_module("transformers")
    if not _new_enough(transformers.__version__):
        raise ImportError(
            f"kittens_torch needs transformers >= {OLDEST[0]}.{OLDEST[1]} for attn_implementation, found "
            f"{transformers.__version__}; kittens_torch.enable() needs none"
        )
    global _sdpa
    attentions, masks = _interfaces()
    _sdpa = attentions._global_mapping["sdpa"]
    attentions.register(NAME, attention_forward)
    masks.register(NAME, make_mask)


def _new_enough(version: str) -> bool:
    return tuple(int(part) for part in version.split(".")[:2]) >= OLDEST


def _interfaces() -> tuple[Any, Any]:
    return (
        importlib.import_module(_LOADED_WITH_MODELS).AttentionInterface,
        importlib.import_module("transformers.masking_utils").AttentionMaskInterface,
    )


def _register_where_possible() -> None:
    if _new_enough(sys.modules["transformers"].__version__):
        register()


def register_when_loaded() -> None:
    """`register`, now if transformers has loaded its models, else when it does. Imports nothing."""
    when_loaded(_LOADED_WITH_MODELS, _register_where_possible)


# Masks


def make_mask(*positional: Any, **arguments: Any) -> Tensor | None:
    """The mask function of transformers' table: None or an `IntervalMask` where an interval says it, else as "sdpa".

    None is given where "sdpa" gives it, and means the same: a module that is causal hides the keys after each query.
    """
    masking_utils: Any = sys.modules["transformers.masking_utils"]
    # Graphs hold no object of ours: while tracing we are "sdpa".
    if not positional and not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None:
        found = _interval(arguments, masking_utils)
        if found is not None:
            length_q, length_k = _length_q(arguments), arguments["kv_length"]
            band, padding = _biting(found, length_q, length_k), _padding(arguments, found)
            everything = found.band == _EVERYTHING or (length_q == 1 and band == _EVERYTHING)
            if padding is None and (everything or (length_q == length_k and band == Band(None, 0))):
                return None
            device = arguments["device"] if "device" in arguments else arguments["cache_position"].device
            mask = Interval(band, found.offset)
            return IntervalMask(mask, arguments["batch_size"], length_q, length_k, torch.device(device), padding)
    return masking_utils.sdpa_mask(*positional, **arguments)


def _length_q(arguments: dict[str, Any]) -> int:
    return arguments["q_length"] if "q_length" in arguments else arguments["cache_position"].shape[0]


def _interval(arguments: dict[str, Any], masking_utils: Any) -> Interval | None:
    """The interval that a call of the mask function asks for, or None where it asks for more, or for a tensor."""
    function = arguments.get("mask_function", masking_utils.causal_mask_function)
    may_skip = (
        arguments.get("allow_is_causal_skip", True)
        or arguments.get("allow_is_bidirectional_skip", False)
        or looks_for_packing(function, masking_utils)
    )
    if not may_skip or arguments.get("use_vmap", False):
        return None
    band = band_of(function, masking_utils)
    if band is None:
        return None
    length_q, length_k, first_k = _length_q(arguments), arguments["kv_length"], arguments.get("kv_offset", 0)
    if "q_offset" in arguments:
        first_q = int(arguments["q_offset"])
    elif length_q == length_k and first_k == 0:
        first_q = 0
    elif length_q == 1:
        first_q = first_k + length_k - 1  # Caches that are longer than what they hold do not allow to skip the mask.
    else:
        first_q = int(arguments["cache_position"][0])
    offset = first_q - first_k
    # Windows lie on the lower-right diagonal, or under the causal one.
    if offset != length_k - length_q and (offset != 0 or (band.right != 0 and band != _EVERYTHING)):
        return None
    padding = arguments.get("attention_mask")
    return Interval(band, offset) if padding is None or padding.dim() == 2 else None


def _padding(arguments: dict[str, Any], interval: Interval) -> Tensor | None:
    """The keys that are no padding, bool (B, Lk), or None where the interval hides those that are."""
    present = arguments.get("attention_mask")
    if present is None:
        return None
    length_k, first_k, right = arguments["kv_length"], arguments.get("kv_offset", 0), interval.band.right
    reached = length_k if right is None else min(length_k, interval.offset + _length_q(arguments) + right)
    present = present[:, first_k : first_k + length_k].bool()
    missing = length_k - present.shape[1]
    if length_k - missing >= reached and bool(present[:, :reached].all()):
        return None
    return torch.nn.functional.pad(present, (0, missing)) if missing else present


def _biting(interval: Interval, length_q: int, length_k: int) -> Band:
    """The band with the sides open that hide no key."""
    left, right = interval.band
    return Band(
        None if left is None or left >= interval.offset + length_q - 1 else left,
        None if right is None or right >= length_k - 1 - interval.offset else right,
    )


# Attention


class _Visible(NamedTuple):
    """The keys that each row sees: those of an interval that a mask admits as well. An additive one has no interval."""

    interval: Interval
    mask: Tensor | None

    def dense(self, length_q: int, length_k: int, device: torch.device) -> Tensor | None:
        """Both as one mask."""
        if self.interval.band == _EVERYTHING:
            return self.mask
        interval = self.interval.dense(length_q, length_k, device)[None, None]
        return interval if self.mask is None else interval & self.mask


class _Changes(NamedTuple):
    """What changes scores or weights besides the keys that are visible."""

    bias: Tensor | None
    softcap: float
    sinks: Tensor | None
    dropout: float


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of transformers' table.

    query (B, Hq, Lq, D), key and value (B, Hk, Lk, D and Dv), in any strides and not repeated over groups; returns
    ((B, Lq, Hq, Dv), None). Intervals, masks (bool or additive), dropout, softcap, sinks (`s_aux`) and `position_bias`
    run on our kernels, all at once if need be, with gradients of the last two as well; on the CPU a mask, dropout or
    position_bias goes to torch where that is expected to be faster. What no kernel covers (head dims over 256, other
    GPUs) goes to the function of "sdpa", or with softcap or sinks, which torch's attention does not know, to plain
    torch operations; so do the weights (B, Hq, Lq, Lk), returned with `output_attentions`; all after a warning once
    per reason (`set_fallback`). NotImplementedError for `head_mask`, and for sequence lengths without the mask that
    belongs to them.
    """
    _refuse(attention_mask, settings)
    beyond = _beyond_torch(settings)
    if torch.nn.functional.scaled_dot_product_attention is not _torch_attention:
        # torch's context parallelism does that: each process has a part of the sequence, which we do not see.
        if beyond:
            raise NotImplementedError(f"{beyond}, and torch's attention function has been replaced by another one")
        reason = "torch's attention function has been replaced by another one"
        dispatch.fell_back(reason)
        _announce(reason)
        return _sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **settings
        )
    lengths = query.shape[2], key.shape[2]
    visible = _visible(module, lengths, attention_mask, is_causal, settings.get("sliding_window"))
    softcap = float(settings.get("softcap") or 0.0)
    changes = _Changes(settings.get("position_bias"), softcap, settings.get("s_aux"), dropout)
    asks_for_weights = bool(settings.get("output_attentions"))
    reason = beyond if asks_for_weights else _missing(query, key, value)
    if not reason:
        output = _on_our_kernels(query, key, value, visible, changes, scaling)
        return output.transpose(1, 2).contiguous(), None
    dispatch.fell_back(reason)
    if beyond:
        if not torch.compiler.is_compiling():
            for watcher in functional.watchers:
                watcher.add(_FUNCTION, query, key, value, Plan(_FUNCTION, "torch", reason))
        plain, weights = _plain(query, key, value, visible.dense(*lengths, query.device), changes, scaling)
        return plain, weights if asks_for_weights else None
    _announce(reason)
    causal = visible.interval == Interval(Band(None, 0), 0) and visible.mask is None and changes.bias is None
    mask = None if causal else _with_bias(visible.dense(*lengths, query.device), changes.bias)
    return _sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal)


def _announce(reason: str) -> None:
    """Tells the open reports why the call of torch's function that follows is made."""
    if not torch.compiler.is_compiling():
        for watcher in functional.watchers:
            watcher.goes_to_torch(reason)


def _refuse(attention_mask: Tensor | None, settings: dict[str, Any]) -> None:
    if settings.get("head_mask") is not None:
        raise NotImplementedError('head_mask is given; allowed: None. Use attn_implementation="eager" for it')
    starts = settings.get("cu_seq_lens_q")
    if (
        starts is not None
        and starts.shape[0] > 2
        and (attention_mask is None or isinstance(attention_mask, IntervalMask))
    ):
        raise NotImplementedError(
            "cu_seq_lens_q is given without a mask that keeps the sequences apart; allowed: position_ids that start "
            "anew with each sequence, no attention_mask and no cache, from which transformers makes the mask"
        )


def _beyond_torch(settings: dict[str, Any]) -> str:
    """What the call asks for that torch's attention does not have, or the empty string."""
    if settings.get("output_attentions"):
        return "output_attentions asks for the weights, which no kernel has in memory"
    if settings.get("softcap"):
        return "softcap is not in torch's attention"
    return "s_aux (sinks) is not in torch's attention" if settings.get("s_aux") is not None else ""


def _missing(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Why no kernel of ours takes these operands, or the empty string."""
    for argument, operand in (("query", query), ("key", key), ("value", value)):
        if operand.is_nested or is_traceable_wrapper_subclass(operand):
            return f"{argument} is a {type(operand).__name__}"
    if call.has_tangent(query, key, value):
        return "forward-mode AD has no kernel"
    head_dim, value_dim = query.shape[3], value.shape[3]
    if max(head_dim, value_dim) > checks.MAX_HEAD_DIM:
        return f"head dims ({head_dim}, {value_dim}); the kernels take 1 to {checks.MAX_HEAD_DIM}"
    (query,) = call.autocast(query)
    return dispatch.machine_missing(query.device, query.dtype)


def _visible(
    module: Any, lengths: tuple[int, int], attention_mask: Tensor | None, is_causal: bool | None, window: int | None
) -> _Visible:
    length_q, length_k = lengths
    if attention_mask is None:
        return _Visible(_without_mask(module, length_q, length_k, is_causal, window), None)
    if isinstance(attention_mask, IntervalMask):
        if attention_mask.shape[2:] == (length_q, length_k):
            padding = attention_mask.padding
            return _Visible(attention_mask.interval, None if padding is None else padding[:, None, None])
        attention_mask = attention_mask.dense()
    if attention_mask.dim() == 4 and attention_mask.shape[3] != length_k:
        # A mask for a cache that is longer than what it holds.
        attention_mask = attention_mask[..., :length_k]
    return _Visible(Interval(_EVERYTHING, 0), attention_mask)


def _without_mask(module: Any, length_q: int, length_k: int, is_causal: bool | None, window: int | None) -> Interval:
    """What no mask means: the rule of transformers' "sdpa", and the window of its flash implementations."""
    causal = length_q > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if window is None or length_k <= window:
        return Interval(Band(None, 0 if causal else None), 0)
    if length_q > 1 and not causal:
        raise NotImplementedError(
            f"sliding_window is {window} without a mask in a module that is not causal; allowed: None, or the mask "
            "that transformers makes for the window"
        )
    return Interval(Band(window - 1, 0), length_k - length_q)


def _on_our_kernels(
    query: Tensor, key: Tensor, value: Tensor, visible: _Visible, changes: _Changes, scaling: float | None
) -> Tensor:
    """(B, Hq, Lq, Dv) from our kernels, or on the CPU from torch where that is expected to be faster."""
    ((left, right), offset), mask = visible
    length_q, length_k, grouped = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    beyond_torch = changes.softcap > 0.0 or changes.sinks is not None
    plain = mask is None and changes.bias is None and not beyond_torch
    if plain and left is None and (right is None or (right == 0 and offset == 0)):
        causal = right == 0
        if causal and length_k > length_q:
            key, value = key[:, :, :length_q], value[:, :, :length_q]
        return functional.scaled_dot_product_attention(
            query, key, value, None, changes.dropout, causal, scale=scaling, enable_gqa=grouped
        )
    if (
        not beyond_torch
        and not (plain and changes.dropout == 0.0)
        and _torch_is_faster(query, key, value, mask, changes)
    ):
        dense = _with_bias(visible.dense(length_q, length_k, query.device), changes.bias)
        return functional.scaled_dot_product_attention(
            query, key, value, dense, changes.dropout, scale=scaling, enable_gqa=grouped
        )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        batch = max(query.shape[0], key.shape[0], value.shape[0])
        query, key, value = (operand.expand(batch, -1, -1, -1) for operand in (query, key, value))
    bias, sinks = changes.bias, changes.sinks
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, _with_bias(mask, bias)
    (cast,) = call.autocast(query)
    if bias is not None and bias.dtype not in (torch.float32, cast.dtype):
        bias = bias.float()
    if sinks is not None:
        sinks = sinks.reshape(-1) if sinks.dtype in (torch.float32, cast.dtype) else sinks.reshape(-1).float()
    lower_right = offset == length_k - length_q
    output = functional.attention(
        query,
        key,
        value,
        causal=None if right != 0 else "lower_right" if lower_right else "upper_left",
        window=(left, None if right == 0 else right),
        mask=mask,
        bias=bias,
        softcap=changes.softcap,
        sinks=sinks,
        dropout_p=changes.dropout,
        scale=scaling,
    )
    assert isinstance(output, Tensor)
    return output


def _torch_is_faster(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, changes: _Changes) -> bool:
    """Whether a call with a mask, a bias or dropout goes to torch, as one of the drop-in would."""
    if query.device.type == "cuda":
        added = mask if changes.bias is None else changes.bias
        return dispatch.gpu_prefers_torch(query, key, value, added, changes.dropout)
    if query.device.type != "cpu" or torch.compiler.is_compiling() or ops.checking():
        return False
    return dispatch.cpu_prefers_torch(query, key, value, 0, True)


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask and a bias as one additive mask, hidden keys at the lowest finite number as in transformers' "sdpa"."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    changes: _Changes,
    scaling: float | None,
) -> tuple[Tensor, Tensor]:
    """(B, Lq, Hq, Dv) and the weights in plain torch operations, the logits in float32 as in eager attention."""
    bias, softcap, sinks, dropout = changes
    heads_k = key.shape[1]
    grouped = query.unflatten(1, (heads_k, query.shape[1] // heads_k))
    logits = torch.matmul(grouped, key.unsqueeze(2).transpose(3, 4)).flatten(1, 2).float()
    logits = logits * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        # The lowest finite number, as in eager attention: a row of nothing but padding must not become NaN.
        lowest = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~mask, lowest) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        sink = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sink], dim=3).softmax(dim=3)[..., :-1]
    else:
        weights = logits.softmax(dim=3)
    weights = torch.nn.functional.dropout(weights.to(value.dtype), dropout)
    output = torch.matmul(weights.unflatten(1, (heads_k, -1)), value.unsqueeze(2)).flatten(1, 2)
    return output.transpose(1, 2).contiguous(), weights
