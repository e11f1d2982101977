"""Trains a small GPT on torch's attention, on another kernel of torch, and on ours: are the losses the same?

The text is Python's own reference, which every Python carries (`pydoc_data`); a token is a byte. All runs start from
the same weights and see the same batches, so that their losses differ by rounding alone. How far rounding carries two
trainings apart is what the two kernels of torch tell. On a GPU the whole model runs in bfloat16, on a CPU, where that
would be slow, its attention alone. Nothing is needed but torch: `python examples/gpt.py`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import kittens_torch

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def torchs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def another_of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torchs(query, key, value)


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Always our kernels; on a CPU the drop-in leaves training to torch, which is faster there."""
    output = kittens_torch.attention(query, key, value, causal="upper_left")
    assert isinstance(output, Tensor)
    return output


ATTENTIONS: dict[str, Attention] = {"torch": torchs, "another kernel of torch": another_of_torch, "ours": ours}


@dataclass(frozen=True)
class Sizes:
    """Of the model and of its training."""

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    steps: int


# On a CPU something that ends within a minute.
SIZES = {
    "cuda": Sizes(width=512, layers=6, heads=8, length=1024, batch=16, steps=300),
    "cpu": Sizes(width=128, layers=2, heads=2, length=128, batch=4, steps=40),
}
LAST = 20  # steps whose mean loss is the result of a training


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, sizes: Sizes, attend: Attention) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.attend = sizes.heads, attend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        projected = self.project(self.norms[0](hidden)).bfloat16().unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.transpose(1, 3).unbind(2)  # (B, H, L, D), views of (B, L, 3, H, D)
        attended = self.attend(query, key, value).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(attended.to(hidden.dtype))
        return hidden + self.perceptron(self.norms[1](hidden))


class GPT(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, sizes: Sizes, attend: Attention) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(256, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, attend) for _ in range(sizes.layers)))
        self.norm, self.head = nn.LayerNorm(sizes.width), nn.Linear(sizes.width, 256)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words) + self.positions.weight[: words.shape[1]]
        return self.head(self.norm(self.blocks(hidden)))


def text() -> Tensor:
    """The language reference of Python, a number for each byte."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


@dataclass
class Run:
    """The loss of every step, and tokens per second after the first few."""

    losses: list[float]
    tokens_per_second: float

    @property
    def result(self) -> float:
        return statistics.fmean(self.losses[-LAST:])

    def distance(self, other: Run) -> float:
        """The mean difference of the losses of a step."""
        return statistics.fmean(abs(one - two) for one, two in zip(self.losses, other.losses, strict=True))


def train(attend: Attention, sizes: Sizes, device: str, seed: int = 0) -> Run:
    """One training from fresh weights."""
    torch.manual_seed(seed)
    model = GPT(sizes, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words, generator = text(), torch.Generator().manual_seed(seed)
    warm_up, start, losses = min(5, sizes.steps - 1), 0.0, []
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for step in range(sizes.steps):
        if step == warm_up:
            wait()
            start = time.perf_counter()
        places = torch.randint(len(words) - sizes.length, (sizes.batch, 1), generator=generator)
        batch = words[places + torch.arange(sizes.length + 1)].long().to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    wait()
    tokens = (sizes.steps - warm_up) * sizes.batch * sizes.length
    return Run([loss.item() for loss in losses], tokens / (time.perf_counter() - start))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, help="of training (default: 300 on a GPU, 40 on a CPU)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 2:
        parser.error(f"--steps is {options.steps}; allowed: 2 or more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SIZES[device] if options.steps is None else replace(SIZES[device], steps=options.steps)
    what = f"{sizes.steps} batches of {sizes.batch} x {sizes.length} bytes"
    print(f"\nA GPT of {sizes.layers} layers, {sizes.heads} heads, on {device}: {what}", flush=True)
    runs = {name: train(attend, sizes, device) for name, attend in ATTENTIONS.items()}
    print("  step" + "".join(f"{name:>26}" for name in runs))
    for step in range(sizes.steps):
        if step + 1 in (1, sizes.steps) or (step + 1) % (sizes.steps // 6 or 1) == 0:
            print(f"  {step + 1:>4}" + "".join(f"{run.losses[step]:26.4f}" for run in runs.values()))
    print(f"  mean of the last {min(LAST, sizes.steps)} losses, mean difference from torch's, tokens/s")
    for name, run in runs.items():
        print(f"  {name:<24} {run.result:8.4f} {run.distance(runs['torch']):10.1e} {run.tokens_per_second:12.0f}")


if __name__ == "__main__":
    main(sys.argv[1:])
