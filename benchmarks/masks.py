"""The preset `masks`: everything that hides keys, changes scores or drops weights, as models use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .modifiers import Modifiers
from .presets import Preset, Shape, length_label

# Batch, heads, heads_k, length_q, length_k, head_dim, value_dim: the order of Shape's arguments.
Sizes = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class MaskedShape(Shape):
    """A shape with modifiers, and the call of ours it is set against.

    Attributes:
        mask: a key of MASKS, or "" for none. A mask that hides the future holds that in itself, so ``causal`` is False.
        documents: in one sequence, for the mask of that name.
        bias: "heads" (1, H, Lq, Lk), with its gradient; "dense" (1, 1, Lq, Lk), random numbers; or "".
        own: the plain call that ours is set against, or None. Its time counts in proportion to the visible pairs.
        compiled: whether the row is worth the seconds that a compiled peer takes to compile it.
    """

    mask: str = ""
    documents: int = 1
    bias: str = ""
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    own: Shape | None = None
    compiled: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """What the row asks of a peer, in words."""
        found = {
            "mask": self.mask,
            "bias": self.bias,
            "window": self.window,
            "soft cap": self.softcap,
            "ALiBi": self.alibi,
            "sinks": self.sinks,
            "dropout": self.dropout_p,
        }
        return tuple(name for name, value in found.items() if value)

    @property
    def visible_share(self) -> float:
        if self.mask:
            return MASKS[self.mask].share(self)
        if self.window is not None:
            width = min(self.window[0] + 1, self.length_q)
            return (width * self.length_q - width * (width - 1) / 2) / (self.length_q * self.length_k)
        return super().visible_share

    @property
    def own_work(self) -> float:
        """Visible pairs of this row over those of its own reference."""
        return self.pairs / self.own.pairs if self.own else 1.0

    def make_modifiers(self, device: torch.device, generator: torch.Generator) -> Modifiers:
        size = {
            "heads": (1, self.heads, self.length_q, self.length_k),
            "dense": (1, 1, self.length_q, self.length_k),
        }.get(self.bias)
        return Modifiers(
            mask=MASKS[self.mask].make(self, device) if self.mask else None,
            bias=torch.randn(size, dtype=self.dtype, device=device, generator=generator) if size else None,
            bias_gradient=self.bias == "heads",
            window=self.window,
            softcap=self.softcap,
            alibi_slopes=slopes(self.heads, device) if self.alibi else None,
            sinks=torch.randn(self.heads, device=device, generator=generator) if self.sinks else None,
            dropout_p=self.dropout_p,
        )


@dataclass(frozen=True)
class Mask:
    """A bool mask by name: how it is made, and the share of all pairs that it shows (causal counts half)."""

    make: Callable[[MaskedShape, torch.device], Tensor]
    share: Callable[[MaskedShape], float]


def document_ids(shape: MaskedShape, device: torch.device) -> Tensor:
    """(L): the document of each position; all are equally long."""
    return torch.arange(shape.length_q, device=device) // (shape.length_q // shape.documents)


def document_mask(shape: MaskedShape, device: torch.device) -> Tensor:
    """(1, 1, L, L): a position sees itself and what is before it in its document."""
    ids = document_ids(shape, device)
    return (ids[:, None] == ids).tril_()[None, None]


def key_padding_mask(shape: MaskedShape, device: torch.device) -> Tensor:
    """(B, 1, 1, Lk): the second half of the keys is padding."""
    shown = torch.arange(shape.length_k, device=device) < shape.length_k // 2
    return shown.expand(shape.batch, 1, 1, -1).contiguous()


def left_padding(shape: MaskedShape) -> list[int]:
    """Padding in front of each prompt of a batch: none for the longest, nearly half for the shortest."""
    return [batch * shape.length_k // (2 * shape.batch) for batch in range(shape.batch)]


def left_padding_mask(shape: MaskedShape, device: torch.device) -> Tensor:
    """(B, 1, L, L): causal, without the padding in front; the rows of the padding see nothing."""
    position = torch.arange(shape.length_k, device=device)
    padding = torch.tensor(left_padding(shape), device=device)
    causal = position[:, None] >= position
    return (causal & (position >= padding[:, None, None]))[:, None]


def left_padding_share(shape: MaskedShape) -> float:
    lengths = [shape.length_k - padding for padding in left_padding(shape)]
    return 0.5 * sum(length**2 for length in lengths) / (shape.batch * shape.length_k**2)


MASKS = {
    "documents": Mask(document_mask, lambda shape: 0.5 / shape.documents),
    "key padding": Mask(key_padding_mask, lambda shape: shape.length_k // 2 / shape.length_k),
    "left padding": Mask(left_padding_mask, left_padding_share),
}


def slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi's slopes, 2^(-8 h / H) for h = 1 ... H (Press et al., Train Short, Test Long)."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)], device=device)


def masks(divisor: int = 1) -> Preset:
    """16384 tokens in every row. With a ``divisor``, for a CPU, lengths and window shrink and there are fewer heads."""
    long, middle, prompt, short = (length // divisor for length in (16384, 4096, 2048, 512))
    window = 1024 // divisor

    def sizes(batch: int, heads: int, heads_k: int, length: int, head_dim: int) -> Sizes:
        if divisor > 1:
            batch, heads, heads_k = max(1, batch // 2), heads // 4, heads_k // 4
        return batch, heads, heads_k, length, length, head_dim, head_dim

    one = sizes(1, 16, 16, long, 128)
    batch = sizes(4, 16, 16, middle, 128)
    encoder = sizes(4, 12, 12, middle, 64)
    t5 = sizes(32, 12, 12, short, 64)
    grouped = sizes(8, 32, 8, prompt, 128)
    with_sinks = sizes(4, 64, 8, middle, 64)
    each_document = Shape("each document alone", 8, *one[1:3], long // 8, long // 8, *one[5:], causal=True)
    unpadded = Shape("unpadded half", *encoder[:4], middle // 2, *encoder[5:])
    full, causal = Shape("full", *batch), Shape("causal", *batch, causal=True)
    in_long, in_middle, in_prompt = (f"in {length_label(length)}" for length in (long, middle, prompt))
    shapes = (
        MaskedShape(
            f"8 documents {in_long}", *one, mask="documents", documents=8, own=each_document, compiled=True
        ),
        MaskedShape(f"half of the keys padding {in_middle}", *encoder, mask="key padding", own=unpadded),
        MaskedShape(
            f"window {window} {in_long}", *one, window=(window - 1, 0), own=Shape("causal", *one, causal=True),
            compiled=True,
        ),
        MaskedShape(f"T5 bias {length_label(short)}", *t5, bias="heads", own=Shape("full", *t5)),
        MaskedShape(f"dense mask {in_middle}", *batch, bias="dense", own=full, compiled=True),
        MaskedShape(f"dropout hd128 causal {in_middle}", *batch, causal=True, dropout_p=0.1, own=causal),
        MaskedShape(f"dropout hd64 full {in_middle}", *encoder, dropout_p=0.1, own=Shape("full", *encoder)),
        MaskedShape(  # with a scale that brings scores near the cap, or nobody would see whether it is applied
            f"soft cap {in_middle}", *batch, causal=True, scale=0.5, softcap=50.0,
            own=Shape("causal", *batch, causal=True, scale=0.5), compiled=True,
        ),
        MaskedShape(f"ALiBi {in_middle}", *batch, causal=True, alibi=True, own=causal, compiled=True),
        MaskedShape(
            f"sinks 64/8 heads {in_middle}", *with_sinks, causal=True, sinks=True,
            own=Shape("causal", *with_sinks, causal=True),
        ),
        MaskedShape(
            f"left padding 32/8 heads {in_prompt}", *grouped, mask="left padding",
            own=Shape("causal", *grouped, causal=True),
        ),
    )  # fmt: skip
    if divisor > 1:
        return Preset("masks-small", shapes, unit="us", device="cpu")
    return Preset("masks", shapes, unit="us")


PRESETS: dict[str, Callable[[], Preset]] = {
    "masks": masks,
    "masks-small": lambda: masks(64),
}
