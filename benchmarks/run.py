"""The benchmark command: ``python -m benchmarks.run --preset standard --peers torch,cudnn,fa3``."""

from __future__ import annotations

import argparse
import importlib.util
import re
import statistics
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import masked_peers, masks, plots, report
from .host import measure_host
from .machine import facts, measure_copy, measure_gemm, read_clocks
from .measure import OWN_REFERENCE, DeviceLost, Options, Row, measure_row
from .peers import DETERMINISTIC, LOADERS, OURS, Peer, Unavailable, configuration_peer, doubtful, load, planned
from .presets import DTYPE_NAMES, Preset, Shape
from .presets import PRESETS as PLAIN_PRESETS
from .progress import Progress

# More than any table of ours holds; the op refuses the numbers beyond its end.
CONFIGURATIONS = range(64)
DEFAULT_PEERS = {"cuda": "torch,cudnn,fa2,fa3", "cpu": "torch"}
MASKED_PEERS = {"cuda": "cudnn,efficient,fa2,math,flex,fa3", "cpu": "torch"}
PRESETS = PLAIN_PRESETS | masks.PRESETS
PEERS = [name for name in {**LOADERS, **masked_peers.LOADERS} if name != OURS]


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add = command.add_argument
    add("--preset", choices=[*PRESETS, "host"], default="standard")
    add("--peers", help=f"comma-separated, of {', '.join(PEERS)}")
    add("--pass", dest="direction", choices=["fwd", "bwd"], default="fwd", help="forward or backward pass alone")
    add("--configurations", help="also time these rows of our forward table: 'all' or numbers, as in 0,3")
    add("--repeats", type=int, help="samples of every peer (default: as many as the time allows)")
    add("--seconds-per-row", type=float, help="time for all peers of a row together (default 2, for masks 1)")
    add("--output", type=Path, help="folder for JSON, CSV and PNG files (default: none are written)")
    add("--filter", help="only rows whose name contains this regular expression, as in 'hd128 causal'")
    add("--device", choices=["cuda", "cpu"], help="default: cpu for the preset cpu, else cuda where there is one")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--seed", type=int, help="of the inputs (default: a fresh one, recorded in the results)")
    add("--commit", help="recorded instead of git's answer, where the source tree is not a repository")
    return command


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parsed and checked arguments; every mistake ends with exit status 2 and names what is allowed."""
    command = parser()
    args = command.parse_args(arguments)
    if args.device is None:
        args.device = "cuda" if args.preset != "cpu" and torch.cuda.is_available() else "cpu"
        if args.device == "cpu" and args.preset != "host" and PRESETS[args.preset]().device == "cuda":
            command.error(
                f"--preset {args.preset}: its sizes are a GPU's, and this torch sees no CUDA device; allowed here: "
                f"--preset {', '.join(name for name in PRESETS if PRESETS[name]().device == 'cpu')} or host, or "
                "--device cpu for these sizes on the CPU, where a row may take minutes"
            )
    if args.device == "cuda" and not torch.cuda.is_available():
        command.error("--device cuda: this torch sees no CUDA device")
    defaults = MASKED_PEERS if args.preset in masks.PRESETS else DEFAULT_PEERS
    names = [name for name in (args.peers or defaults[args.device]).split(",") if name]
    for name in names:
        if name not in PEERS:
            command.error(f"--peers: unknown {name!r}, allowed are {', '.join(PEERS)}")
    if DETERMINISTIC in names and args.direction == "fwd":
        command.error(f"--peers: {DETERMINISTIC} differs from the default in the backward pass alone: --pass bwd")
    args.peers = list(dict.fromkeys(names))
    if args.configurations and args.direction == "bwd":
        command.error("--configurations: only the forward pass has a configuration table")
    if args.configurations and args.preset in masks.PRESETS:
        command.error("--configurations: a configuration is timed alone only on rows without masks")
    if args.configurations and not re.fullmatch(r"all|\d+(,\d+)*", args.configurations):
        command.error(f"--configurations: {args.configurations!r} is neither 'all' nor numbers like 0,3")
    if args.repeats is not None and args.repeats < 1:
        command.error(f"--repeats: {args.repeats} must be at least 1")
    if args.seconds_per_row is None:
        args.seconds_per_row = 1.0 if args.preset in masks.PRESETS else 2.0
    if not args.seconds_per_row > 0:
        command.error(f"--seconds-per-row: {args.seconds_per_row} must be above 0")
    if args.threads is not None and args.threads < 1:
        command.error(f"--threads: {args.threads} must be at least 1")
    try:
        re.compile(args.filter or "")
    except re.error as error:
        command.error(f"--filter: {args.filter!r} is not a regular expression: {error}")
    return args


def select(preset: Preset, direction: str) -> Preset:
    """The preset's rows for a direction: nobody trains at an inference row."""
    if direction == "fwd":
        return preset
    skipped = preset.skipped | {shape.name: "inference only" for shape in preset.shapes if not shape.training}
    shapes = tuple(shape for shape in preset.shapes if shape.training)
    return Preset(preset.name, shapes, preset.unit, preset.device, preset.by_length, preset.memory_bound, skipped)


def configurations(text: str | None) -> list[Peer]:
    """A peer for each configuration asked for."""
    if text is None:
        return []
    try:
        return [configuration_peer(i) for i in (CONFIGURATIONS if text == "all" else map(int, text.split(",")))]
    except Unavailable:  # reported with the peers that are missing
        return []


def file_stem(args: argparse.Namespace) -> str:
    """Name of the result files: a partial run never takes the name of a whole one."""
    parts = [args.preset]
    if args.preset != "host":
        parts.append(args.direction)
    if args.configurations:
        parts.append("configurations")
    if args.filter:
        parts.append(re.sub(r"[^A-Za-z0-9]+", "-", args.filter).strip("-"))
    return "_".join(parts)


def machine_name(environment: dict[str, str]) -> str:
    return environment.get("gpu") or f"{environment['cpu']}, {environment['threads']} threads"


def print_header(environment: dict[str, str], versions: dict[str, str], missing: dict[str, str]) -> None:
    print("  ".join(f"{key} {value}" for key, value in environment.items()))
    if versions:
        print("measured: " + ", ".join(f"{name} ({version})" for name, version in versions.items()))
    for name, reason in missing.items():
        print(f"not here, skipped: {name}: {reason}")
    sys.stdout.flush()


def measure_ceilings(device: torch.device, shapes: Sequence[Shape], seconds: float) -> dict[str, float]:
    """One reading of the GEMM in every dtype the rows use, of the copy, and of the clock after the GEMM."""
    dtypes = dict.fromkeys(shape.dtype for shape in shapes)
    reading = {"copy": measure_copy(device, seconds / 4)}
    for dtype in dtypes if device.type == "cuda" else dict.fromkeys([torch.float32, *dtypes]):
        reading[DTYPE_NAMES[dtype]] = measure_gemm(device, dtype, seconds)
    clocks = read_clocks(device)
    return reading | ({"sm_mhz": clocks.sm_mhz, "power_w": clocks.power_w} if clocks else {})


def ceilings_of(readings: Sequence[dict[str, float]], device: torch.device) -> report.Ceilings:
    """The mean of the readings before and after the rows."""
    means = {name: statistics.fmean(reading[name] for reading in readings) for name in readings[0]}
    gemm = {name: means[name] for name in DTYPE_NAMES.values() if name in means}
    if device.type == "cpu":  # one without 16-bit products computes them faster in float32
        gemm = {name: max(value, gemm["fp32"]) for name, value in gemm.items()}
    return report.Ceilings(gemm, means["copy"])


def measure_rows(preset: Preset, peers: list[Peer], options: Options) -> tuple[list[Row], str]:
    """All rows, and the message of the error that ended the run early, if one did."""
    rows: list[Row] = []
    with Progress(len(preset.shapes)) as progress:
        for shape in preset.shapes:
            progress.begin(shape.name)
            try:
                row = measure_row(shape, peers, options)
            except DeviceLost as error:
                return rows, str(error)
            if options.direction == "fwd" and not isinstance(shape, masks.MaskedShape):
                row.plan = planned(shape, options.device)
            rows.append(row)
            progress.finish()
    return rows, ""


def doubts(rows: Sequence[Row]) -> list[str]:
    """Warnings about peers that look badly built."""
    found = (doubtful(name, row.shape.name, row.direction, row.tflops(name)) for row in rows for name in row.timings)
    return [text for text in found if text]


def failed_row(row: Row) -> bool:
    """Whether a result of ours is wrong or missing."""
    ours = (OURS, DETERMINISTIC, OWN_REFERENCE)
    return any(name in row.skipped for name in ours) or any(name in ours or report.is_ours(name) for name in row.wrong)


def run_rows(args: argparse.Namespace, device: torch.device, environment: dict[str, str]) -> int:
    preset = select(PRESETS[args.preset]().filtered(args.filter), args.direction)
    if not preset.shapes:
        chosen = f"--pass {args.direction}" + (f" --filter {args.filter!r}" if args.filter else "")
        print(f"preset {args.preset!r} has no row to measure for {chosen}", file=sys.stderr)
        return 2
    masked = args.preset in masks.PRESETS
    peers, missing = load([OURS, *args.peers], masked_peers.LOADERS if masked else LOADERS)
    versions = {peer.name: peer.version for peer in peers}
    print_header(environment, versions, missing)
    generator = torch.Generator(device=device)
    seed = generator.seed() if args.seed is None else args.seed
    generator.manual_seed(seed)
    options = Options(device, args.direction, args.seconds_per_row, args.repeats, generator)

    # A second and a half of GEMM ends at the chip's power limit, where long attention rows run too.
    ceiling_seconds = min(1.5, args.seconds_per_row)
    readings = [measure_ceilings(device, preset.shapes, ceiling_seconds)]
    rows, lost = measure_rows(preset, peers + configurations(args.configurations), options)
    if not lost:
        readings.append(measure_ceilings(device, preset.shapes, ceiling_seconds))
    ceilings = ceilings_of(readings, device)

    remarks = report.remarks(rows)
    if environment.get("capability") == "9.0":
        remarks += doubts(rows)
    if lost:
        remarks.append(f"STOPPED: the GPU failed in {lost}")
    summary = report.summarize(rows)
    blocks = [
        report.table(rows, preset, ceilings),
        report.configuration_table(rows, preset),
        "\n".join(f"not measured: {name}: {reason}" for name, reason in preset.skipped.items()),
        "\n".join(remarks),
        report.ceilings_text(ceilings) + "\n" + report.summary_text(summary),
        report.deterministic_text(rows),
    ]
    print("\n\n".join(block for block in blocks if block))

    if args.output:
        extra = {
            "preset": args.preset,
            "pass": args.direction,
            "seed": seed,
            "ceilings": readings,
            "summary": report.summary_record(summary),
            "missing_peers": missing,
            "not_measured": preset.skipped,
            "not_timed": {row.shape.name: reasons for row in rows if (reasons := report.not_timed(row))},
            "remarks": remarks,
        }
        write(args, environment, versions, extra, report.records(rows, ceilings))
        if drawable():
            stem, name = file_stem(args), machine_name(environment)
            for path in plots.draw(rows, preset, ceilings, args.output, stem, name):
                print(f"wrote {path}")
    failed = OURS in missing or any(failed_row(row) for row in rows)
    return 1 if failed or lost else 0


def run_host(args: argparse.Namespace, device: torch.device, environment: dict[str, str]) -> int:
    print_header(environment, {}, {})
    with Progress(1) as progress:
        times, missing = measure_host(device, args.seconds_per_row, args.repeats, progress.begin)
        progress.finish()
    print(report.host_table(times))
    for name, reason in missing.items():
        print(f"skipped: {name}: {reason}")
    if args.output:
        write(args, environment, {}, {"preset": "host", "missing": missing}, report.host_records(times))
        if drawable():
            for path in plots.draw_host(times, args.output, file_stem(args), machine_name(environment)):
                print(f"wrote {path}")
    return 0


def write(
    args: argparse.Namespace,
    environment: dict[str, str],
    versions: dict[str, str],
    extra: dict[str, Any],
    records: list[dict[str, Any]],
) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    base = args.output / file_stem(args)
    report.write_json(base.with_suffix(".json"), report.document(environment, versions, extra, records))
    report.write_csv(base.with_suffix(".csv"), records, environment, versions)
    print(f"wrote {base}.json and .csv")


def drawable() -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed")
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 if a result of ours is wrong or missing, 2 for a bad argument."""
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    environment = facts(device, args.commit)
    with warnings.catch_warnings():
        # torch explains at length why a backend refuses a shape; the refusal itself is reported per row.
        warnings.filterwarnings("ignore", category=UserWarning)
        return run_host(args, device, environment) if args.preset == "host" else run_rows(args, device, environment)


if __name__ == "__main__":
    sys.exit(main())
