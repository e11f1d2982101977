"""The benchmark of whole models: its networks, that a wrong attention is found, and the command on small sizes."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing, variants, whole_models
from benchmarks.networks import Llama, heads_of, rotary_table, rotate
from benchmarks.variants import Attend, Variant
from kittens_torch import dispatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _ours_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_sizes_are_those_of_the_published_models() -> None:
    """Llama-3.2-1B has 1.236e9 weights, ViT-L/14 at 336 pixels 3.03e8 without a head, Flux.1 a double block of 3.4e8
    and single blocks of 1.42e8."""
    sizes = {}
    for task in whole_models.tasks(tiny=False):
        with torch.device("meta"):
            network = task.network(Attend())
        sizes[task.name] = sum(parameter.numel() for parameter in network.parameters())
    assert [round(size / 1e6) for size in sizes.values()] == [1236, 1236, 304, 304, 623]
    assert [task.tokens for task in whole_models.tasks(tiny=False)] == [8192, 8192, 32 * 577, 32 * 577, 4608]
    assert list(sizes)[2].endswith("32 x 577")


def test_llama_is_causal_and_knows_positions() -> None:
    network = Llama(Attend(), 2, 64, 4, 2, 96, 50)
    tokens = torch.randint(50, (1, 12))
    changed = tokens.clone()
    changed[0, 7] += 1 if tokens[0, 7] < 49 else -1
    mine, other = network.hidden(tokens), network.hidden(changed)
    torch.testing.assert_close(mine[:, :7], other[:, :7])
    assert (mine[:, 7:] - other[:, 7:]).abs().amax(dim=2).min() > 1e-4
    assert not torch.allclose(network(tokens), network(tokens.roll(1, dims=1).index_fill(1, torch.tensor([11]), 3)))


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(1, 1, 1, 16).expand(1, 1, 9, 16), torch.randn(1, 1, 1, 16).expand(1, 1, 9, 16)
    table = rotary_table(9, 16, 1e4, query)
    scores = rotate(query, table) @ rotate(key, table).transpose(2, 3)
    for distance in range(-8, 9):
        along = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert heads_of(torch.zeros(2, 9, 64), 4).shape == (2, 4, 9, 16)


def wrong(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    return F.scaled_dot_product_attention(query * 0.9, key, value, **settings)


def refusing(*operands: Tensor, **settings: Any) -> Tensor:
    raise NotImplementedError("not today")


@pytest.mark.parametrize("number", range(5))
def test_right_variants_are_timed_and_wrong_ones_are_not(number: int) -> None:
    task = whole_models.tasks(tiny=True)[number]
    loaded, _ = variants.load_all()
    others = [Variant("wrong", "1", wrong), Variant("refusing", "1", refusing)]
    row = whole_models.measure(task, [*loaded, *others], CPU, 0.05, 1)
    assert row.timings.keys() == {"torch", "kittens", "kittens enable()"}
    assert row.failed["wrong"].startswith("WRONG RESULT") and "not today" in row.failed["refusing"]
    for name in ("kittens", "kittens enable()"):
        assert 0 < row.differences[name] <= row.allowed < 1e-4, "another kernel ran, and it is right"
    assert row.differences["torch"] == 0 and row.ratio("torch") == 1


def test_a_variant_is_inside_its_samples_alone() -> None:
    attend, log = Attend(), []

    class Sampler:
        def sample(self, calls: int) -> float:
            log.append((attend.function, torch.nn.attention.current_flash_attention_impl(), calls))
            return 1.0

    ours, enabled = variants.load_ours(), variants.load_enabled()
    samplers = {one.name: whole_models.InsideVariant(one, attend, Sampler()) for one in (ours, enabled)}
    timing.interleave(samplers, seconds=1.0, repeats=1)
    torchs = F.scaled_dot_product_attention
    assert log == 2 * [(ours.function, None, 1), (torchs, "kittens", 1)]
    assert attend.function is torchs and torch.nn.attention.current_flash_attention_impl() is None


def test_difference_sees_nan_and_the_worst_tensor() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    assert whole_models.difference([one, two], [one, two]) == 0
    assert whole_models.difference([one, two + 0.5], [one, two]) == pytest.approx(0.5**0.5)
    found = whole_models.difference([one * float("nan"), two], [one, two])
    assert found != found


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--repeats", "1", "--seconds-per-row", "0.01", "--commit", "abc"]
    assert whole_models.main([*arguments, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "whole_models_tiny.json").read_text())
    assert found["environment"]["commit"] == "abc" and found["tiny"] and not found["not_timed"]
    rows = {(record["row"], record["variant"]): record for record in found["rows"]}
    assert len(rows) == 15 and len({row for row, _ in rows}) == 5
    for (row, variant), record in rows.items():
        assert row in printed
        expected = rows[row, "torch"]["median_ms"] / record["median_ms"]
        assert record["ratio_to_torch"] == pytest.approx(expected)
        assert record["tokens_per_second"] == pytest.approx(1e3 * record["tokens"] / record["median_ms"])
        assert record["training"] == ("training" in row) and (variant == "torch") == (record["difference"] == 0)
    with (tmp_path / "whole_models_tiny.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--repeats", "0"], "0 must be at least 1"), (["--seconds-per-row", "nan"], "nan must be above 0")],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        whole_models.parse(["--device", "cpu", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_an_empty_selection_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert whole_models.main(["--device", "cpu", "--filter", "no such row"]) == 2
    assert "no row for --filter 'no such row'" in capsys.readouterr().err
