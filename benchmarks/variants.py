"""Whose attention a whole model runs on: torch's, ours in its two ways of use, FlashAttention-3's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .peers import OURS, Unavailable, first, require, torch_version, version_of

TORCH = "torch"
ENABLED = f"{OURS} enable()"


class Attend:
    """The attention of a network: query (B, Hq, L, D), key and value (B, Hk, L, D), views of (B, L, H, D), to
    (B, Hq, L, D). `function` is exchanged between measurements; it has the signature of torch's."""

    def __init__(self) -> None:
        self.function: Callable[..., Tensor] = F.scaled_dot_product_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
        return self.function(query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1])


@dataclass(frozen=True)
class Variant:
    """An attention function, and the context that it runs in."""

    name: str
    version: str
    function: Callable[..., Tensor]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    @contextmanager
    def inside(self, attend: Attend) -> Iterator[None]:
        """The network's attention is this one while the context lasts."""
        before, attend.function = attend.function, self.function
        try:
            with self.context():
                yield
        finally:
            attend.function = before


def load_torch() -> Variant:
    return Variant(TORCH, torch_version(TORCH), F.scaled_dot_product_attention)


def load_ours() -> Variant:
    """The drop-in called by the network: our forward and backward kernels."""
    module = require("kittens_torch")
    return Variant(OURS, module.build_info()["version"], module.scaled_dot_product_attention)


def load_enabled() -> Variant:
    """torch's function turned over to us: our forward kernel, torch's backward kernel."""
    module = require("kittens_torch")
    return Variant(ENABLED, module.build_info()["version"], F.scaled_dot_product_attention, module.enabled)


def load_fa3() -> Variant:
    module = require("flash_attn_interface")
    if not torch.cuda.is_available():
        raise Unavailable("needs a CUDA device")

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
        operands = (operand.transpose(1, 2) for operand in (query, key, value))
        return first(module.flash_attn_func(*operands, causal=is_causal)).transpose(1, 2)

    return Variant("fa3", version_of(module, "flash_attn_3", "flash-attn-3"), attention)


LOADERS: dict[str, Callable[[], Variant]] = {
    TORCH: load_torch,
    OURS: load_ours,
    ENABLED: load_enabled,
    "fa3": load_fa3,
}


def load_all() -> tuple[list[Variant], dict[str, str]]:
    """The variants that can run here, and the reason for each that cannot."""
    variants, missing = [], {}
    for name, loader in LOADERS.items():
        try:
            variants.append(loader())
        except Unavailable as error:
            missing[name] = str(error)
    return variants, missing
