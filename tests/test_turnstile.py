"""Sums of many CTAs in a fixed order: the turnstile on every machine, and what the checked machine says of misuse."""

from __future__ import annotations

import ctypes
import re
import shutil

import pytest
import torch
from test_checked_machine import CXX, KERNELS, RUNTIME, SEEDS, call, compile_object, link
from test_tiles import assert_equal
from tiles.cases import name, on_every_machine
from tiles.machine import DTYPES, Machine


@on_every_machine("turnstile")
def test_sums_in_a_fixed_order(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """Every bit of each sum is that of the tiles' additions one after the other; places have their own first tile."""
    (columns,), real, device = sizes, DTYPES[element], machine.device
    for tiles, places, width, ctas in ((40, 24, 5, 7), (9, 8, 8, 2), (3, 3, 1, 5), (12, 4, 100, 1), (0, 1, 1, 3)):
        values = torch.randn(max(tiles, 1), 2, dtype=real) * 10.0 ** torch.randint(-4, 5, (max(tiles, 1), 2))
        expected, visits = torch.zeros(places, 2, dtype=real), [0] * places
        for tile in range(tiles):
            for place in range(tile // 2, min(tile // 2 + width, places)):
                expected[place] += values[tile]
                visits[place] += 1
        counter = torch.zeros(2, dtype=torch.int32, device=device)
        for _ in range(3):
            sums = torch.zeros(places, 2, 64 * columns, dtype=real, device=device)
            ended = torch.zeros(places, dtype=torch.int32, device=device)
            tensors = [counter, values.to(device), sums, ended]
            machine.run(name(family, element, sizes), tensors, [tiles, places, width], grid=ctas)
            assert_equal(f"{tiles} tiles on {ctas} CTAs", sums, expected.unsqueeze(-1).expand_as(sums))
            assert ended.tolist() == visits and not counter.any()


# What the checked machine reports

TILES, PLACES, COLUMNS = 6, 4, 16
STILE = r"the turnstile at shared\+\d+"
BROKEN = {
    "added before its turn": f"warpgroup [12]: tile_sums::add by a warpgroup that has not entered {STILE}",
    "added after its turn": f"warpgroup [12]: tile_sums::add by a warpgroup that has not entered {STILE}",
    "not entered": f"warpgroup [12]: (tile_sums::add by a warpgroup that has not entered|leave of) {STILE}",
    "entered twice": f"warpgroup [12]: enter of {STILE}, which this warpgroup has not left",
    "not left": f"warpgroup [12]: enter of {STILE}, which this warpgroup has not left",
    "another place closed": "thread 2 of warpgroup 0: closer::close of a place whose turn is not the one opened first",
    "passed on twice": "thread 2 of warpgroup 0: closer::close of a place whose turn is not the one opened first",
    "one turn for two tiles": "that turn is over|it was passed on by others",
    "a turn that never comes": r"deadlock: .*thread 1 of warpgroup 0 waits for turn \d of a place where [23] visits "
    "have ended",
    "a barrier of warpgroups": "thread 1 of warpgroup 0: named barrier 4 is for whole warpgroups",
    "numbers not cleared": "thread 1 of warpgroup 0: opener::open for turn [0-2] of a place where 3 visits have ended",
}
needs_compiler = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"no C++ compiler: {CXX[0]} is not found")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("turnstile")
    objects = [compile_object(source, folder / f"{source.stem}.o") for source in (*RUNTIME, KERNELS / "turnstile.cpp")]
    return link(objects, folder / "turnstile.so")


def run(library: ctypes.CDLL, defect: str, seed: int, threads: bool) -> tuple[str | None, bool]:
    values = torch.randn(TILES, 2) * 10.0 ** torch.randint(-4, 5, (TILES, 2))
    sums, expected = torch.zeros(PLACES, 2, 64 * COLUMNS), torch.zeros(2)
    for value in values:
        expected += value
    ended = torch.full((PLACES,), 3 if defect == "numbers not cleared" else 0, dtype=torch.int32)
    error = call(library.ordered_run, defect.encode(), seed, int(threads), values, sums, ended)
    return error, torch.equal(sums, expected[None, :, None].expand_as(sums)) and ended.tolist() == [TILES] * PLACES


on_threads = pytest.mark.parametrize("threads", [True, False], ids=["a thread for each CTA", "one thread"])


@needs_compiler
@on_threads
def test_a_kernel_without_a_defect_is_right(library: ctypes.CDLL, threads: bool) -> None:
    for seed in range(40):
        error, right = run(library, "none", seed, threads)
        assert error is None, f"seed {seed}: {error}"
        assert right, f"seed {seed}: wrong numbers"


@needs_compiler
@on_threads
@pytest.mark.parametrize("defect", BROKEN)
def test_every_defect_is_named(library: ctypes.CDLL, defect: str, threads: bool) -> None:
    for seed in SEEDS:
        error, _ = run(library, defect, seed, threads)
        assert error is not None, f"seed {seed}: {defect} is not reported"
        assert re.search(BROKEN[defect], error), f"seed {seed}: {error}"


@needs_compiler
def test_tiles_that_do_not_come_from_the_counter(library: ctypes.CDLL) -> None:
    """Where CTAs run one after the other the first waits for one that has not begun, for ever."""
    for seed in SEEDS:
        error, _ = run(library, "tiles by index", seed, threads=False)
        assert error is not None, f"seed {seed}: not reported"
        assert re.search("deadlock: .*waits for turn 3 of a place where 1 visits have ended", error), error
