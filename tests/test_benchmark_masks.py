"""The benchmark preset `masks`: what its rows mean, how peers are told, what its table shows."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kittens_torch
from benchmarks import correctness, inputs, masked_peers, masks, measure, peers, presets, report, run, timing
from benchmarks.modifiers import NO_MODIFIERS
from kittens_torch import call
from kittens_torch import reference as specification

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SMALL = {shape.name: shape for shape in masks.PRESETS["masks-small"]().shapes}
DROPOUT = [name for name, shape in SMALL.items() if shape.dropout_p]
CERTAIN = [name for name in SMALL if name not in DROPOUT]
SAYABLE = [name for name, shape in SMALL.items() if masked_peers.refusal(shape, masked_peers.SAYABLE) is None]


@pytest.fixture(autouse=True)
def fallback_mode():
    before = kittens_torch.set_fallback("error")
    yield
    kittens_torch.set_fallback(before)


def inputs_of(shape, direction="fwd"):
    return inputs.make_inputs(shape, CPU, direction, torch.Generator().manual_seed(7))


def specified(shape, given, modifiers, operands=None):
    """The row by the package's specification, in float64."""
    query, key, value = operands or (tensor.double() for tensor in given.attended)
    return specification.attention(
        query,
        key,
        value,
        causal="upper_left" if shape.causal else None,
        window=modifiers.window,
        mask=modifiers.mask,
        bias=modifiers.bias,
        softcap=modifiers.softcap,
        alibi_slopes=modifiers.alibi_slopes,
        sinks=modifiers.sinks,
        kept=modifiers.kept,
        dropout_p=modifiers.dropout_p,
        scale=shape.scale,
    )[0]


# Rows


def test_rows_hold_16384_tokens_and_every_feature():
    preset = masks.masks()
    names = [shape.name for shape in preset.shapes]
    assert len(names) == len(set(names)) == 11
    assert {shape.batch * shape.length_q for shape in preset.shapes} == {16384}
    features = {feature for shape in preset.shapes for feature in shape.features}
    assert features == {"mask", "bias", "window", "soft cap", "ALiBi", "sinks", "dropout"}
    assert {shape.mask for shape in preset.shapes} - {""} == masks.MASKS.keys()
    assert {shape.dtype for shape in preset.shapes} == {torch.bfloat16}
    assert all(shape.own is not None and type(shape.own) is presets.Shape for shape in preset.shapes)


def test_the_small_preset_has_the_same_rows_in_small():
    large, small = masks.masks().shapes, masks.masks(64).shapes
    assert [shape.features for shape in large] == [shape.features for shape in small]
    for one, other in zip(large, small, strict=True):
        assert other.length_q * 64 == one.length_q
        assert one.own_work == pytest.approx(other.own_work, rel=0.1)


def test_work_relative_to_the_own_reference():
    work = {shape.name: shape.own_work for shape in masks.masks().shapes}
    window = sum(min(row + 1, 1024) for row in range(16384))
    assert work.pop("window 1024 in 16k") == pytest.approx(window / (16384**2 / 2))
    lengths = [2048 - 128 * batch for batch in range(8)]
    assert work.pop("left padding 32/8 heads in 2k") == pytest.approx(sum(n**2 for n in lengths) / (8 * 2048**2))
    assert set(work.values()) == {1.0}


@pytest.mark.parametrize("name", [name for name, shape in SMALL.items() if shape.mask])
def test_the_share_of_visible_pairs_is_that_of_the_mask(name):
    shape = SMALL[name]
    mask = inputs_of(shape).modifiers.mask
    assert mask.dtype == torch.bool
    shown = mask.expand(shape.batch, shape.heads, shape.length_q, shape.length_k).double().mean().item()
    # Half the diagonal of each causal block is what "causal counts half" leaves out.
    diagonal = 0.0 if shape.mask == "key padding" else 0.5 / shape.length_k
    assert shown == pytest.approx(shape.visible_share + diagonal, rel=0.03 if diagonal else 1e-12)


def test_masks_have_the_shapes_that_models_pass():
    sizes = {name: tuple(inputs_of(SMALL[name]).modifiers.mask.shape) for name in SMALL if SMALL[name].mask}
    assert set(sizes.values()) == {(1, 1, 256, 256), (2, 1, 1, 64), (4, 1, 32, 32)}
    (bias,) = (inputs_of(shape).modifiers.bias for shape in SMALL.values() if shape.bias == "heads")
    assert bias.shape == (1, 3, 8, 8) and bias.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in CERTAIN if SMALL[name].mask in ("documents", "key padding")])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_own_reference_does_the_same_work_on_the_same_numbers(name, direction):
    shape = SMALL[name]
    given = inputs_of(shape, direction)
    part = inputs.cut(given, shape.own)
    whole = specified(shape, given, given.modifiers)
    alone = specified(shape.own, part, NO_MODIFIERS)
    if shape.documents > 1:
        alone = alone.unflatten(0, (shape.batch, -1)).transpose(1, 2).flatten(2, 3)
    torch.testing.assert_close(whole, alone)
    assert part.query.is_contiguous() and part.key.shape[2] == shape.own.length_k
    assert (part.grad_output is None) == (direction == "fwd")


def test_padding_rows_get_no_gradient():
    (shape,) = (shape for shape in SMALL.values() if shape.mask == "left padding")
    given = inputs_of(shape, "bwd")
    blind = given.modifiers.blind_rows()
    assert int(blind.sum()) == sum(masks.left_padding(shape))
    assert not given.grad_output.masked_select(blind).any()
    assert given.grad_output.masked_select(~blind).all()


# The reference


@pytest.mark.parametrize("name", CERTAIN)
def test_the_formula_is_the_specification(name):
    shape = replace(SMALL[name], dtype=torch.float32)
    given = inputs_of(shape)
    reference = correctness.Reference(shape, given)
    torch.testing.assert_close(
        reference.torch[0].double(), specified(shape, given, given.modifiers), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", CERTAIN)
def test_the_gradients_of_the_formula_are_those_of_the_specification(name):
    shape = replace(SMALL[name], dtype=torch.float32)
    given = inputs_of(shape, "bwd")
    with torch.enable_grad():
        operands = tuple(tensor.double().requires_grad_() for tensor in given.attended)
        modifiers = given.modifiers.differentiated(torch.float64)
        output = specified(shape, given, modifiers, operands)
        expected = torch.autograd.grad(output, (*operands, *modifiers.leaves), given.grad_output.double())
    reference = correctness.Reference(shape, given)
    assert len(reference.torch) == len(expected) == 3 + len(modifiers.leaves)
    for found, exact in zip(reference.torch, expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-4)
    assert all(index < 3 for index, *_ in reference.samples)


def test_gradients_of_bias_and_sinks_are_checked():
    for name, shape in SMALL.items():
        if shape.bias == "heads" or shape.sinks:
            reference = correctness.Reference(shape, inputs_of(shape, "bwd"))
            results = tuple(tensor.to(shape.dtype) for tensor in reference.torch)
            assert len(results) == 4
            assert reference.check(results).passed, name
            assert not reference.check((*results[:3], results[3] * 1.1)).passed, name


@pytest.mark.parametrize("name", SAYABLE)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_torch_agrees(name, direction):
    shape = SMALL[name]
    given = inputs_of(shape, direction)
    peer = masked_peers.sdpa_peer("math", masked_peers.SDPBackend.MATH)
    with torch.set_grad_enabled(direction == "bwd"):
        reference = None if shape.dropout_p else correctness.Reference(shape, given)
        verdict = correctness.judge(peer, shape, given, reference)
    assert verdict.passed, verdict


def forgetful(name):
    """A peer that leaves out what the row adds."""

    def attention(query, key, value, shape, modifiers):
        causal = "upper_left" if shape.causal else None
        return kittens_torch.attention(query, key, value, causal=causal, scale=shape.scale)

    return masked_peers.MaskedPeer(name, "1", attention)


@pytest.mark.parametrize("name", SMALL)
def test_a_peer_that_leaves_out_what_the_row_adds_is_wrong(name):
    shape = SMALL[name]
    given = inputs_of(shape)
    reference = None if shape.dropout_p else correctness.Reference(shape, given)
    verdict = correctness.judge(forgetful("forgetful"), shape, given, reference)
    assert not verdict.passed
    assert (verdict.reason == "share of kept weights") == bool(shape.dropout_p)


@pytest.mark.parametrize("name", DROPOUT)
def test_what_a_peer_drops_is_recovered(name):
    shape = SMALL[name]
    given = inputs_of(shape)
    generator = torch.Generator().manual_seed(3)
    dropped = torch.rand(shape.batch, shape.heads, shape.length_q, shape.length_k, generator=generator) < 0.1

    def attention(query, key, value, shape, modifiers):
        scores = (query.float() @ key.float().mT) * shape.softmax_scale
        if shape.causal:
            scores += torch.full_like(scores, float("-inf")).triu(1)
        return (scores.softmax(-1).masked_fill(dropped, 0.0) / 0.9 @ value.float()).to(query.dtype)

    peer = masked_peers.MaskedPeer("fixed", "1", attention)
    seen = torch.ones_like(dropped).tril() if shape.causal else torch.ones_like(dropped)
    kept = correctness.recovered_dropout(peer, shape, given)
    torch.testing.assert_close(kept & seen, ~dropped & seen)
    assert correctness.judge(peer, shape, given, None).passed
    assert not correctness.judge(replace(peer, attention=lambda *a: attention(*a) * 1.02), shape, given, None).passed


# Peers


@pytest.mark.parametrize("name", SMALL)
def test_ours_is_right_on_every_row(name):
    shape = SMALL[name]
    given = inputs_of(shape)
    reference = None if shape.dropout_p else correctness.Reference(shape, given)
    verdict = correctness.judge(masked_peers.load_kittens(), shape, given, reference)
    assert verdict.passed, verdict


@pytest.mark.skipif(
    not hasattr(torch.ops.kittens_torch, "backward_modified"), reason="this build has no gradients of modified scores"
)
@pytest.mark.parametrize("name", SMALL)
def test_our_gradients_are_right_on_every_row(name):
    shape = SMALL[name]
    given = inputs_of(shape, "bwd")
    with torch.enable_grad():
        reference = None if shape.dropout_p else correctness.Reference(shape, given)
        verdict = correctness.judge(masked_peers.load_kittens(), shape, given, reference)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", SAYABLE)
def test_the_drop_in_says_the_same(name, monkeypatch):
    monkeypatch.setattr(call, "torch_is_faster", lambda operands: False)
    shape = SMALL[name]
    given = inputs_of(shape)
    results = []
    for call_as, function in (
        (masked_peers.drop_in, kittens_torch.scaled_dot_product_attention),
        (masked_peers.own_signature, kittens_torch.attention),
    ):
        torch.manual_seed(11)
        results.append(call_as(function, *given.attended, shape, given.modifiers))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name, shape in SMALL.items() if shape.compiled])
def test_flex_attention_is_told_the_same(name):
    module = pytest.importorskip("torch.nn.attention.flex_attention")
    shape = SMALL[name]
    given = inputs_of(shape)
    flex = masked_peers.FlexAttention(module, lambda function, dynamic: function)
    reference = correctness.Reference(shape, given)
    verdict = correctness.judge(masked_peers.MaskedPeer("flex", "1", flex), shape, given, reference)
    assert verdict.passed, verdict
    prepared = flex.prepared
    flex(*given.attended, shape, given.modifiers)
    assert flex.prepared is prepared  # one compilation a row


def test_window_and_soft_cap_reach_fa3(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text(
        "calls = []\ndef flash_attn_func(q, k, v, **options):\n    calls.append(options)\n    return q + 1, 'lse'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    peer = masked_peers.load_fa3()
    told = sys.modules["flash_attn_interface"].calls
    del sys.modules["flash_attn_interface"]
    window, capped = (next(s for s in SMALL.values() if feature in s.features) for feature in ("window", "soft cap"))
    given = inputs_of(window)
    torch.testing.assert_close(peer.results(window, given)[0], given.query + 1)
    peer.results(capped, inputs_of(capped))
    assert told[0] == {"softmax_scale": None, "causal": False, "window_size": (15, 0)}
    assert told[1] == {"softmax_scale": 0.5, "causal": True, "softcap": 50.0}
    refused = {name for name, shape in SMALL.items() if peer.unsupported(shape, torch.device("cuda"), "fwd")}
    assert refused == SMALL.keys() - {window.name, capped.name}


def test_peers_refuse_what_their_signature_cannot_say():
    cuda = torch.device("cuda")
    by_feature = {shape.features: shape for shape in SMALL.values()}
    found = masked_peers.load_flex()
    assert found.unsupported(by_feature[("dropout",)], cuda, "fwd") == "has no argument for dropout"
    assert found.unsupported(by_feature[("sinks",)], cuda, "fwd") == "has no argument for sinks"
    assert "compilation" in found.unsupported(next(s for s in SMALL.values() if s.bias == "heads"), cuda, "fwd")
    assert {name for name, shape in SMALL.items() if found.unsupported(shape, cuda, "fwd") is None} == {
        name for name, shape in SMALL.items() if shape.compiled
    }
    cudnn = masked_peers.LOADERS["cudnn"]()
    assert {name for name, s in SMALL.items() if cudnn.unsupported(s, cuda, "fwd") is None} == set(SAYABLE)
    assert cudnn.unsupported(by_feature[("mask",)], CPU, "fwd") == "needs a CUDA device"
    math_rows = {
        s.name for s in masks.masks().shapes if masked_peers.LOADERS["math"]().unsupported(s, cuda, "fwd") is None
    }
    assert math_rows == {"T5 bias 512"}


# Measured rows and what is shown of them


def test_a_measured_row_and_its_table(tmp_path):
    (shape,) = (shape for shape in SMALL.values() if shape.mask == "key padding")
    cast = [masked_peers.load_kittens(), masked_peers.LOADERS["torch"](), forgetful("forgetful")]
    options = measure.Options(CPU, "fwd", 0.05, 3, torch.Generator().manual_seed(1))
    with torch.no_grad():
        row = measure.measure_row(shape, cast, options)
    assert row.timings.keys() == {"kittens", "torch"}
    assert row.wrong.keys() == {"forgetful"}
    assert row.own is not None and not row.skipped and not row.extra_bytes
    assert report.own_ratio(row) == pytest.approx(row.own.median / row.timings["kittens"].median)
    assert not run.failed_row(row)


def made_row(name):
    row = measure.Row(next(shape for shape in masks.masks().shapes if shape.name == name), "fwd")
    for peer, seconds in (("kittens", 2e-3), ("flex", 3e-3), ("cudnn", 9e-3)):
        row.timings[peer] = timing.Timing((seconds,) * 3, 1)
        row.verdicts[peer] = correctness.Verdict(0.5, 1.0)
    row.own = timing.Timing((1.8e-3,) * 3, 1)
    row.extra_bytes = {"kittens": 3 << 19, "flex": 1 << 20, "cudnn": 512 << 20}
    return row


def test_table_and_records(tmp_path):
    rows = [made_row("8 documents in 16k"), made_row("window 1024 in 16k")]
    preset = masks.masks()
    ceilings = report.Ceilings({"bf16": 700.0}, 4.0)
    head, documents, window = report.table(rows, preset, ceilings).splitlines()
    columns = "best peer  ratio  own reference   work  own ratio  MiB ours  MiB peer  % of GEMM"
    assert columns.split() == head[head.index("best peer") : head.index("MHz")].split()
    assert documents.split()[-11:-3] == ["±0.0%", "flex", "1.500", "1800", "1.000", "0.900", "1.5", "1.0"]
    share = rows[1].shape.own_work
    assert window.split()[-7:-5] == [f"{share:.3f}", f"{0.9 * share:.3f}"]
    found = report.records(rows, ceilings)
    assert {record["peer"]: record["extra_bytes"] for record in found[:3]} == rows[0].extra_bytes
    assert found[0]["ratio_to_own_reference"] == pytest.approx(0.9)
    assert found[1]["ratio_to_own_reference"] is None
    assert found[0]["own_reference"] == "each document alone" and found[0]["own_reference_us"] == pytest.approx(1800)
    assert found[3]["features"] == "window"
    report.write_csv(tmp_path / "a.csv", found, {}, {})
    with (tmp_path / "a.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 6
    plain = measure.Row(presets.standard().shapes[0], "fwd", timings=rows[0].timings, verdicts=rows[0].verdicts)
    assert "own ratio" not in report.table([plain], presets.standard(), ceilings)
    assert "own_work" not in report.records([plain], ceilings)[0]
    assert report.own_ratio(plain) is None


def test_plots_show_the_own_ratio(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    rows = [made_row("8 documents in 16k")]
    files = plots.draw(rows, masks.masks(), report.Ceilings({"bf16": 700.0}, 4.0), tmp_path, "masks_fwd", "X")
    assert [path.stem for path in files] == ["masks_fwd_time", "masks_fwd_ratio", "masks_fwd_own", "masks_fwd_gemm"]


def test_a_wrong_own_reference_fails_the_run():
    row = made_row("8 documents in 16k")
    assert not run.failed_row(row)
    row.wrong[measure.OWN_REFERENCE] = correctness.Verdict(2.0, 1.0)
    assert run.failed_row(row)
    assert any(text.startswith("own reference WRONG RESULT") for text in report.remarks([row]))


def test_arguments(capsys):
    args = run.parse(["--device", "cpu", "--preset", "masks-small"])
    assert (args.peers, args.seconds_per_row) == (["torch"], 1.0)
    assert run.parse(["--device", "cpu", "--preset", "cpu"]).seconds_per_row == 2.0
    assert run.parse(["--device", "cpu", "--preset", "masks", "--peers", "flex,fa3"]).peers == ["flex", "fa3"]
    with pytest.raises(SystemExit):
        run.parse(["--device", "cpu", "--preset", "masks", "--configurations", "all"])
    assert "only on rows without masks" in capsys.readouterr().err
    assert peers.load(["flex"])[1] == {"flex": "takes no part in this preset"}
    assert peers.load(["tk"], masked_peers.LOADERS)[1] == {"tk": "takes no part in this preset"}


def test_command(tmp_path):
    command = [sys.executable, "-m", "benchmarks.run", "--preset", "masks-small", "--filter", "T5|keys padding|window"]
    command += ["--peers", "torch,cudnn,tk", "--seconds-per-row", "0.05", "--commit", "abc", "--output", "results"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not here, skipped: tk: takes no part in this preset" in done.stdout
    assert "torch skipped: has no argument for window [window 16 in 256]" in done.stdout
    (file,) = (tmp_path / "results").glob("*.json")
    assert file.stem == "masks-small_fwd_T5-keys-padding-window"
    records = json.loads(file.read_text())["rows"]
    ours = [record for record in records if record["peer"] == "kittens"]
    assert [record["features"] for record in ours] == ["mask", "window", "bias"]
    assert all(record["ratio_to_own_reference"] > 0 and record["extra_bytes"] is None for record in ours)


@pytest.mark.gpu
def test_a_row_on_the_gpu():
    device = torch.device("cuda")
    (shape,) = (shape for shape in SMALL.values() if shape.mask == "documents")
    cast = [masked_peers.load_kittens(), masked_peers.LOADERS["efficient"]()]
    generator = torch.Generator(device=device).manual_seed(1)
    row = measure.measure_row(shape, cast, measure.Options(device, "fwd", 0.3, None, generator))
    assert not row.wrong and not row.skipped
    assert row.timings.keys() == row.extra_bytes.keys() - {measure.OWN_REFERENCE} == {"kittens", "efficient"}
    assert row.extra_bytes["kittens"] < 1 << 20
