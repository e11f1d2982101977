"""PNG plots of measured rows. Needs matplotlib; nothing else here does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .host import HostTime
from .measure import Row
from .peers import DETERMINISTIC, OURS
from .presets import Preset, Shape, length_label, mask_name
from .report import Ceilings, best_peer, in_unit, own_ratio, peers_of, percent_of_copy, percent_of_gemm, ratio

# Colours that stay apart for colour-blind readers; a peer keeps its own in every plot.
COLOURS = {
    OURS: "#D55E00",
    "cudnn": "#009E73",
    "fa3": "#0072B2",
    "fa2": "#56B4E9",
    "torch": "#7F7F7F",
    "fa4": "#CC79A7",
    "tk": "#E69F00",
    "efficient": "#8C6D31",
    "math": "#222222",
    "flex": "#332288",
    DETERMINISTIC: "#F0C27B",
}
MARKERS = {OURS: "o", "cudnn": "s", "fa3": "^", "fa2": "v", "torch": "x", "fa4": "D", "tk": "P", "flex": "*"}
GRID = {"color": "#DDDDDD", "linewidth": 0.6}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    """A figure outside pyplot's global state, and its axes as an array of (rows, columns)."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def tidy(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(**GRID)
    axes.set_axisbelow(True)


def style(peer: str) -> dict[str, Any]:
    ours = peer == OURS
    return {
        "color": COLOURS.get(peer, "#444444"),
        "marker": MARKERS.get(peer, "."),
        "linewidth": 2.4 if ours else 1.4,
        "markersize": 6 if ours else 5,
        "zorder": 3 if ours else 2,
        "label": peer,
    }


def family(shape: Shape) -> tuple[int, bool]:
    """Rows of one family differ only in length."""
    return shape.head_dim, shape.causal


def lines_by_length(
    rows: Sequence[Row], title: str, label: str, curves: Sequence[str], value: Callable[[Row, str], float | None],
    level: float | None = None,
) -> Any:  # fmt: skip
    """One panel per head dim (columns) and mask (lines), a line per curve over the length."""
    dims = sorted({row.shape.head_dim for row in rows})
    masks = sorted({row.shape.causal for row in rows})
    options = {"sharex": True, "sharey": True}
    figure, panels = new_figure(3.9 * len(dims) + 0.6, 3.0 * len(masks) + 0.8, len(masks), len(dims), **options)
    for line, causal in enumerate(masks):
        for column, dim in enumerate(dims):
            axes = panels[line][column]
            chosen = sorted((r for r in rows if family(r.shape) == (dim, causal)), key=lambda r: r.shape.length_q)
            lengths = [row.shape.length_q for row in chosen]
            for peer in curves:
                points = [(n, y) for n, row in zip(lengths, chosen, strict=True) if (y := value(row, peer)) is not None]
                if points:
                    axes.plot(*zip(*points, strict=True), **style(peer))
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [length_label(length) for length in lengths])
            axes.set_title(f"head dim {dim}, {mask_name(causal)}", fontsize=10)
            tidy(axes)
            if level is not None:
                axes.axhline(level, color="#333333", linewidth=1)
    for axes in panels[-1]:
        axes.set_xlabel("sequence length")
    for axes in panels[:, 0]:
        axes.set_ylabel(label)
    if level is None:
        panels[0][0].set_ylim(bottom=0)
    add_legend(figure, panels)
    figure.suptitle(title, fontsize=12)
    return figure


def add_legend(figure: Any, panels: Any) -> None:
    """One legend for all panels, right of them."""
    found: dict[str, Any] = {}
    for axes in panels.flat:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(text, handle)
    if len(found) > 1:
        figure.legend(found.values(), found.keys(), loc="outside right upper", frameon=False)


def dots_by_row(
    rows: Sequence[Row], title: str, label: str, curves: Sequence[str], value: Callable[[Row, str], float | None],
    level: float | None = None, logarithmic: bool = False,
) -> Any:  # fmt: skip
    """A line of dots per row, one dot per curve: for rows that are no series."""
    figure, panels = new_figure(8.5, 1.6 + 0.27 * len(rows))
    axes = panels[0][0]
    for peer in curves:
        points = [(y, i) for i, row in enumerate(rows) if (y := value(row, peer)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), **(style(peer) | {"linewidth": 0}))
    axes.set_yticks(range(len(rows)), [row.shape.name for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)
    tidy(axes)
    if logarithmic:
        axes.set_xscale("log")
        plain = importlib.import_module("matplotlib.ticker").FuncFormatter(lambda number, _: f"{number:g}")
        axes.xaxis.set_major_formatter(plain)
    elif level is None:
        axes.set_xlim(left=0)
    if level is not None:
        axes.axvline(level, color="#333333", linewidth=1)
    add_legend(figure, panels)
    figure.suptitle(title, fontsize=12)
    return figure


def host_bars(times: Sequence[HostTime], title: str) -> Any:
    figure, panels = new_figure(8.5, 1.4 + 0.35 * len(times))
    axes = panels[0][0]
    values = [time.timing.median * 1e6 for time in times]
    colours = [COLOURS[OURS] if time.name.startswith(OURS) else COLOURS["torch"] for time in times]
    bars = axes.barh([time.name for time in times], values, color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("host time per eager call (us)")
    tidy(axes)
    axes.grid(axis="y", visible=False)
    figure.suptitle(title, fontsize=12)
    return figure


def save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def draw(rows: Sequence[Row], preset: Preset, ceilings: Ceilings, output: Path, stem: str, machine: str) -> list[Path]:
    """Speed, ratio to the best peer and percent of the ceiling, as files ``stem_*.png``."""
    rows = [row for row in rows if row.timings]
    if not rows:
        return []
    direction = {"fwd": "forward", "bwd": "backward"}[rows[0].direction]
    chart = lines_by_length if preset.by_length else dots_by_row
    about = f"{preset.name} {direction}, {machine}"
    peers = peers_of(rows)

    def speed(row: Row, peer: str) -> float | None:
        return in_unit(row, peer, preset.unit) if peer in row.timings else None

    def against_best(row: Row, peer: str) -> float | None:
        return ratio(row, best_peer(row))

    percent = percent_of_copy if preset.memory_bound else percent_of_gemm
    ceiling = "a copy's bytes per second" if preset.memory_bound else "the GEMM"

    def share(row: Row, peer: str) -> float | None:
        return percent(row, peer, ceilings) if peer in row.timings else None

    speed_label, speed_name = {
        "us": ("time per call (us)", "time"),
        "TFLOP/s": ("TFLOP/s", "tflops"),
        "GFLOP/s": ("GFLOP/s", "gflops"),
    }[preset.unit]
    options = {} if preset.by_length else {"logarithmic": preset.unit == "us"}
    files = [save(chart(rows, about, speed_label, peers, speed, **options), output / f"{stem}_{speed_name}.png")]
    if any(against_best(row, OURS) is not None for row in rows):
        title = f"{about}: ratio to the best peer of each row"
        figure = chart(rows, title, "best peer's time / ours", [OURS], against_best, level=1.0)
        files.append(save(figure, output / f"{stem}_ratio.png"))
    if any(own_ratio(row) is not None for row in rows):
        title = f"{about}: ratio to the same work of ours without what the row adds"
        figure = chart(rows, title, "own reference's time / ours", [OURS], lambda row, _: own_ratio(row), level=1.0)
        files.append(save(figure, output / f"{stem}_own.png"))
    if any(share(row, peer) is not None for row in rows for peer in peers):
        title = f"{about}: percent of {ceiling} in the same run"
        figure = chart(rows, title, f"% of {ceiling}", peers, share)
        files.append(save(figure, output / f"{stem}_{'copy' if preset.memory_bound else 'gemm'}.png"))
    return files


def draw_host(times: Sequence[HostTime], output: Path, stem: str, machine: str) -> list[Path]:
    return [save(host_bars(times, f"host time, {machine}"), output / f"{stem}_time.png")] if times else []
