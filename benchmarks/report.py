"""Tables, summaries, JSON and CSV of measured rows."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .host import HostTime
from .masks import MaskedShape
from .measure import Row
from .peers import DETERMINISTIC, OURS
from .presets import DTYPE_NAMES, Preset


@dataclass(frozen=True)
class Ceilings:
    """What plain operations reach in the same run: GEMM in TFLOP/s by dtype name, copy in TB/s."""

    gemm_tflops: Mapping[str, float]
    copy_tbps: float


@dataclass(frozen=True)
class Summary:
    """Ratios of ours to the best peer over all rows that have both; above 1 we are faster."""

    rows: int
    geometric_mean: float
    lowest: float
    lowest_row: str
    highest: float
    highest_row: str
    by_peer: Mapping[str, float]  # geometric mean against each peer alone


def is_configuration(name: str) -> bool:
    return name.startswith(OURS + "[")


def is_ours(name: str) -> bool:
    return name in (OURS, DETERMINISTIC) or is_configuration(name)


def peers_of(rows: Iterable[Row]) -> list[str]:
    """Names of everything timed, in order of appearance, without single configurations."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(name for name in row.timings if not is_configuration(name)))
    return sorted(names, key=lambda name: name != OURS)


def best_peer(row: Row) -> str | None:
    """The fastest that is not ours."""
    others = [name for name in row.timings if not is_ours(name)]
    return min(others, key=lambda name: row.timings[name].median) if others else None


def ratio(row: Row, peer: str | None) -> float | None:
    """Time of a peer over our time."""
    if peer is None or peer not in row.timings or OURS not in row.timings:
        return None
    return row.timings[peer].median / row.timings[OURS].median


def deterministic_cost(row: Row) -> float | None:
    """Time of our deterministic backward pass over that of the default."""
    return ratio(row, DETERMINISTIC)


def own_ratio(row: Row) -> float | None:
    """Of a masked row: the time of its own reference, in proportion to the visible pairs, over our time."""
    if row.own is None or OURS not in row.timings or not isinstance(row.shape, MaskedShape):
        return None
    return row.own.median * row.shape.own_work / row.timings[OURS].median


def percent_of_gemm(row: Row, peer: str, ceilings: Ceilings) -> float | None:
    gemm = ceilings.gemm_tflops.get(DTYPE_NAMES[row.shape.dtype])
    return 100 * row.tflops(peer) / gemm if gemm else None


def percent_of_copy(row: Row, peer: str, ceilings: Ceilings) -> float | None:
    return 100 * row.terabytes(peer) / ceilings.copy_tbps if ceilings.copy_tbps else None


def summarize(rows: Sequence[Row]) -> Summary | None:
    """None where no row has both ours and a peer."""
    ratios = {row.shape.name: value for row in rows if (value := ratio(row, best_peer(row))) is not None}
    if not ratios:
        return None
    lowest, highest = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    by_peer = {}
    for peer in peers_of(rows):
        against = [value for row in rows if (value := ratio(row, peer)) is not None]
        if not is_ours(peer) and against:
            by_peer[peer] = statistics.geometric_mean(against)
    mean = statistics.geometric_mean(ratios.values())
    return Summary(len(ratios), mean, ratios[lowest], lowest, ratios[highest], highest, by_peer)


def digits(value: float) -> str:
    """At least three significant digits, no exponent."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def in_unit(row: Row, peer: str, unit: str) -> float:
    if unit == "us":
        return row.timings[peer].median * 1e6
    return row.tflops(peer) * {"TFLOP/s": 1.0, "GFLOP/s": 1e3}[unit]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns separated by two spaces, the first flush left, the others flush right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def table(rows: Sequence[Row], preset: Preset, ceilings: Ceilings) -> str:
    """One line per row: every peer in the preset's unit with its spread, then ours against the best and the ceiling.

    Where our deterministic pass was timed, its time over that of the default follows. Rows of masks say before the
    ceiling how ours compares with their own reference, and the memory of a call.
    """
    peers = peers_of(rows)
    masked = any(isinstance(row.shape, MaskedShape) for row in rows)
    repeatable = DETERMINISTIC in peers
    added = [f"{DETERMINISTIC} / default"] if repeatable else []
    added += ["own reference", "work", "own ratio", "MiB ours", "MiB peer"] if masked else []
    percent, ceiling = (percent_of_copy, "copy") if preset.memory_bound else (percent_of_gemm, "GEMM")
    lines = [[f"{preset.name} ({preset.unit})", *peers, "best peer", "ratio", *added, f"% of {ceiling}", "MHz", "W"]]
    for row in rows:
        cells = [row.shape.name]
        for peer in peers:
            if peer in row.timings:
                cells.append(f"{digits(in_unit(row, peer, preset.unit))} ±{50 * row.timings[peer].spread:.1f}%")
            else:
                cells.append("wrong" if peer in row.wrong else "-")
        best = best_peer(row)
        against, share = ratio(row, best), percent(row, OURS, ceilings) if OURS in row.timings else None
        cells += [
            best or "-",
            fraction(against),
            *([fraction(deterministic_cost(row))] if repeatable else []),
            *(own_cells(row, best) if masked else []),
            "-" if share is None else f"{share:.1f}",
            str(row.clocks.sm_mhz) if row.clocks else "-",
            f"{row.clocks.power_w:.0f}" if row.clocks else "-",
        ]
        lines.append(cells)
    return aligned(lines)


def own_cells(row: Row, best: str | None) -> list[str]:
    """Time of the own reference in us, the row's work over its work, the ratio, memory beyond inputs and outputs."""
    shape, compared = row.shape, own_ratio(row)
    memory = [row.extra_bytes.get(peer) if peer else None for peer in (OURS, best)]
    return [
        digits(row.own.median * 1e6) if row.own else "-",
        f"{shape.own_work:.3f}" if isinstance(shape, MaskedShape) and shape.own else "-",
        fraction(compared),
        *("-" if size is None else f"{size / 2**20:.1f}" for size in memory),
    ]


def configuration_table(rows: Sequence[Row], preset: Preset) -> str:
    """Every configuration that takes the shape, the fastest marked, and how much it gains on the plan's choice."""
    names = sorted({name for row in rows for name in row.timings if is_configuration(name)}, key=natural)
    if not names:
        return ""
    labels = [name.removeprefix(OURS) for name in names]
    lines = [[f"configurations ({preset.unit})", *labels, "plan", "best / plan"]]
    for row in rows:
        present = [name for name in names if name in row.timings]
        best = min(present, key=lambda name: row.timings[name].median) if present else None
        cells = [row.shape.name]
        for name in names:
            value = digits(in_unit(row, name, preset.unit)) if name in row.timings else "-"
            cells.append(value + ("*" if name == best else " "))
        planned = row.timings.get(OURS)
        cells.append(digits(in_unit(row, OURS, preset.unit)) if planned else "-")
        cells.append(f"{planned.median / row.timings[best].median:.3f}" if planned and best else "-")
        lines.append(cells)
    return aligned(lines)


def natural(name: str) -> int:
    return int(name.rpartition("[")[2].rstrip("]"))


def summary_text(summary: Summary | None) -> str:
    if summary is None:
        return "no row has both kittens and a peer: no ratio"
    peers = ", ".join(f"{name} {value:.3f}" for name, value in summary.by_peer.items())
    return (
        f"ratio to the best peer over {summary.rows} rows: geometric mean {summary.geometric_mean:.3f}, "
        f"lowest {summary.lowest:.3f} ({summary.lowest_row}), highest {summary.highest:.3f} ({summary.highest_row})\n"
        f"geometric mean against each peer: {peers}"
    )


def deterministic_text(rows: Sequence[Row]) -> str:
    costs = {row.shape.name: cost for row in rows if (cost := deterministic_cost(row)) is not None}
    if not costs:
        return ""
    highest = max(costs, key=costs.__getitem__)
    mean = statistics.geometric_mean(costs.values())
    return f"deterministic / default over {len(costs)} rows: mean {mean:.3f}, highest {costs[highest]:.3f} ({highest})"


def ceilings_text(ceilings: Ceilings) -> str:
    gemm = ", ".join(f"{name} {digits(value)} TFLOP/s" for name, value in ceilings.gemm_tflops.items())
    return f"GEMM {gemm}; copy {digits(ceilings.copy_tbps)} TB/s"


def not_timed(row: Row) -> dict[str, str]:
    """Why each peer without a timing has none. Configurations that do not take the shape are not listed."""
    wrong = {
        peer: f"WRONG RESULT: error {verdict.error:.3g}, allowed {verdict.allowed:.3g} {verdict.reason}"
        for peer, verdict in row.wrong.items()
    }
    return wrong | {peer: f"skipped: {reason}" for peer, reason in row.skipped.items() if not is_configuration(peer)}


def remarks(rows: Sequence[Row]) -> list[str]:
    """Everything that was not timed, with the rows of one reason gathered."""
    gathered: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for key in not_timed(row).items():
            gathered.setdefault(key, []).append(row.shape.name)
    return [
        f"{peer} {text} [{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}]"
        for (peer, text), names in gathered.items()
    ]


def records(rows: Sequence[Row], ceilings: Ceilings) -> list[dict[str, Any]]:
    """One flat record per row and peer that was timed."""
    found = []
    for row in rows:
        shape, best = row.shape, best_peer(row)
        for peer, timing in row.timings.items():
            verdict = row.verdicts[peer]
            found.append(
                {
                    "row": shape.name,
                    "pass": row.direction,
                    "peer": peer,
                    **{key: getattr(shape, key) for key in ("batch", "heads", "heads_k", "length_q", "length_k")},
                    **{key: getattr(shape, key) for key in ("head_dim", "value_dim", "causal", "graph")},
                    "dtype": DTYPE_NAMES[shape.dtype],
                    "scale": shape.softmax_scale,
                    "input_sets": row.input_sets,
                    "median_us": timing.median * 1e6,
                    "spread": timing.spread,
                    "lowest_us": min(timing.samples) * 1e6,
                    "highest_us": max(timing.samples) * 1e6,
                    "samples": len(timing.samples),
                    "calls_per_sample": timing.calls,
                    "tflops": row.tflops(peer),
                    "tbps": row.terabytes(peer),
                    "percent_of_gemm": percent_of_gemm(row, peer, ceilings),
                    "percent_of_copy": percent_of_copy(row, peer, ceilings),
                    "best_peer": best if peer == OURS else None,
                    "ratio_to_best_peer": ratio(row, best) if peer == OURS else None,
                    "time_over_default": deterministic_cost(row) if peer == DETERMINISTIC else None,
                    "error": verdict.error,
                    "error_allowed": verdict.allowed,
                    "plan": row.plan if peer == OURS else None,
                    "sm_mhz": row.clocks.sm_mhz if row.clocks else None,
                    "power_w": row.clocks.power_w if row.clocks else None,
                    "temperature_c": row.clocks.temperature_c if row.clocks else None,
                    **(own_record(row, peer) if isinstance(shape, MaskedShape) else {}),
                }
            )
    return found


def own_record(row: Row, peer: str) -> dict[str, Any]:
    """What the record of a masked row has besides."""
    shape = row.shape
    assert isinstance(shape, MaskedShape)
    return {
        "features": " ".join(shape.features),
        "visible_share": shape.visible_share,
        "own_reference": shape.own.name if shape.own else None,
        "own_reference_us": row.own.median * 1e6 if row.own else None,
        "own_reference_spread": row.own.spread if row.own else None,
        "own_work": shape.own_work,
        "ratio_to_own_reference": own_ratio(row) if peer == OURS else None,
        "extra_bytes": row.extra_bytes.get(peer),
    }


def host_records(times: Sequence[HostTime]) -> list[dict[str, Any]]:
    by_name = {time.name: time.timing.median for time in times}
    return [
        {
            "call": time.name,
            "median_us": time.timing.median * 1e6,
            "spread": time.timing.spread,
            "samples": len(time.timing.samples),
            "calls_per_sample": time.timing.calls,
            **{f"times_{other}": time.timing.median / by_name[other] for other in time.compared_with},
        }
        for time in times
    ]


def host_table(times: Sequence[HostTime]) -> str:
    """Host time per call, and how many times that of its like in torch."""
    by_name = {time.name: time.timing.median for time in times}
    lines = [["host time per eager call", "us", "spread", "against"]]
    for time in times:
        against = ", ".join(f"{time.timing.median / by_name[name]:.2f} x {name}" for name in time.compared_with)
        lines.append([time.name, digits(time.timing.median * 1e6), f"±{50 * time.timing.spread:.1f}%", against or "-"])
    return aligned(lines)


def document(
    environment: Mapping[str, str], peers: Mapping[str, str], extra: Mapping[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the JSON file holds."""
    return {"environment": dict(environment), "peers": dict(peers), **extra, "rows": rows}


def summary_record(summary: Summary | None) -> dict[str, Any] | None:
    return dataclasses.asdict(summary) if summary else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_csv(
    path: Path, rows: Sequence[Mapping[str, Any]], environment: Mapping[str, str], peers: Mapping[str, str]
) -> None:
    """The records with the machine and the versions repeated on every line, so that files can be joined."""
    versions = {f"version_{name}": version for name, version in peers.items()}
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, *environment, *versions], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **environment, **versions} for row in rows)
