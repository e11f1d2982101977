"""The benchmark command: arithmetic of timings and ratios, presets, files, host times, whole runs."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import correctness, host, measure, plots, presets, report, run, timing
from benchmarks.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


# Timing


class Scripted:
    """A sampler whose calls take a fixed time; notes who was asked, in a list shared with others."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, seconds, log

    def sample(self, calls):
        self.log.append((self.name, calls))
        return self.seconds


def rounds(log, estimates):
    """The names asked after the estimates of three samplers."""
    return "".join(name for name, _ in log[estimates:])


def test_interleave_rotates_the_order_and_fills_samples():
    log = []
    samplers = {name: Scripted(name, seconds, log) for name, seconds in (("a", 0.002), ("b", 0.005), ("c", 0.05))}
    timings = timing.interleave(samplers, seconds=1000.0, repeats=7)
    assert rounds(log, 3) == "abc" + "bca" + "cab" + "cba" + "acb" + "bac" + "abc"
    assert {name: t.calls for name, t in timings.items()} == {"a": 10, "b": 4, "c": 1}  # of SAMPLE_SECONDS = 20 ms
    assert timings["b"].samples == (0.005,) * 7


def test_interleave_asks_short_calls_twice_for_an_estimate():
    log = []
    timing.interleave({"a": Scripted("a", 1e-5, log)}, seconds=1.0, repeats=1, maximum_calls=100)
    assert log == [("a", 1), ("a", 10), ("a", 100)]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, timing.MINIMUM_REPEATS), (0.21, 10), (100.0, timing.MAXIMUM_REPEATS)],
)
def test_repeats_follow_the_time_within_bounds(seconds, expected):
    log = []
    samplers = {name: Scripted(name, 0.01, log) for name in "ab"}
    # Two peers: samples shrink to fit MINIMUM_REPEATS of both, then rounds fill the time.
    assert timing.repeats_within(seconds, 0.02) == expected
    if seconds:
        timings = timing.interleave(samplers, seconds=seconds)
        total = len(timings["a"].samples) * 2 * timings["a"].calls * 0.01
        assert total <= seconds
        assert len(timings["a"].samples) >= timing.MINIMUM_REPEATS


def test_median_and_spread():
    sample = timing.Timing((4.0, 1.0, 2.0, 3.0, 100.0), 1)
    assert sample.median == 3.0
    assert sample.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert timing.Timing((2.0,), 1).spread == 0.0


def test_clock_sampler_divides_by_the_calls():
    now = iter((10.0, 13.0))
    calls = []
    assert timing.ClockSampler(lambda: calls.append(1), clock=lambda: next(now)).sample(6) == 0.5
    assert len(calls) == 6


def test_host_sampler_waits_outside_the_clock():
    events = []
    ticks = iter((1.0, 2.0))

    def clock():
        events.append("clock")
        return next(ticks)

    sampler = timing.HostSampler(lambda: events.append("call"), lambda: events.append("wait"), clock)
    assert sampler.sample(2) == 0.5
    assert events == ["wait", "clock", "call", "call", "clock", "wait"]


def test_graphs_use_every_input_set_equally_often():
    assert timing.graph_calls(1) == 20
    assert timing.graph_calls(8) == 24
    order = []
    call = timing.rotating([lambda i=i: order.append(i) for i in range(3)])
    for _ in range(5):
        call()
    assert order == [0, 1, 2, 0, 1]


# Presets


def test_standard_preset():
    shapes = presets.standard().shapes
    assert len(shapes) == len({shape.name for shape in shapes}) == 36
    assert {shape.batch * shape.length_q for shape in shapes} == {16384}
    assert {shape.heads * shape.head_dim for shape in shapes} == {2048}
    by_name = {shape.name: shape for shape in shapes}
    full, causal = by_name["hd128 full 16384"], by_name["hd128 causal 16384"]
    assert full.flops("fwd") == 4 * 16384**2 * 2048
    assert causal.flops("fwd") == full.flops("fwd") / 2
    assert full.flops("bwd") == 2.5 * full.flops("fwd")
    assert full.bytes("fwd") == 4 * 16384 * 2048 * 2


def test_flops_and_bytes_with_grouped_heads_and_another_value_dim():
    shape = presets.Shape("x", 2, 8, 2, 3, 5, 192, 128, dtype=torch.float16)
    assert shape.flops("fwd") == 2 * 2 * 8 * 3 * 5 * (192 + 128)
    assert shape.flops("bwd") == 2 * 2 * 8 * 3 * 5 * (3 * 192 + 2 * 128)
    assert shape.bytes("fwd") == 2 * (2 * 8 * 3 * (192 + 128) + 2 * 2 * 5 * (192 + 128))


def test_models_preset_measures_or_names_every_row():
    with presets.MODELS_FILE.open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    preset = presets.models()
    measured = {shape.name: shape for shape in preset.shapes}
    assert measured.keys() | preset.skipped.keys() == rows.keys()
    assert not measured.keys() & preset.skipped.keys()
    unmasked = {name for name, row in rows.items() if row["mask"] in ("none", "causal") and int(row["Dqk"]) <= 256}
    assert measured.keys() == unmasked | {"gemma3-27b global"}  # whose only extra is a scale
    assert measured["gemma3-27b global"].softmax_scale == pytest.approx(1 / math.sqrt(168))
    assert preset.skipped["MLA absorbed decode"] == "head dim 576 is above 256"
    assert preset.skipped["mistral-7b-v0.1"] == "not covered yet: window 4096"
    assert preset.skipped["bert-base"] == "not covered yet: key padding"
    decode = measured["llama3-8b decode"]
    assert (decode.graph, decode.cold, decode.training, decode.causal) == (True, True, False, False)
    pretrain = measured["llama3-8b pretrain"]
    assert (pretrain.graph, pretrain.cold, pretrain.training, pretrain.causal) == (False, False, True, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", (False, None)),
        ("causal", (True, None)),
        ("causal, scale 4^-0.5", (True, 0.5)),
        ("causal, scale 1.0", (True, 1.0)),
        ("causal + softcap 50", None),
        ("causal, dropout 0.1", None),
        ("bool [B,1,1,Lk]", None),
    ],
)
def test_parse_mask(text, expected):
    assert presets.parse_mask(text) == expected


def test_small_presets():
    assert [len(presets.PRESETS[name]().shapes) for name in ("short", "decode", "cpu")] == [13, 6, 16]
    assert all(shape.graph for shape in (*presets.short().shapes, *presets.decode().shapes))
    assert {(shape.heads, shape.heads_k, shape.length_q) for shape in presets.decode().shapes} == {(32, 8, 1)}


def test_cold_rows_rotate_over_twice_the_cache():
    shape = presets.decode().shapes[0]
    assert shape.bytes("fwd") == pytest.approx(16.8e6, rel=0.01)
    assert presets.input_sets(shape, 50_000_000) == 6
    assert presets.input_sets(shape, 0) == 1
    assert presets.input_sets(presets.short().shapes[0], 50_000_000) == 1


def test_filter_and_direction():
    assert len(presets.standard().filtered("hd128 causal").shapes) == 6
    assert [s.name for s in presets.standard().filtered(r"hd64 .* 512$").shapes] == ["hd64 full 512", "hd64 causal 512"]
    backward = run.select(presets.models(), "bwd")
    assert backward.skipped["llama3-8b decode"] == "inference only"
    assert all(shape.training for shape in backward.shapes)
    assert "llama3-8b pretrain" in {shape.name for shape in backward.shapes}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 2, 2, 3, 4, 8, 8, True), "causal shapes are square"), ((1, 3, 2, 4, 4, 8, 8), "heads 3 must be a multiple")],
)
def test_impossible_shapes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        presets.Shape("x", *sizes)


# Report and plots


def made_row(name, times, **shape_options):
    """A row with the given seconds per call of each peer."""
    shape = presets.square(name, 1, 2, 1024, 64, False, **shape_options)
    row = measure.Row(shape, "fwd")
    for peer, seconds in times.items():
        row.timings[peer] = timing.Timing((seconds, seconds, seconds), 4)
        row.verdicts[peer] = correctness.Verdict(0.5, 1.0)
    return row


ROWS = [
    made_row("first", {"kittens": 2.0e-3, "torch": 3.0e-3, "fa3": 2.5e-3, "kittens[0]": 1.0e-3, "kittens[2]": 4.0e-3}),
    made_row("second", {"kittens": 2.0e-3, "torch": 1.6e-3, "kittens[2]": 2.0e-3}),
    made_row("third", {"torch": 1.0e-3}),
]
CEILINGS = report.Ceilings({"bf16": 1.0}, 0.5)


def test_summary():
    summary = report.summarize(ROWS)
    assert report.best_peer(ROWS[0]) == "fa3"
    assert (summary.rows, summary.lowest_row, summary.highest_row) == (2, "second", "first")
    assert (summary.lowest, summary.highest) == pytest.approx((0.8, 1.25))
    assert summary.geometric_mean == pytest.approx(1.0)
    assert summary.by_peer == pytest.approx({"torch": math.sqrt(1.5 * 0.8), "fa3": 1.25})
    assert report.summarize(ROWS[2:]) is None


def test_table():
    preset = presets.Preset("made", tuple(row.shape for row in ROWS), unit="us")
    head, first, second, third = report.table(ROWS, preset, CEILINGS).splitlines()
    assert head.split()[2:5] == ["kittens", "torch", "fa3"]
    share = 100 * 4 * 2 * 1024**2 * 64 / 2e-3 / 1e12
    times = ["2000", "±0.0%", "3000", "±0.0%", "2500", "±0.0%"]
    assert first.split() == ["first", *times, "fa3", "1.250", f"{share:.1f}", "-", "-"]
    assert second.split()[-5:-3] == ["torch", "0.800"]
    assert third.split() == ["third", "-", "1000", "±0.0%", "-", "torch", "-", "-", "-", "-"]
    tuning = report.configuration_table(ROWS, preset).splitlines()
    assert tuning[1].split() == ["first", "1000*", "4000", "2000", "2.000"]
    assert tuning[2].split() == ["second", "-", "2000*", "2000", "1.000"]


@pytest.mark.parametrize(
    ("value", "text"), [(736.4, "736"), (73.64, "73.6"), (7.364, "7.36"), (0.01234, "0.0123"), (12345.6, "12346")]
)
def test_digits(value, text):
    assert report.digits(value) == text


def test_json_and_csv_hold_the_same_records(tmp_path):
    found = report.records(ROWS, CEILINGS)
    assert len(found) == 9
    document = report.document({"gpu": "X"}, {"torch": "2"}, {"preset": "made"}, found)
    report.write_json(tmp_path / "a.json", document)
    report.write_csv(tmp_path / "a.csv", found, {"gpu": "X"}, {"torch": "2"})
    assert json.loads((tmp_path / "a.json").read_text()) == document
    with (tmp_path / "a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    ours = lines[0]
    assert (ours["row"], ours["peer"], ours["gpu"], ours["version_torch"]) == ("first", "kittens", "X", "2")
    assert float(ours["ratio_to_best_peer"]) == pytest.approx(1.25)
    assert float(ours["median_us"]) == pytest.approx(2000)
    assert lines[1]["ratio_to_best_peer"] == ""


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    standard = presets.standard().filtered("hd64 full (512|1024)$")
    rows = [measure.Row(shape, "fwd") for shape in standard.shapes]
    for row in rows:
        row.timings = {"kittens": timing.Timing((1e-3,), 1), "torch": timing.Timing((2e-3,), 1)}
    files = plots.draw(rows, standard, CEILINGS, tmp_path, "standard_fwd", "X")
    other = presets.Preset("made", tuple(row.shape for row in ROWS), unit="us", memory_bound=True)
    files += plots.draw(ROWS, other, CEILINGS, tmp_path, "made_fwd", "X")
    names = ["standard_fwd_tflops", "standard_fwd_ratio", "standard_fwd_gemm"]
    names += ["made_fwd_time", "made_fwd_ratio", "made_fwd_copy"]
    assert [path.stem for path in files] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in files)


def test_progress_without_tqdm_writes_one_line_per_row(capsys):
    with Progress(2, use_tqdm=False) as progress:
        progress.begin("one")
        progress.finish()
        progress.begin("two")
    lines = capsys.readouterr().err.splitlines()
    assert [line[:5] for line in lines] == ["[0/2]", "[1/2]"]
    assert lines[1].endswith("two")


# Host times


def test_host_times(monkeypatch):
    class Ours:
        @staticmethod
        def scaled_dot_product_attention(query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

        attention = scaled_dot_product_attention

    monkeypatch.setattr(host, "require", lambda name: Ours)
    monkeypatch.setattr(torch.ops, "kittens_torch", None)
    times, missing = host.measure_host(CPU, 0.05, 3, lambda name: None)
    assert missing.keys() == {"kittens op"}
    found = {record["call"]: record for record in report.host_records(times)}
    ours, theirs = found["kittens sdpa"], found["F.sdpa"]
    assert ours["times_F.sdpa"] == pytest.approx(ours["median_us"] / theirs["median_us"])
    assert "times_torch.add" in ours
    backward = found["kittens sdpa forward and backward"]
    assert backward.keys() & {"times_torch.add", "times_F.sdpa"} == set()
    assert "times_F.sdpa forward and backward" in backward
    assert "x F.sdpa with grad" in report.host_table(times)


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "torch,fa9"], "unknown 'fa9', allowed are torch, cudnn"),
        (["--peers", "kittens"], "unknown 'kittens'"),
        (["--peers", "torch,deterministic"], "in the backward pass alone"),
        (["--configurations", "0;3"], "'0;3' is neither 'all' nor numbers"),
        (["--configurations", "all", "--pass", "bwd"], "only the forward pass"),
        (["--repeats", "0"], "0 must be at least 1"),
        (["--seconds-per-row", "nan"], "nan must be above 0"),
        (["--threads", "0"], "0 must be at least 1"),
        (["--filter", "("], "not a regular expression"),
        (["--preset", "nothing"], "invalid choice"),
    ],
)
def test_bad_arguments_name_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run.parse(["--device", "cpu", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["standard", "models", "decode", "short", "masks"])
def test_sizes_of_a_gpu_are_not_started_on_a_cpu_unasked(preset, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [] if preset == "standard" else ["--preset", preset]  # the default
    with pytest.raises(SystemExit) as stop:
        run.parse(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert f"--preset {preset}: its sizes are a GPU's" in error
    assert "--preset cpu, masks-small or host, or --device cpu" in error
    assert run.parse([*arguments, "--device", "cpu"]).device == "cpu"
    for allowed in ("cpu", "masks-small", "host"):
        assert run.parse(["--preset", allowed]).device == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.parse(arguments).device == run.parse(["--preset", "masks-small"]).device == "cuda"
    assert run.parse(["--preset", "cpu"]).device == "cpu"


def test_partial_runs_do_not_take_the_name_of_a_whole_one():
    def stem(*arguments):
        return run.file_stem(run.parse(["--device", "cpu", *arguments]))

    assert stem("--preset", "standard") == "standard_fwd"
    assert stem("--preset", "standard", "--pass", "bwd") == "standard_bwd"
    assert stem("--preset", "host") == "host"
    assert stem("--preset", "short", "--filter", "hd128 (full|causal)$") == "short_fwd_hd128-full-causal"
    assert stem("--preset", "cpu", "--configurations", "0,1") == "cpu_fwd_configurations"


# Stands for the package: torch's attention, times a factor, behind the functions and the op the command calls.
STAND_IN = """
import torch
import torch.nn.functional as F

def set_fallback(mode):
    assert mode == "error"

def build_info():
    return {{"version": "0.stand-in"}}

def attention(query, key, value, causal=None, scale=None):
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal == "upper_left", scale=scale) * {factor}

def forward(query, key, value, scale, corner, window_left, window_right, configuration=-1):
    if configuration not in (0, 3):
        raise RuntimeError(f"configuration {{configuration}} is not in the table")
    output = attention(query, key, value, "upper_left" if corner else None, scale)
    return output, torch.zeros(query.shape[:3])

library = torch.library.Library("kittens_torch", "DEF")
library.define("forward(Tensor query, Tensor key, Tensor value, float scale, int corner, int window_left, "
               "int window_right, int configuration=-1) -> (Tensor, Tensor)")
library.impl("forward", forward, "CPU")
"""


def test_an_empty_selection_is_an_error(capsys):
    assert run.main(["--device", "cpu", "--preset", "decode", "--pass", "bwd"]) == 2
    assert "preset 'decode' has no row to measure for --pass bwd" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.01, 1)])
def test_command(tmp_path, factor, status):
    package = tmp_path / "kittens_torch"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN.format(factor=factor))
    command = [sys.executable, "-m", "benchmarks.run", "--preset", "cpu", "--filter", "hd64 causal 1024 fp32"]
    command += ["--peers", "torch,cudnn,tk", "--configurations", "all", "--seconds-per-row", "0.1", "--commit", "abc"]
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--output", "results"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "not here, skipped: tk: ModuleNotFoundError" in done.stdout
    found = json.loads((tmp_path / "results" / "cpu_fwd_configurations_hd64-causal-1024-fp32.json").read_text())
    timed = {record["peer"]: record for record in found["rows"]}
    assert found["environment"]["commit"] == "abc"
    assert found["environment"]["torch"] == torch.__version__
    assert found["peers"]["kittens"] == "0.stand-in"
    assert found["not_timed"]["hd64 causal 1024 fp32"]["cudnn"] == "skipped: needs a CUDA device"
    if status:
        assert "kittens WRONG RESULT" in done.stdout
        assert timed.keys() == {"torch"}
        return
    assert timed.keys() == {"kittens", "torch", "kittens[0]", "kittens[3]"}
    ratio = timed["torch"]["median_us"] / timed["kittens"]["median_us"]
    assert timed["kittens"]["ratio_to_best_peer"] == pytest.approx(ratio)
    assert found["summary"]["geometric_mean"] == pytest.approx(ratio)
    assert timed["kittens"]["percent_of_gemm"] > 0


def test_without_the_package_itself_the_command_fails(tmp_path):
    package = tmp_path / "kittens_torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('kittens_torch is not built here')")
    command = [sys.executable, "-m", "benchmarks.run", "--preset", "cpu", "--filter", "hd64 causal 1024 fp32"]
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--seconds-per-row", "0.05", "--commit", "abc"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not here, skipped: kittens: ImportError: kittens_torch is not built here" in done.stdout
