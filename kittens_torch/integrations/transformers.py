"""Hugging Face transformers: `attn_implementation="kittens"`.

transformers keeps two tables by the same name, of attention functions and of functions that make their masks. Our mask
function leaves causal, sliding-window and full attention an interval, which our kernels take as such; whatever else a
model masks (padding, packed sequences, images in text) becomes the dense mask that "sdpa" would get.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from .. import call, checks, dispatch, functional
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
            band = _biting(found, length_q, length_k)
            everything = found.band == Band(None, None) or (length_q == 1 and band == Band(None, None))
            if everything or (length_q == length_k and band == Band(None, 0)):
                return None
            device = arguments["device"] if "device" in arguments else arguments["cache_position"].device
            mask = Interval(band, found.offset)
            return IntervalMask(mask, arguments["batch_size"], length_q, length_k, torch.device(device))
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
    lower_right = offset == length_k - length_q
    if not lower_right and (offset != 0 or (band.right is None and band.left is not None)):
        return None
    padding = arguments.get("attention_mask")
    if padding is not None:
        reached = length_k if band.right is None else min(length_k, offset + length_q + band.right)
        words = padding[:, first_k : first_k + reached]
        if padding.dim() != 2 or words.shape[1] != reached or not bool(words.all()):
            return None
    return Interval(band, offset)


def _biting(interval: Interval, length_q: int, length_k: int) -> Band:
    """The band with the sides open that hide no key."""
    left, right = interval.band
    return Band(
        None if left is None or left >= interval.offset + length_q - 1 else left,
        None if right is None or right >= length_k - 1 - interval.offset else right,
    )


# Attention


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
    ((B, Lq, Hq, Dv), None). Intervals run on our kernels. What has no kernel yet (dense masks, dropout, the biases of
    T5) goes to the function of "sdpa"; softcap and sinks, which torch's attention does not know, are computed in plain
    torch operations, and so are the weights (B, Hq, Lq, Lk), returned with `output_attentions`; all after a warning
    once per reason (`set_fallback`). NotImplementedError for `head_mask`, and for sequence lengths without the mask
    that belongs to them.
    """
    _refuse(attention_mask, settings)
    if isinstance(attention_mask, IntervalMask) and attention_mask.shape[2:] == (query.shape[2], key.shape[2]):
        interval: Interval | None = attention_mask.interval
    elif attention_mask is None:
        interval = _without_mask(module, query, key, is_causal, settings.get("sliding_window"))
    else:
        interval = None

    def dense() -> Tensor | None:
        if interval is not None:
            return interval.dense(query.shape[2], key.shape[2], query.device)[None, None]
        mask = attention_mask.dense() if isinstance(attention_mask, IntervalMask) else attention_mask
        # A mask for a cache that is longer than what it holds.
        return mask[..., : key.shape[2]] if mask is not None and mask.dim() == 4 else mask

    grouped = query.shape[1] != key.shape[1]
    mask = None
    replaced = torch.nn.functional.scaled_dot_product_attention is not _torch_attention
    reason = _beyond_torch(settings)
    if reason and replaced:
        raise NotImplementedError(f"{reason}, and torch's attention function has been replaced by another one")
    if reason:
        dispatch.fell_back(reason)
        if not torch.compiler.is_compiling():
            for watcher in functional.watchers:
                watcher.add(_FUNCTION, query, key, value, Plan(_FUNCTION, "torch", reason))
        plain, weights = _plain(query, key, value, dense(), dropout, scaling, settings)
        return plain, weights if settings.get("output_attentions") else None
    if replaced:
        # torch's context parallelism does that: each process has a part of the sequence, which we do not see.
        reason, mask = "torch's attention function has been replaced by another one", attention_mask
    elif settings.get("position_bias") is not None:
        reason, mask = "position_bias has no kernel yet", dense()
    elif interval is not None:
        output = _on_interval(query, key, value, interval, dropout, scaling)
        if isinstance(output, Tensor):
            return output.transpose(1, 2).contiguous(), None
        reason, mask = output, dense()
    else:
        mask = dense()
        operands = call.of_drop_in(query, key, value, mask, dropout, False, scaling, grouped)
        if not isinstance(operands, call.Fallback):
            output = functional.scaled_dot_product_attention(
                query, key, value, mask, dropout, scale=scaling, enable_gqa=grouped
            )
            return output.transpose(1, 2).contiguous(), None
        reason = operands.reason
    dispatch.fell_back(reason)
    if not torch.compiler.is_compiling():
        for watcher in functional.watchers:
            watcher.goes_to_torch(reason)
    return _sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **settings)


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
    """What the call asks for that torch's attention does not have either, or the empty string."""
    if settings.get("output_attentions"):
        return "output_attentions asks for the weights, which no kernel has in memory"
    if settings.get("softcap"):
        return "softcap has no kernel yet"
    return "s_aux (sinks) has no kernel yet" if settings.get("s_aux") is not None else ""


def _without_mask(module: Any, query: Tensor, key: Tensor, is_causal: bool | None, window: int | None) -> Interval:
    """What no mask means: the rule of transformers' "sdpa", and the window of its flash implementations."""
    length_q, length_k = query.shape[2], key.shape[2]
    causal = length_q > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if window is None or length_k <= window:
        return Interval(Band(None, 0 if causal else None), 0)
    if length_q > 1 and not causal:
        raise NotImplementedError(
            f"sliding_window is {window} without a mask in a module that is not causal; allowed: None, or the mask "
            "that transformers makes for the window"
        )
    return Interval(Band(window - 1, 0), length_k - length_q)


def _on_interval(
    query: Tensor, key: Tensor, value: Tensor, interval: Interval, dropout: float, scaling: float | None
) -> Tensor | str:
    """(B, Hq, Lq, Dv) from our kernels, or the reason why they cannot."""
    (left, right), length_q, length_k = interval.band, query.shape[2], key.shape[2]
    if left is None and (right is None or (right == 0 and interval.offset == 0)):
        causal = right == 0
        if causal and length_k > length_q:
            key, value = key[:, :, :length_q], value[:, :, :length_q]
        return functional.scaled_dot_product_attention(
            query, key, value, None, dropout, causal, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    query, key, value = call.autocast(query, key, value)
    reason = dispatch.machine_missing(query.device, query.dtype)
    if dropout > 0.0:
        reason = "dropout_p has no kernel yet"
    elif max(query.shape[3], value.shape[3]) > checks.MAX_HEAD_DIM:
        reason = f"head dims ({query.shape[3]}, {value.shape[3]}); the kernels take 1 to {checks.MAX_HEAD_DIM}"
    if reason:
        return reason
    lower_right = interval.offset == length_k - length_q
    causal_at = None if right != 0 else "lower_right" if lower_right else "upper_left"
    window = (left, None if right == 0 else right)
    output = functional.attention(query, key, value, causal=causal_at, window=window, scale=scaling)
    assert isinstance(output, Tensor)
    return output


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    settings: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """(B, Lq, Hq, Dv) and the weights in plain torch operations, the logits in float32 as in eager attention."""
    softcap, sinks, bias = (settings.get(name) for name in ("softcap", "s_aux", "position_bias"))
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
