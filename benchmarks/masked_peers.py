"""Who is measured on the rows of the preset `masks`, and how each says what a row asks for.

Ours is called as users call it: torch's signature where that can say the row, `kittens_torch.attention` else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .masks import MaskedShape, document_ids
from .modifiers import Modifiers
from .peers import (
    OURS,
    Peer,
    first,
    half_on_cuda,
    require,
    torch_version,
    version_of,
)
from .presets import Shape

# Features that torch's signature can say; the others need a signature of their own.
SAYABLE = ("mask", "bias", "dropout")
# torch's math backend holds several copies of all scores; with more of them it only costs time.
MATH_SCORES = 1 << 28


@dataclass(frozen=True)
class MaskedPeer(Peer):
    """A peer whose ``attention`` also takes the row's modifiers: (query, key, value, shape, modifiers) to output."""

    def call(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers) -> Tensor:
        return self.attention(query, key, value, shape, modifiers)


def features_of(shape: Shape) -> tuple[str, ...]:
    return shape.features if isinstance(shape, MaskedShape) else ()


def refusal(shape: Shape, takes: tuple[str, ...]) -> str | None:
    """The first feature of the row that is not among those a peer takes, as a reason."""
    missing = [feature for feature in features_of(shape) if feature not in takes]
    return f"has no argument for {missing[0]}" if missing else None


def drop_in(
    function: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers
) -> Tensor:
    """A function with torch's signature on a row that this signature can say."""
    return function(
        query,
        key,
        value,
        attn_mask=modifiers.bias if modifiers.mask is None else modifiers.mask,
        dropout_p=modifiers.dropout_p,
        is_causal=shape.causal,
        scale=shape.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def own_signature(
    function: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers
) -> Tensor:
    """`kittens_torch.attention`, which can say every row."""
    return function(
        query,
        key,
        value,
        causal="upper_left" if shape.causal else None,
        window=modifiers.window,
        mask=modifiers.mask,
        bias=modifiers.bias,
        softcap=modifiers.softcap,
        alibi_slopes=modifiers.alibi_slopes,
        sinks=modifiers.sinks,
        dropout_p=modifiers.dropout_p,
        scale=shape.scale,
    )


def load_kittens() -> Peer:
    module = require("kittens_torch")
    module.set_fallback("error")  # a call that torch would answer must not be timed as ours

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers) -> Tensor:
        # On a CPU the drop-in leaves calls to torch that torch runs faster.
        if query.is_cuda and refusal(shape, SAYABLE) is None:
            return drop_in(module.scaled_dot_product_attention, query, key, value, shape, modifiers)
        return own_signature(module.attention, query, key, value, shape, modifiers)

    return MaskedPeer(OURS, module.build_info()["version"], attention)


def sdpa_peer(name: str, backend: SDPBackend | None) -> Peer:
    """F.scaled_dot_product_attention held to one backend, or with that of torch's choice."""

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers) -> Tensor:
        if backend is None:
            return drop_in(F.scaled_dot_product_attention, query, key, value, shape, modifiers)
        if backend == SDPBackend.EFFICIENT_ATTENTION and key.shape[1] != query.shape[1]:
            # It takes no groups; models repeat the heads for it.
            group = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
        with sdpa_kernel([backend]):
            return drop_in(F.scaled_dot_product_attention, query, key, value, shape, modifiers)

    def unsupported(shape: Shape, device: torch.device, direction: str) -> str | None:
        if name in ("cudnn", "efficient") and device.type != "cuda":
            return "needs a CUDA device"
        scores = shape.batch * shape.heads * shape.length_q * shape.length_k
        if name == "math" and scores > MATH_SCORES:
            return f"would hold {MATH_SCORES / 2**30:.2f} Gi scores or more in memory, several times"
        return refusal(shape, SAYABLE)

    return MaskedPeer(name, torch_version(name), attention, unsupported=unsupported)


def load_fa3() -> Peer:
    """FlashAttention-3, with its local window and its soft cap where its build has them."""
    module = require("flash_attn_interface")

    def attention(query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers) -> Tensor:
        options: dict[str, Any] = {}
        if modifiers.window is not None:
            options["window_size"] = modifiers.window
        if modifiers.softcap:
            options["softcap"] = modifiers.softcap
        return first(
            module.flash_attn_func(query, key, value, softmax_scale=shape.scale, causal=shape.causal, **options)
        )

    def unsupported(shape: Shape, device: torch.device, direction: str) -> str | None:
        return half_on_cuda(shape, device, direction) or refusal(shape, ("window", "soft cap"))

    version = version_of(module, "flash_attn_3", "flash-attn-3")
    return MaskedPeer("fa3", version, attention, layout="BLHD", unsupported=unsupported)


Compile = Callable[..., Callable[..., Tensor]]


class FlexAttention:
    """torch's FlexAttention, compiled for each row; its BlockMask is made once, outside what is timed."""

    def __init__(self, module: Any, compile_function: Compile = torch.compile) -> None:
        self.module, self.compile = module, compile_function
        self.prepared: tuple[Modifiers, Callable[..., Tensor]] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape, modifiers: Modifiers) -> Tensor:
        if self.prepared is None or self.prepared[0] is not modifiers:
            self.prepared = modifiers, self.prepare(shape, modifiers, query.device)
        return self.prepared[1](query, key, value)

    def prepare(self, shape: Shape, modifiers: Modifiers, device: torch.device) -> Callable[..., Tensor]:
        mask_mod, block_mask = flex_mask(shape, modifiers, device), None
        if mask_mod is not None:
            block_mask = self.module.create_block_mask(
                mask_mod, None, None, shape.length_q, shape.length_k, device=device
            )
        functorch_config.donated_buffer = False  # or a compiled backward pass can run once only
        torch.compiler.reset()  # the rows before count against the number of compilations of one function
        compiled = self.compile(self.module.flex_attention, dynamic=False)
        options = {
            "score_mod": flex_score(modifiers),
            "block_mask": block_mask,
            "scale": shape.scale,
            "enable_gqa": shape.heads != shape.heads_k,
        }
        return lambda query, key, value: compiled(query, key, value, **options)


def flex_mask(shape: Shape, modifiers: Modifiers, device: torch.device) -> Callable[..., Tensor] | None:
    """The row's mask as FlexAttention takes it: (batch, head, row, key) to visible."""

    def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    if isinstance(shape, MaskedShape) and shape.mask == "documents":
        ids = document_ids(shape, device)

        def documents(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (row >= key) & (ids[row] == ids[key])

        return documents
    if modifiers.window is not None:
        left, right = modifiers.window

        def local(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return (key >= row - left) & (key <= row + right)

        return local
    return causal if shape.causal else None


def flex_score(modifiers: Modifiers) -> Callable[..., Tensor] | None:
    """The row's change of the scores as FlexAttention takes it: (score, batch, head, row, key) to score."""
    bias, slopes, softcap = modifiers.bias, modifiers.alibi_slopes, modifiers.softcap
    if bias is not None:

        def biased(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return score + bias[0, 0, row, key]

        return biased
    if slopes is not None:

        def alibi(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return score - slopes[head] * (row - key).abs()

        return alibi
    if softcap:

        def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        return capped
    return None


def load_flex() -> Peer:
    module = require("torch.nn.attention.flex_attention")

    def unsupported(shape: Shape, device: torch.device, direction: str) -> str | None:
        if device.type != "cuda":
            return "needs a CUDA device"
        reason = refusal(shape, ("mask", "bias", "window", "soft cap", "ALiBi"))
        if reason is None and isinstance(shape, MaskedShape) and not shape.compiled:
            return "left out of this row, which its compilation would outlast"
        return reason

    return MaskedPeer("flex", torch_version("flex"), FlexAttention(module), unsupported=unsupported)


LOADERS: dict[str, Callable[[], Peer]] = {
    OURS: load_kittens,
    "torch": lambda: sdpa_peer("torch", None),
    "cudnn": lambda: sdpa_peer("cudnn", SDPBackend.CUDNN_ATTENTION),
    "fa2": lambda: sdpa_peer("fa2", SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: sdpa_peer("efficient", SDPBackend.EFFICIENT_ATTENTION),
    "math": lambda: sdpa_peer("math", SDPBackend.MATH),
    "fa3": load_fa3,
    "flex": load_flex,
}
