"""The shapes that are measured, grouped into presets."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .modifiers import NO_MODIFIERS, Modifiers

MODELS_FILE = Path(__file__).with_name("models.csv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Below this much work a call is shorter than its launch from Python, so that only a graph shows the GPU's time.
GRAPH_BELOW_FLOPS = 20e9
MAXIMUM_HEAD_DIM = 256


@dataclass(frozen=True)
class Shape:
    """One attention problem: query (batch, heads, length_q, head_dim), key and value (batch, heads_k, length_k, .)."""

    name: str
    batch: int
    heads: int
    heads_k: int
    length_q: int
    length_k: int
    head_dim: int
    value_dim: int
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    graph: bool = False  # timed by replaying a CUDA graph
    cold: bool = False  # key and value come from memory, not from the second-level cache, as in a real decoding step
    training: bool = True  # False: nobody computes gradients at this shape

    def __post_init__(self) -> None:
        if self.causal and self.length_q != self.length_k:
            raise ValueError(f"shape {self.name!r}: causal shapes are square here, got {self.length_q}x{self.length_k}")
        if self.heads % self.heads_k:
            raise ValueError(f"shape {self.name!r}: heads {self.heads} must be a multiple of heads_k {self.heads_k}")

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def visible_share(self) -> float:
        """Of all pairs of a query row and a key, those that attend; causal counts half."""
        return 0.5 if self.causal else 1.0

    @property
    def pairs(self) -> float:
        """Pairs of a query row and a visible key, over all heads."""
        return self.batch * self.heads * self.length_q * self.length_k * self.visible_share

    def make_modifiers(self, device: torch.device, generator: torch.Generator) -> Modifiers:
        """What a row does to the scores besides; a plain shape does nothing."""
        return NO_MODIFIERS

    def flops(self, direction: str) -> float:
        """Multiplications and additions of the products: two forward, five backward, for each visible pair."""
        if direction == "fwd":
            return 2 * self.pairs * (self.head_dim + self.value_dim)
        return 2 * self.pairs * (3 * self.head_dim + 2 * self.value_dim)

    def bytes(self, direction: str) -> float:
        """The fewest bytes through memory: every input read once, every output written once."""
        query = self.batch * self.heads * self.length_q * self.head_dim
        output = self.batch * self.heads * self.length_q * self.value_dim
        key_value = self.batch * self.heads_k * self.length_k * (self.head_dim + self.value_dim)
        forward = (query + output + key_value) * self.dtype.itemsize
        return forward if direction == "fwd" else 2 * forward  # the four again, with their gradients


@dataclass(frozen=True)
class Preset:
    """A named list of shapes. ``skipped`` names the rows that are listed but not measured, with the reason."""

    name: str
    shapes: tuple[Shape, ...]
    unit: str = "TFLOP/s"  # what the table shows: TFLOP/s, GFLOP/s or us
    device: str = "cuda"  # what its sizes are made for
    by_length: bool = False  # the rows are series over the length, drawn as lines
    memory_bound: bool = False  # judged by bytes per second instead of operations
    skipped: dict[str, str] = field(default_factory=dict)

    def filtered(self, pattern: str | None) -> Preset:
        """Only the rows whose name contains the regular expression."""
        if pattern is None:
            return self
        search = re.compile(pattern).search
        return replace(
            self,
            shapes=tuple(shape for shape in self.shapes if search(shape.name)),
            skipped={name: reason for name, reason in self.skipped.items() if search(name)},
        )


def square(name: str, batch: int, heads: int, length: int, head_dim: int, causal: bool, **options: object) -> Shape:
    """Self-attention with as many key heads as query heads."""
    shape = Shape(name, batch, heads, heads, length, length, head_dim, head_dim, causal)
    return replace(shape, **options)  # type: ignore[arg-type]


def mask_name(causal: bool) -> str:
    return "causal" if causal else "full"


def length_label(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def standard() -> Preset:
    """16384 tokens and heads * head_dim = 2048 at every length, so that all rows of a head_dim move the same bytes."""
    shapes = tuple(
        square(f"hd{dim} {mask_name(causal)} {length}", 16384 // length, 2048 // dim, length, dim, causal)
        for dim in (64, 128, 256)
        for causal in (False, True)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
    )
    return Preset("standard", shapes, by_length=True)


def short() -> Preset:
    """Prefill of short prompts, vision and diffusion: (batch, heads, length, head_dim, masks)."""
    both = (False, True)
    rows = (
        (1, 16, 256, 64, both),
        (1, 32, 1024, 128, both),
        (4, 32, 512, 128, both),
        (2, 12, 197, 64, (False,)),
        (8, 16, 577, 64, both),
        (1, 24, 4608, 128, both),
        (1, 32, 2048, 128, both),
    )
    shapes = tuple(
        square(f"B{b} H{h} L{n} hd{d} {mask_name(causal)}", b, h, n, d, causal, graph=True)
        for b, h, n, d, masks in rows
        for causal in masks
    )
    return Preset("short", shapes, unit="us")


def decode() -> Preset:
    """One new token against a cache: 32 query heads on 8 key heads, head_dim 128."""
    rows = ((1, 4096), (1, 16384), (1, 65536), (8, 8192), (32, 4096), (64, 8192))
    shapes = tuple(
        Shape(f"B{batch} L{length}", batch, 32, 8, 1, length, 128, 128, graph=True, cold=True, training=False)
        for batch, length in rows
    )
    return Preset("decode", shapes, unit="us", memory_bound=True)


def cpu() -> Preset:
    """The cpu machine against torch's own CPU attention, same process and threads."""
    shapes = tuple(
        square(f"hd{dim} {mask_name(causal)} {length} {DTYPE_NAMES[dtype]}", 1, 8, length, dim, causal, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for dim in (64, 128)
        for causal in (False, True)
        for length in (1024, 4096)
    )
    return Preset("cpu", shapes, unit="GFLOP/s", device="cpu")


def parse_mask(text: str) -> tuple[bool, float | None] | None:
    """(causal, scale) of a mask column, or None if it asks for more. A scale reads ``168^-0.5`` or ``1.0``."""
    causal, scale = False, None
    for term in text.split(", "):
        number = re.fullmatch(r"scale ([\d.]+)(?:\^(-?[\d.]+))?", term)
        if number:
            scale = float(number[1]) ** float(number[2] or 1)
        elif term == "causal":
            causal = True
        elif term != "none":
            return None
    return causal, scale


def models(path: Path = MODELS_FILE) -> Preset:
    """Shapes of published models. Rows that no kernel of ours covers yet are listed in ``skipped``."""
    shapes, skipped = [], {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            name, mask = row["name"], parse_mask(row["mask"])
            head_dim, value_dim = int(row["Dqk"]), int(row["Dv"])
            if max(head_dim, value_dim) > MAXIMUM_HEAD_DIM:
                skipped[name] = f"head dim {max(head_dim, value_dim)} is above {MAXIMUM_HEAD_DIM}"
            elif mask is None:
                skipped[name] = f"not covered yet: {row['mask']}"
            else:
                shape = Shape(
                    name, int(row["B"]), int(row["Hq"]), int(row["Hkv"]), int(row["Lq"]), int(row["Lk"]), head_dim,
                    value_dim, mask[0], DTYPES[row["dtype"]], mask[1], training=row["mode"] == "T",
                )  # fmt: skip
                graph = shape.flops("fwd") < GRAPH_BELOW_FLOPS
                shapes.append(replace(shape, graph=graph, cold=shape.length_q == 1))
    return Preset("models", tuple(shapes), skipped=skipped)


PRESETS: dict[str, Callable[[], Preset]] = {
    "standard": standard,
    "models": models,
    "decode": decode,
    "short": short,
    "cpu": cpu,
}


def input_sets(shape: Shape, cache_bytes: int) -> int:
    """How many sets of inputs to rotate over, so that a cold shape finds nothing of its own in the cache."""
    if not shape.cold or not cache_bytes:
        return 1
    return max(1, min(16, math.ceil(2 * cache_bytes / shape.bytes("fwd"))))
