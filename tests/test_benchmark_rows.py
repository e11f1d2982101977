"""What the benchmark command measures: checks of results, peers, and single rows."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

import kittens_torch
from benchmarks import correctness, measure, peers, presets, report, run, timing
from benchmarks.inputs import make_inputs

CPU = torch.device("cpu")


# Correctness


def small(**options):
    values = {"batch": 2, "heads": 4, "heads_k": 2, "length_q": 40, "length_k": 40, "head_dim": 16, "value_dim": 16}
    return presets.Shape("small", **(values | options))


def inputs_of(shape, direction="fwd"):
    return make_inputs(shape, CPU, direction, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_right_results_pass_and_damaged_ones_do_not(dtype, causal, direction):
    shape = small(dtype=dtype, causal=causal, scale=0.3)
    inputs = inputs_of(shape, direction)
    reference = correctness.Reference(shape, inputs)
    assert reference.torch is not None
    math_peer = peers.load_math()
    results = math_peer.results(shape, inputs)
    assert reference.check(results).passed
    for number in range(len(results)):
        damaged = [tensor.clone() for tensor in results]
        largest = int(damaged[number][-1, -1].norm(dim=-1).argmax())  # of a sampled head; all its rows are sampled
        damaged[number][-1, -1, largest] *= 1.5
        assert not reference.check(tuple(damaged)).passed
        damaged[number][-1, -1, largest] = float("nan")
        assert not reference.check(tuple(damaged)).passed


def test_a_head_outside_the_sample_is_compared_with_torch():
    shape = small(heads=32, heads_k=32, length_q=600, length_k=600, dtype=torch.float32)
    reference = correctness.Reference(shape, inputs_of(shape))
    sampled = {index[:2] for _, index, _, _ in reference.samples}
    assert (0, 5) not in sampled
    (output,) = peers.load_torch().results(shape, reference.inputs)
    assert reference.check((output,)).passed
    output[0, 5, 300] = output[0, 5, 299]
    verdict = reference.check((output,))
    assert not verdict.passed
    assert "worst row" in verdict.reason


def test_reference_gradients_in_blocks_match_autograd(monkeypatch):
    monkeypatch.setattr(correctness, "CHUNK_SCORES", 40 * 7)  # blocks of 7 rows, the last of 5
    shape = small(batch=1, heads=2, heads_k=1, dtype=torch.float64, causal=True)
    inputs = inputs_of(shape, "bwd")
    query, key, value = (tensor.clone().requires_grad_() for tensor in inputs.attended)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    expected = torch.autograd.grad(output, (query, key, value), inputs.grad_output)
    with torch.enable_grad():
        found = correctness.gradients(
            inputs.query[0], inputs.key[0, 0], inputs.value[0, 0], inputs.grad_output[0], shape, torch.float64
        )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0] if ours.dim() == 3 else theirs[0, 0], rtol=1e-10, atol=1e-12)


def test_spread_out_covers_both_ends():
    assert correctness.spread_out(3, 10) == [0, 1, 2]
    assert correctness.spread_out(101, 5) == [0, 25, 50, 75, 100]
    assert correctness.spread_out(9, 1) == [0]


# Peers


def blhd_attention(query, key, value, shape):
    """torch's attention in the other layout; refuses a tensor in the wrong one."""
    assert query.shape[1:3] == (shape.length_q, shape.heads)
    moved = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return peers.sdpa(*moved, shape).transpose(1, 2).contiguous()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_peer_gets_its_layout_and_its_results_come_back(direction):
    shape = small(length_q=24, length_k=40, dtype=torch.float32)
    inputs = inputs_of(shape, direction)
    peer = peers.Peer("blhd", "1", blhd_attention, layout="BLHD")
    expected = peers.load_torch().results(shape, inputs)
    found = peer.results(shape, inputs)
    assert len(found) == (1 if direction == "fwd" else 3)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_missing_peers_are_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libfoo.so: undefined symbol: bar')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    monkeypatch.setitem(sys.modules, "thunderkittens", None)
    found, missing = peers.load(["torch", "fa3", "tk"])
    assert [peer.name for peer in found] == ["torch"]
    assert missing["fa3"] == "OSError: libfoo.so: undefined symbol: bar"
    assert missing["tk"].startswith("ModuleNotFoundError")


def test_decoding_goes_to_the_decoding_entry_of_fa3(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text(
        "__version__ = '3.test'\n"
        "def flash_attn_func(q, k, v, softmax_scale=None, causal=False):\n    return q + 1, 'lse'\n"
        "def flash_attn_with_kvcache(q, k, v, softmax_scale=None, causal=False):\n    return q + 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    peer = peers.load_fa3()
    del sys.modules["flash_attn_interface"]
    assert peer.version == "3.test"
    for length, added in ((1, 2), (8, 1)):
        shape = small(length_q=length)
        inputs = inputs_of(shape)
        torch.testing.assert_close(peer.results(shape, inputs)[0], inputs.query + added)


def test_unsupported_shapes_are_refused_before_the_call():
    assert peers.load_cudnn().unsupported(small(), CPU, "fwd") == "needs a CUDA device"
    assert peers.half_on_cuda(small(dtype=torch.float32), torch.device("cuda"), "fwd") is not None
    assert peers.half_on_cuda(small(), torch.device("cuda"), "fwd") is None


@pytest.fixture
def fallback_as_before():
    """Loading our peer makes a fallback an error."""
    before = kittens_torch.set_fallback("warn")
    yield
    kittens_torch.set_fallback(before)


def test_the_deterministic_peer_asks_for_it(monkeypatch, fallback_as_before):
    asked = []

    def attention(query, key, value, deterministic=None, **options):
        asked.append(deterministic)
        return query

    monkeypatch.setattr(kittens_torch, "attention", attention)
    inputs = inputs_of(small())
    for peer in peers.load([peers.OURS, peers.DETERMINISTIC])[0]:
        peer.results(small(), inputs)
    assert asked == [None, True]


def test_a_badly_built_peer_is_doubted():
    assert "430" in peers.doubtful("fa3", "hd128 full 16384", "fwd", 430.0)
    assert peers.doubtful("fa3", "hd128 full 16384", "fwd", 655.0) is None
    assert peers.doubtful("cudnn", "hd128 full 16384", "fwd", 430.0) is None


# Rows


def options(direction="fwd"):
    return measure.Options(CPU, direction, 0.01, 3, torch.Generator().manual_seed(1))


def test_a_row_times_the_right_and_names_the_rest():
    def wrong(query, key, value, shape):
        return peers.sdpa(query, key, value, shape) * 1.1

    def broken(query, key, value, shape):
        raise ValueError("no such kernel\nsecond line")

    shape = small(dtype=torch.float32)
    cast = [
        peers.load_torch(),
        peers.Peer("wrong", "1", wrong),
        peers.Peer("broken", "1", broken),
        peers.load_cudnn(),
    ]
    row = measure.measure_row(shape, cast, options())
    assert row.timings.keys() == row.verdicts.keys() == {"torch"}
    assert len(row.timings["torch"].samples) == 3
    assert row.wrong.keys() == {"wrong"}
    assert row.skipped == {"broken": "ValueError: no such kernel", "cudnn": "needs a CUDA device"}
    assert row.tflops("torch") == pytest.approx(shape.flops("fwd") / row.timings["torch"].median / 1e12)
    texts = report.remarks([row, row])
    assert any(text.startswith("wrong WRONG RESULT") and "and 1 more" in text for text in texts)


def test_a_backward_row():
    row = measure.measure_row(small(dtype=torch.float32), [peers.load_torch(), peers.load_math()], options("bwd"))
    assert row.timings.keys() == {"torch", "math"}
    assert not row.wrong and not row.skipped


def timed(seconds):
    return timing.Timing((seconds, seconds, seconds), 1)


def test_the_deterministic_pass_is_set_against_the_default_and_no_peer():
    rows = [measure.Row(presets.square(name, 1, 2, 1024, 64, False), "bwd") for name in ("one", "two", "three")]
    for row, cost in zip(rows, (1.1, 1.6, None), strict=True):
        row.timings = {"kittens": timed(2e-3), "torch": timed(3e-3)}
        if cost:
            row.timings[peers.DETERMINISTIC] = timed(cost * 2e-3)
        row.verdicts = {name: correctness.Verdict(0.5, 1.0) for name in row.timings}
    rows[1].timings["torch"] = timed(4e-3)
    assert [report.best_peer(row) for row in rows] == ["torch"] * 3, "in one row it is the fastest beside ours"
    assert report.summarize(rows).by_peer.keys() == {"torch"}
    preset = presets.Preset("made", tuple(row.shape for row in rows), unit="us")
    ceilings = report.Ceilings({"bf16": 1.0}, 0.5)
    head, one, two, three = report.table(rows, preset, ceilings).splitlines()
    assert "ratio  deterministic / default" in head
    assert one.split()[-6:-3] == ["torch", "1.500", "1.100"] and two.split()[-6:-3] == ["torch", "2.000", "1.600"]
    assert three.split()[-6:-3] == ["torch", "1.500", "-"]
    assert report.configuration_table(rows, preset) == ""
    assert report.deterministic_text(rows).endswith("over 2 rows: mean 1.327, highest 1.600 (two)")
    assert report.deterministic_text(rows[2:]) == ""
    costs = {(record["row"], record["peer"]): record["time_over_default"] for record in report.records(rows, ceilings)}
    assert costs["one", peers.DETERMINISTIC] == pytest.approx(1.1) and costs["one", "kittens"] is None
    rows[2].skipped[peers.DETERMINISTIC] = "RuntimeError: made"
    assert run.failed_row(rows[2]) and not run.failed_row(rows[0])
    assert report.not_timed(rows[2]) == {peers.DETERMINISTIC: "skipped: RuntimeError: made"}


def test_a_backward_row_of_ours(fallback_as_before):
    cast, missing = peers.load([peers.OURS, peers.DETERMINISTIC, "torch"])
    row = measure.measure_row(small(dtype=torch.float32), cast, options("bwd"))
    assert not missing and not row.wrong and not row.skipped
    assert report.deterministic_cost(row) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("graph", [False, True])
def test_a_row_on_the_gpu(direction, graph):
    device = torch.device("cuda")
    shape = small(heads=16, heads_k=16, length_q=512, length_k=512, head_dim=64, value_dim=64, graph=graph, cold=graph)
    generator = torch.Generator(device=device).manual_seed(1)
    cast = [peers.load_torch(), peers.load_fa2()]
    row = measure.measure_row(shape, cast, measure.Options(device, direction, 0.3, None, generator))
    assert not row.wrong and not row.skipped
    assert row.timings.keys() == {"torch", "fa2"}
    assert row.input_sets > 1 if graph else row.input_sets == 1
    # Nothing is faster than twice the chip's peak, and 3 GFLOP take less than a millisecond.
    assert all(1.0 < row.tflops(name) < 2000.0 for name in row.timings)
