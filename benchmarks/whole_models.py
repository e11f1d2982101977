"""Whole models with torch's attention and with ours: ``python -m benchmarks.whole_models``.

Each row is a network in plain torch with random weights, run as a user runs it: eager, bfloat16 on a GPU, float32 on a
CPU. Only the attention function changes between the samples, which are taken in turns in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import report
from .machine import facts, read_clocks, sampler_for
from .networks import FluxBlocks, Llama, VisionTransformer
from .peers import OURS, first_line, require
from .progress import Progress
from .timing import Sampler, Timing, interleave
from .variants import ENABLED, TORCH, Attend, Variant, load_all

# Kernels of torch, of which the first two that run are compared: how far apart they are is what rounding does to a
# network. Not the math on a GPU, where 8192 tokens would need all of its memory.
TORCHS_KERNELS = {
    "cuda": (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
}


@dataclass(frozen=True)
class Task:
    """A network and what is done with it."""

    name: str
    network: Callable[[Attend], nn.Module]
    # The inputs, from (device, dtype).
    inputs: Callable[[torch.device, torch.dtype], tuple[Tensor, ...]]
    tokens: int
    training: bool = False


@dataclass
class Row:
    """What was measured of one task. Every variant is in exactly one of timings and failed."""

    task: Task
    timings: dict[str, Timing] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    allowed: float = 0.0

    def ratio(self, name: str) -> float | None:
        """Time with torch's attention over the time with this one."""
        if name not in self.timings or TORCH not in self.timings:
            return None
        return self.timings[TORCH].median / self.timings[name].median


def tasks(tiny: bool) -> list[Task]:
    """Sizes of published models (Llama-3.2-1B, ViT-L/14 at 336 pixels, Flux.1), or the same in small."""
    llama = (2, 64, 4, 2, 128, 100) if tiny else (16, 2048, 32, 8, 8192, 128256)
    vision = (2, 64, 4, 32, 8) if tiny else (24, 1024, 16, 336, 14)
    flux = (64, 2) if tiny else (3072, 24)
    length, batch, image, text = (40, 2, 30, 10) if tiny else (8192, 32, 4096, 512)
    patches = 1 + (vision[3] // vision[4]) ** 2

    def words(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (torch.randint(llama[-1], (1, length), device=device),)

    def images(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (torch.randn(batch, 3, vision[3], vision[3], device=device, dtype=dtype),)

    def streams(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        sizes = ((1, image, flux[0]), (1, text, flux[0]), (1, flux[0]))
        return tuple(torch.randn(size, device=device, dtype=dtype) for size in sizes)

    def make_llama(attend: Attend) -> nn.Module:
        return Llama(attend, *llama)

    def make_vision(attend: Attend) -> nn.Module:
        return VisionTransformer(attend, *vision)

    def make_flux(attend: Attend) -> nn.Module:
        return FluxBlocks(attend, *flux)

    return [
        Task(f"Llama 1B training step {length}", make_llama, words, length, training=True),
        Task(f"Llama 1B prefill {length}", make_llama, words, length),
        Task(f"ViT-L training step {batch} x {patches}", make_vision, images, batch * patches, training=True),
        Task(f"ViT-L forward {batch} x {patches}", make_vision, images, batch * patches),
        Task(f"Flux blocks {image + text}", make_flux, streams, image + text),
    ]


def gradients(network: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return list(torch.autograd.grad(network.loss(*inputs), list(network.parameters())))


def results(network: nn.Module, task: Task, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """What is compared between the variants: the gradient of every weight, or the output."""
    if task.training:
        return gradients(network, inputs)
    with torch.no_grad():
        return [network(*inputs)]


def difference(mine: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest over the tensors of |mine - other| / |other|, Euclidean norms; nan where there is one."""
    found = [
        ((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30)).item()
        for one, other in zip(mine, others, strict=True)
    ]
    return max(found, key=lambda value: float("inf") if value != value else value)


def make_step(network: nn.Module, task: Task, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    """One forward pass, or one step of training with AdamW, without waiting for the device."""
    if not task.training:

        @torch.no_grad()
        def forward() -> Tensor:
            return network(*inputs)

        return forward
    # So slow that the weights stay what they are over a few hundred steps.
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-7, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        network.loss(*inputs).backward()
        optimizer.step()

    return step


class InsideVariant:
    """Samples a step with a variant's attention; the switch itself is outside of what is timed."""

    def __init__(self, variant: Variant, attend: Attend, sampler: Sampler) -> None:
        self.variant, self.attend, self.sampler = variant, attend, sampler

    def sample(self, calls: int) -> float:
        with self.variant.inside(self.attend):
            return self.sampler.sample(calls)


def measure(task: Task, variants: Sequence[Variant], device: torch.device, seconds: float, repeats: int | None) -> Row:
    """Checks every variant against torch's attention, then times those that are right in turns.

    A difference is allowed that is three times as large as that between two kernels of torch, and one rounding.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row, attend = Row(task), Attend()
    with torch.device(device):
        network = task.network(attend).to(dtype)
    inputs = task.inputs(device, dtype)

    of_torch: list[list[Tensor]] = []
    for backend in TORCHS_KERNELS[device.type]:
        with contextlib.suppress(RuntimeError), sdpa_kernel([backend]):  # one that does not take this network
            of_torch.append(results(network, task, inputs))
        if len(of_torch) == 2:
            break
    expected, other = of_torch
    del of_torch
    row.allowed = 3 * difference(other, expected) + torch.finfo(dtype).eps
    del other
    for variant in variants:
        try:
            with variant.inside(attend):
                row.differences[variant.name] = difference(results(network, task, inputs), expected)
        except Exception as error:  # whatever a foreign package raises concerns that package alone
            row.failed[variant.name] = f"{type(error).__name__}: {first_line(error)}"
            continue
        if not row.differences[variant.name] <= row.allowed:
            found = row.differences[variant.name]
            row.failed[variant.name] = f"WRONG RESULT: difference {found:.3g}, allowed {row.allowed:.3g}"
    del expected
    step = make_step(network, task, inputs)
    samplers = {}
    for variant in variants:
        if variant.name not in row.failed:
            samplers[variant.name] = InsideVariant(variant, attend, sampler_for(device, step))
            samplers[variant.name].sample(1)
    row.timings = interleave(samplers, seconds=seconds, repeats=repeats)
    return row


def table(rows: Sequence[Row]) -> str:
    """One line per row: every variant in milliseconds with its spread, then the ratios of torch's time to it."""
    names = list(dict.fromkeys(name for row in rows for name in row.timings))
    lines = [["whole models (ms)", *names, *(f"torch / {name}" for name in names if name != TORCH)]]
    for row in rows:
        cells = [row.task.name]
        for name in names:
            timing = row.timings.get(name)
            cells.append(f"{report.digits(timing.median * 1e3)} ±{50 * timing.spread:.1f}%" if timing else "-")
        for name in names:
            if name != TORCH:
                ratio = row.ratio(name)
                cells.append("-" if ratio is None else f"{ratio:.3f}")
        lines.append(cells)
    return report.aligned(lines)


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The geometric mean of the ratio to torch of every other variant."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row.timings if name != TORCH):
        found[name] = statistics.geometric_mean([value for row in rows if (value := row.ratio(name)) is not None])
    return found


def records(rows: Sequence[Row], device: torch.device) -> list[dict[str, Any]]:
    """One flat record per row and variant that was timed."""
    return [
        {
            "row": row.task.name,
            "variant": name,
            "training": row.task.training,
            "tokens": row.task.tokens,
            "median_ms": timing.median * 1e3,
            "spread": timing.spread,
            "lowest_ms": min(timing.samples) * 1e3,
            "highest_ms": max(timing.samples) * 1e3,
            "samples": len(timing.samples),
            "calls_per_sample": timing.calls,
            "tokens_per_second": row.task.tokens / timing.median,
            "ratio_to_torch": row.ratio(name),
            "difference": row.differences[name],
            "difference_allowed": row.allowed,
        }
        for row in rows
        for name, timing in row.timings.items()
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    command = argparse.ArgumentParser(prog="python -m benchmarks.whole_models", description=__doc__)
    add = command.add_argument
    add("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    add("--tiny", action="store_true", help="small networks, to see the command run; always on a CPU")
    add("--seconds-per-row", type=float, default=8.0, help="time for all variants of a row (default %(default)s)")
    add("--repeats", type=int, help="samples of every variant (default: as many as the time allows)")
    add("--filter", help="only rows whose name contains this regular expression, as in 'Llama|ViT'")
    add("--output", type=Path, help="folder for the JSON and CSV files (default: none are written)")
    add("--seed", type=int, default=0, help="of the weights and inputs (default %(default)s)")
    add("--commit", help="recorded instead of git's answer, where the source tree is not a repository")
    args = command.parse_args(arguments)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        command.error("--device cuda: this torch sees no CUDA device")
    args.tiny = args.tiny or args.device == "cpu"
    if not args.seconds_per_row > 0:
        command.error(f"--seconds-per-row: {args.seconds_per_row} must be above 0")
    if args.repeats is not None and args.repeats < 1:
        command.error(f"--repeats: {args.repeats} must be at least 1")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 if a result of ours is wrong or missing, 2 for a bad argument."""
    args = parse(arguments)
    device, start = torch.device(args.device), time.perf_counter()
    chosen = [task for task in tasks(args.tiny) if re.search(args.filter or "", task.name)]
    if not chosen:
        print(f"no row for --filter {args.filter!r}", file=sys.stderr)
        return 2
    variants, missing = load_all()
    environment, versions = facts(device, args.commit), {variant.name: variant.version for variant in variants}
    print("  ".join(f"{key} {value}" for key, value in environment.items()))
    print("measured: " + ", ".join(f"{name} ({version})" for name, version in versions.items()))
    for name, reason in missing.items():
        print(f"not here, skipped: {name}: {reason}")
    # A call that torch would answer must not be timed as ours.
    before = require("kittens_torch").set_fallback("error") if OURS not in missing else None
    rows = []
    try:
        with Progress(len(chosen)) as progress:
            for task in chosen:
                progress.begin(task.name)
                torch.manual_seed(args.seed)
                rows.append(measure(task, variants, device, args.seconds_per_row, args.repeats))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                progress.finish()
    finally:
        if before is not None:
            require("kittens_torch").set_fallback(before)
    means, clocks = summary(rows), read_clocks(device)
    print(table(rows))
    for row in rows:
        for name, reason in row.failed.items():
            print(f"{name} not timed: {reason} [{row.task.name}]")
    print("geometric mean of torch's time over it: " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items()))
    print(f"{time.perf_counter() - start:.0f} s in all")
    if args.output:
        extra = {
            "tiny": args.tiny,
            "seed": args.seed,
            "summary": means,
            "missing": missing,
            "not_timed": {row.task.name: row.failed for row in rows if row.failed},
            "temperature_c": clocks.temperature_c if clocks else None,
        }
        args.output.mkdir(parents=True, exist_ok=True)
        base, found = args.output / ("whole_models_tiny" if args.tiny else "whole_models"), records(rows, device)
        report.write_json(base.with_suffix(".json"), report.document(environment, versions, extra, found))
        report.write_csv(base.with_suffix(".csv"), found, environment, versions)
        print(f"wrote {base}.json and .csv")
    ours = (OURS, ENABLED)
    return int(any(name in missing for name in ours) or any(name in row.failed for row in rows for name in ours))


if __name__ == "__main__":
    sys.exit(main())
