"""The checked cpu machine reports defects of the backward kernels, which are broken by changing their source."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import leaves
from test_checked_machine import CSRC, CXX, KERNELS, RUNTIME, call, compile_object, link

from kittens_torch import reference

pytestmark = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"no C++ compiler: {CXX[0]} is not found")
SEEDS = range(4)
KEYS, ROLES, FOLDED, IN_ORDER = 0, 1, 2, 3  # rows of the small table, and the third one in order
WAIT = "          mma_wait<1>();\n          mma_done(value_gradient);\n"
RELEASE = "          gradient.release();\n"
# Where dQ is summed; without sums the two lines above are there again.
THEN = "          if constexpr (late) publish_arrive"
# name: (file, row, what is there once, what stands there instead, what the error must say)
BROKEN = {
    "dS not published": (
        "backward_keys.cuh",
        KEYS,
        "publish_arrive({stored + 2 * wg + turn, consumers});",
        "named_barrier{stored + 2 * wg + turn, consumers}.arrive();",
        r"published",
    ),
    "one buffer for every dS": (
        "backward_keys.cuh",
        KEYS,
        "auto& ds = s.score_gradients.tile.tile[turn];",
        "auto& ds = s.score_gradients.tile.tile[0];",
        r"(store|product reads) .*shared_tile<float, 128, 64>",
    ),
    "dO released under a product": (
        "backward_keys.cuh",
        KEYS,
        WAIT + RELEASE + THEN,
        RELEASE + WAIT + THEN,
        r"release of shared_tile<float, 64, 128> .* while this warpgroup's own product may still read it",
    ),
    "K overwritten under the other's product": (
        "backward_keys.cuh",
        KEYS,
        "if constexpr (SumsQuery) meet.sync();",
        "",
        r"(store|product reads) .*shared_tile<float, 128, 128>",
    ),
    "terms of another stage": (
        "backward_row_values.cuh",
        FOLDED,
        "mma_minus_columns(scores, minus.logsumexp, pairs[stage]);",
        "mma_minus_columns(scores, minus.logsumexp, pairs[stage ^ 1]);",
        r"product reads shared_vector<term_pair, 64>",
    ),
    "terms not named": (
        "backward_row_values.cuh",
        FOLDED,
        "kittens::mma_begin(scores, minus.logsumexp);",
        "kittens::mma_begin(scores);",
        r"product on register_tile<minus_terms, 16> .*, which mma_begin has not named",
    ),
    "added without the turn": (
        "backward_keys.cuh",
        IN_ORDER,
        "        visits.enter();\n",
        "",
        r"tile_sums::add by a warpgroup that has not entered the turnstile at shared",
    ),
    "turn kept": (
        "backward_keys.cuh",
        IN_ORDER,
        "        visits.leave();\n",
        "",
        r"enter of the turnstile at shared.*, which this warpgroup has not left",
    ),
    "a turn too late": (
        "backward_turns.cuh",
        IN_ORDER,
        "rises ? last_tile(p, i) - tile : tile - first_tile(p, i)",
        "(rises ? last_tile(p, i) - tile : tile - first_tile(p, i)) + (i == 1)",
        r"deadlock: .*waits for turn 1 of a place where 0 visits have ended",
    ),
    "turns passed on in another order": (
        "backward_turns.cuh",
        IN_ORDER,
        "[&](int* ended, int) { turns.close(ended); }",
        "[&](int* ended, int) { turns.close(ended == p.turns ? ended + 1 : ended); }",
        r"closer::close of a place whose turn is not the one opened first",
    ),
    "first tiles by index": (
        "backward_keys.cuh",
        IN_ORDER,
        "InOrder && p.counter ? take_tile(p.counter, cta) - cta.count : cta.index",
        "cta.index",
        r"opener::open for turn 0 of a place where 1 visits have ended: that turn is over",
    ),
    "weights read too early": (
        "backward_roles.cuh",
        ROLES,
        "named_barrier{weights_stored + buffer, consumers}.sync();",
        "",
        r"load .*shared_tile<float, 64, 64>|deadlock",
    ),
    "weights overwritten": (
        "backward_roles.cuh",
        ROLES,
        "named_barrier{weights_read + buffer, consumers}.sync();",
        "",
        r"store .*shared_tile<float, 64, 64>|named barrier",
    ),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ctypes.CDLL]]:
    """The backward kernels as they are ("none"), and broken in each of the ways."""
    folder = tmp_path_factory.mktemp("broken_backward")

    def build(name: str) -> ctypes.CDLL:
        csrc = folder / name.replace(" ", "_").replace("'", "")
        for part in ("kittens/core", "kittens/cpu", "attention"):
            shutil.copytree(CSRC / part, csrc / part)
        shutil.copy(CSRC / "kittens/kittens.h", csrc / "kittens")
        if name in BROKEN:
            file, _, intact, broken, _ = BROKEN[name]
            path = csrc / "attention" / file
            text = path.read_text()
            assert text.count(intact) == 1, f"{name}: {file} has what the test breaks {text.count(intact)} times"
            path.write_text(text.replace(intact, broken))
        return link(
            [compile_object(KERNELS / "backward.cpp", csrc / "backward.o", csrc), *runtime], csrc / "backward.so"
        )

    def compiled(source: Path) -> Path:
        return compile_object(source, folder / f"{source.stem}.o")

    with ThreadPoolExecutor(2) as pool:
        runtime = list(pool.map(compiled, RUNTIME))
        names = ["none", *BROKEN]
        yield dict(zip(names, pool.map(build, names), strict=True))


def run(library: ctypes.CDLL, row: int, seed: int) -> tuple[str | None, bool]:
    torch.manual_seed(seed)
    heads, length_q, length_k = 2, 200, 300
    operands = [torch.randn(1, heads, length, 128) for length in (length_q, length_k, length_k)]
    exact = leaves(*(operand.double() for operand in operands))
    output, logsumexp = reference.attention(*exact, causal="lower_right", scale=0.125)
    grad_output = torch.randn(1, heads, length_q, 128)
    output.backward(grad_output.double())
    grads = [torch.full_like(operand, float("nan")) for operand in operands]
    rows, sums = torch.full((4 * heads * 256,), float("nan")), torch.zeros(heads * 256 * 128)
    saved = (output.detach().float(), grad_output, logsumexp.detach().float())
    error = call(library.backward_run, seed, row, heads, length_q, length_k, *operands, *saved, *grads, rows, sums)
    return error, all(bool(((a - b.grad).abs() < 1e-4).all()) for a, b in zip(grads, exact, strict=True))


@pytest.mark.parametrize("row", [KEYS, ROLES, FOLDED, IN_ORDER])
def test_backward_is_right(libraries: dict[str, ctypes.CDLL], row: int) -> None:
    for seed in SEEDS:
        error, right = run(libraries["none"], row, seed)
        assert error is None and right, f"seed {seed}: {error or 'wrong numbers'}"


@pytest.mark.parametrize("name", BROKEN)
def test_broken_backward_is_reported(libraries: dict[str, ctypes.CDLL], name: str) -> None:
    _, row, _, _, expected = BROKEN[name]
    for seed in SEEDS:
        error, _ = run(libraries[name], row, seed)
        assert error is not None, f"seed {seed}: {name} is not reported"
        assert re.search(expected, error), f"seed {seed}: {error}"
