"""Hugging Face diffusers: `model.set_attention_backend("kittens")` and `with attention_backend("kittens")`.

The transformers of diffusers (Flux, Wan, Qwen-Image, ...) hand every attention to a dispatcher that knows its backends
by the members of an enumeration. It has no entry for other packages, so the member is added here. Models whose
attention processors call torch's function themselves (the UNets, Stable Diffusion 3) never ask the dispatcher:
`kittens_torch.enable()` is for these, and covers the others as well.
"""

# mypy: allow-untyped-calls, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch
from torch import Tensor

from .. import functional
from .loading import when_loaded

NAME = "kittens"
OLDEST = (0, 35)
_DISPATCHER = "diffusers.models.attention_dispatch"
_torch_attention = torch.nn.functional.scaled_dot_product_attention
# The dispatcher's own way to torch.
_native: Any = None


def register() -> None:
    """Adds "kittens" to the attention backends of diffusers (0.35 or newer).

    Then `model.set_attention_backend("kittens")`, `model.transformer.set_attention_backend("kittens")` for a pipeline,
    and `with diffusers.attention_backend("kittens")` work. Importing kittens_torch does this by itself as soon as
    diffusers has loaded its dispatcher, in whatever order the two are imported; calling it again changes nothing.
    ImportError where diffusers is missing, older, or has another dispatcher.
    """
    global _native
    version = importlib.import_module("diffusers").__version__
    advice = "kittens_torch.enable() needs no entry in diffusers"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(f"kittens_torch needs diffusers >= {OLDEST[0]}.{OLDEST[1]}, found {version}; {advice}")
    dispatcher = importlib.import_module(_DISPATCHER)
    try:
        names, registry = dispatcher.AttentionBackendName, dispatcher._AttentionBackendRegistry
        native = registry._backends[names.NATIVE]
        checks = [dispatcher._check_device, dispatcher._check_shape]
        registry.register(_member(names), constraints=checks)(attention_backend)
    except AttributeError as error:
        raise ImportError(f"the dispatcher of diffusers {version} has changed ({error}); {advice}") from error
    _native = native


def _member(names: Any) -> Any:
    """Our member of the enumeration of backends, made as `enum` makes those of its class body."""
    if NAME in names._value2member_map_:
        return names(NAME)
    member = str.__new__(names, NAME)
    member._name_, member._value_, member.__objclass__ = NAME.upper(), NAME, names
    type.__setattr__(names, NAME.upper(), member)
    names._member_names_.append(NAME.upper())
    names._member_map_[NAME.upper()] = names._value2member_map_[NAME] = member
    return member


def _register_where_possible() -> None:
    # Where it fails diffusers itself says that it knows no "kittens", and `register` says why.
    with contextlib.suppress(ImportError):
        register()


def register_when_loaded() -> None:
    """`register`, now if diffusers has loaded its dispatcher, else when it does. Imports nothing."""
    when_loaded(_DISPATCHER, _register_where_possible)


def attention_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The backend: query (B, Lq, Hq, D), key and value (B, Lk, Hk, D and Dv), in any strides; returns (B, Lq, Hq, Dv).

    attn_mask: of two dims (B, Lk), or what broadcasts to (B, Hq, Lq, Lk); bool (True = visible) or additive. Goes where
    `kittens_torch.scaled_dot_product_attention` goes: a call that no kernel covers to torch, after a warning once per
    reason (`set_fallback`). NotImplementedError for `return_lse` and for diffusers' context parallelism.
    """
    if return_lse:
        raise NotImplementedError('return_lse is True; allowed: False with the attention backend "kittens"')
    if _parallel_config is not None:
        raise NotImplementedError(
            'the attention backend "kittens" has no context parallelism; allowed: a model without enable_parallelism, '
            "or another backend"
        )
    if torch.nn.functional.scaled_dot_product_attention is not _torch_attention:
        # torch's context parallelism does that: each process has a part of the sequence, which we do not see.
        return _native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    query, key, value = (operand.transpose(1, 2) for operand in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output.transpose(1, 2)
