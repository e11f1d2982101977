"""The checked cpu machine reports every misuse of the tile vocabulary by name, with every seed.

`broken_kernels` holds little kernels that are right unless told to have one named defect, and the forward kernel is
broken by changing its source. Everything is compiled here, against the headers of csrc.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kittens_torch import reference

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
KERNELS = Path(__file__).resolve().parent / "broken_kernels"
RUNTIME = [CSRC / f"kittens/cpu/{name}.cpp" for name in ("machine", "checker", "checker_barriers")]
CXX = shlex.split(os.environ.get("CXX", "g++"))
SEEDS = range(8)

pytestmark = pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"no C++ compiler: {CXX[0]} is not found")


def compile_object(source: Path, target: Path, include: Path = CSRC) -> Path:
    command = [*CXX, "-std=c++20", "-O1", "-fPIC", f"-I{include}", "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stderr}"
    return target


def link(objects: Sequence[Path], target: Path) -> ctypes.CDLL:
    subprocess.run([*CXX, "-shared", *map(str, objects), "-o", str(target), "-lpthread"], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checked_machine")


@pytest.fixture(scope="module")
def runtime(folder: Path) -> list[Path]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_object(source, folder / f"{source.stem}.o"), RUNTIME))


@pytest.fixture(scope="module")
def little_kernels(folder: Path, runtime: list[Path]) -> ctypes.CDLL:
    objects = [compile_object(KERNELS / f"{name}.cpp", folder / f"{name}.o") for name in ("pipeline", "exchange")]
    return link([*objects, *runtime], folder / "little_kernels.so")


def call(function: Callable[..., bytes | None], *arguments: object) -> str | None:
    """The error text of a launch, or None."""
    function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    text = function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments))
    return None if text is None else text.decode()


def small_integers(*shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape).float()  # their products and sums are exact


# The tiles of the little kernels, as errors name them.
A = r"shared_tile<float, 128, 32> at shared\+\d+ \(ring stage [01]\)"
B = r"shared_tile<float, 64, 32> at shared\+\d+"
X = r"shared_tile<float, 128, 64> at shared\+\d+"
BIAS = r"shared_vector<float, 64> at shared\+\d+"
BARRIER = r"the barrier at shared\+\d+"
SUM = r"register_tile<float, 64> \(number 1 of warpgroup [012]\)"
Y = r"register_tile<float, 64> \(number 2 of warpgroup [01]\)"
# What is wrong, and what the error must say: the rule, and the tile or barrier.
PIPELINE = {
    "no wait for the copy": f"product reads {A} before its copy has completed: this warpgroup has not waited for the "
    "full barrier of stage 0 of the ring of shared_tile<float, 128, 32>",
    "tile never filled": f"product reads {B}, which has never been filled",
    "no mma_begin": f"product on {SUM}, which mma_begin has not named",
    "no mma_commit": rf"mma_done names {SUM} while a product on it is in flight \(its group is still open: mma_commit",
    "no mma_wait": f"map uses {SUM} while a product on it is in flight",
    "no mma_done": f"map_columns uses {SUM}, whose product has been waited for, before mma_done has named it",
    "released under a product": f"release of {A} while this warpgroup's own product may still read it",
    "released twice": f"release of {A}, which this warpgroup has not waited for",
    "read after release": f"product reads {A}, which this warpgroup has released",
    "forgotten release": "deadlock: warpgroup 0 waits for phase 0 of the empty barrier of stage 0 of the ring of "
    r"shared_tile<float, 128, 32> at shared\+0 \(2 of 2 arrivals and 0 bytes missing\); warpgroup 1 waits for",
    "stage overwritten": f"copy into {A} while a product of warpgroup [12] may still read it",
    "too few bytes": f"wrong transaction bytes: {BARRIER} expects 16 bytes more than its copies deliver",
    "too many bytes": f"wrong transaction bytes: the copy of 256 bytes into {BIAS} completes on {BARRIER}, which "
    "expects only 240 more",
    "too many arrivals": f"{BARRIER}: more arrivals than its count of 2",
    "same phase twice": rf"wrong phase: wait\(0\) on {BARRIER}, for the phase this warpgroup has waited for already",
    "no init": f"(expect|wait) on {BARRIER} before its init",
    "no publish_barriers": "(wait|expect|arrive) on the .*barrier .*before (publish_barriers|its init)",
    "no await_earlier_launches": "copy touches global memory before await_earlier_launches, and the kernel starts "
    "early",
    "vector read before its copy": f"load_columns reads {BIAS} before its copy has completed",
    "message released twice": r"release of a message in the mailbox at shared\+\d+, which this warpgroup has not "
    "waited for",
    "copy nobody waits for": rf"the kernel ends while the copy into {B} \(ring stage 1\) may be in flight: nobody has "
    "waited for the full barrier of stage 1",
    "no store_wait_all": rf"the kernel ends with the send from {X} in flight \(store_wait_all is missing",
}
EXCHANGE = {
    "store not published": f"product reads {X}, which warpgroup [01] has stored and not published",
    "published to itself only": f"product reads {X}, which (warpgroup [01] stores, without having met it since"
    "|has never been filled)",
    "inconsistent participants": "named barrier 7: inconsistent participants, warpgroup [01] names [12] warpgroups",
    "reserved barrier": "named barrier 3 is reserved: a kernel's are 4 to 15",
    "sent before publish": f"send reads {X}, which warpgroup [01] has stored and not published",
    "operand changed under a product": f"map uses {SUM} while a product on it is in flight",
    "product in flight at the end": f"{Y} goes out of scope, or the kernel ends, while a product on it is in flight",
    "overwritten under a send": f"store into {X} while a send of warpgroup [01] may still read it",
    "arrival left over": "the kernel ends with 1 of 2 warpgroups at named barrier 7",
}


def run_pipeline(library: ctypes.CDLL, defect: str, seed: int) -> tuple[str | None, bool]:
    a, b, bias = small_integers(128, 160), small_integers(64, 160), small_integers(64)
    c = torch.full((128, 64), float("nan"))
    error = call(library.pipeline_run, defect.encode(), seed, a, b, bias, c)
    return error, torch.equal(c, a @ b.T + bias)


def run_exchange(library: ctypes.CDLL, defect: str, seed: int) -> tuple[str | None, bool]:
    x, w = small_integers(128, 64), small_integers(64, 64)
    y, u = torch.full((2, 128, 64), float("nan"))
    error = call(library.exchange_run, defect.encode(), seed, x, w, y, u)
    return error, torch.equal(y, x @ w) and torch.equal(u, 2 * (x @ w))


@pytest.mark.parametrize("run", [run_pipeline, run_exchange])
def test_kernels_without_a_defect_are_right(
    little_kernels: ctypes.CDLL, run: Callable[..., tuple[str | None, bool]]
) -> None:
    for seed in range(40):
        error, right = run(little_kernels, "none", seed)
        assert error is None, f"seed {seed}: {error}"
        assert right, f"seed {seed}: wrong numbers"


@pytest.mark.parametrize(
    ("run", "defect", "expected"),
    [(run_pipeline, *row) for row in PIPELINE.items()] + [(run_exchange, *row) for row in EXCHANGE.items()],
    ids=[*PIPELINE, *EXCHANGE],
)
def test_every_defect_is_named(
    little_kernels: ctypes.CDLL, run: Callable[..., tuple[str | None, bool]], defect: str, expected: str
) -> None:
    for seed in SEEDS:
        error, _ = run(little_kernels, defect, seed)
        assert error is not None, f"seed {seed}: {defect} is not reported"
        assert re.search(expected, error), f"seed {seed}: {error}"
        assert error.startswith(f"CTA 0, seed {seed}: "), error


STEP_WAIT = "        mma_wait<0>();\n        mma_done(scores, output);\n"
STEP_RELEASE = "        value.release();\n        key.release();\n"
# name: (file, what is there once, what stands there instead, what the error must say)
BROKEN_FORWARD = {
    "release before the product is done": (
        "attention/forward.cuh",
        STEP_WAIT,
        "        key.release();\n" + STEP_WAIT,
        r"release of shared_tile<float, 64, 64> at .* while this warpgroup's own product may still read it",
    ),
    "softmax before the wait": (
        "attention/forward.cuh",
        STEP_WAIT,
        "        row_max(maximum, scores);\n" + STEP_WAIT,
        r"row_max uses register_tile<float, 64> .* while a product on it is in flight",
    ),
    "forgotten release": (
        "attention/forward.cuh",
        STEP_RELEASE,
        "        key.release();\n",
        r"deadlock: .*the empty barrier of stage [01] of the ring of shared_tile<float, 64, 64>",
    ),
    # Seen on the H200 as a launch that never ends: a warp that comes late waits for a phase that is over.
    "stage released unread": (
        "attention/forward.cuh",
        "key.skip();",
        "key.wait(), key.release();",
        r"release of shared_tile<float, 64, 64> at .*, which this warpgroup has not read \(skip\(\) passes over",
    ),
    "query released early": (
        "attention/forward.cuh",
        "      key.release();\n      KITTENS_NO_UNROLL for (int skip = skipped(w)",
        "      key.release();\n      query.release();\n      KITTENS_NO_UNROLL for (int skip = skipped(w)",
        r"product reads shared_tile<float, 128, 64> at .*, which this warpgroup has released"
        r"|release of shared_tile<float, 128, 64> at .* which this warpgroup has not waited for",
    ),
    "wrong named barrier": (
        "attention/forward.cuh",
        "        mma_commit();\n        if constexpr (C::take_turns) next_turn.arrive();\n",
        "        mma_commit();\n        if constexpr (C::take_turns) my_turn.arrive();\n",
        r"deadlock: .*named barrier [45]|inconsistent participants|warpgroups at named barrier [45]",
    ),
    "wrong ring phase": (
        "kittens/cpu/pipeline.h",
        "  ring_position<Stages> at{0, 0};\n",
        "  ring_position<Stages> at{0, 1};\n",
        r"product reads shared_tile<float, 128, 64> at .* (which has never been filled|before its copy has completed)"
        r"|wrong phase: wait\(1\) on the full barrier",
    ),
    "weights overwritten under a product": (
        "attention/forward.cuh",
        STEP_WAIT,
        "        fill(weights, 0);\n" + STEP_WAIT,
        r"fill uses register_tile<float, 64> .* while a product on it is in flight",
    ),
}


def forward(library: ctypes.CDLL, seed: int) -> tuple[str | None, bool]:
    torch.manual_seed(seed)
    heads, length_q, length_k = 2, 300, 333
    query, key, value = (torch.randn(1, heads, length, 64) for length in (length_q, length_k, length_k))
    output, logsumexp = torch.full_like(query, float("nan")), torch.full((1, heads, length_q), float("nan"))
    error = call(library.forward_run, seed, heads, length_q, length_k, query, key, value, output, logsumexp)
    exact, exact_logsumexp = reference.attention(query.double(), key.double(), value.double(), causal="lower_right")
    differences = (output - exact).abs().max(), (logsumexp - exact_logsumexp).abs().max()
    return error, all(difference < 1e-5 for difference in differences)


@pytest.fixture(scope="module")
def broken_forwards(folder: Path, runtime: list[Path]) -> dict[str, ctypes.CDLL]:
    """The forward kernel in its small configuration: as it is ("none"), and broken in each of the ways."""

    def build(name: str) -> ctypes.CDLL:
        csrc = folder / name.replace(" ", "_")
        for part in ("kittens/core", "kittens/cpu", "attention"):
            shutil.copytree(CSRC / part, csrc / part)
        shutil.copy(CSRC / "kittens/kittens.h", csrc / "kittens")
        if name in BROKEN_FORWARD:
            file, intact, broken, _ = BROKEN_FORWARD[name]
            text = (csrc / file).read_text()
            assert intact in text, f"{name}: the test no longer knows {file}; what it breaks is gone:\n{intact}"
            (csrc / file).write_text(text.replace(intact, broken, 1))
        found = compile_object(KERNELS / "forward.cpp", csrc / "forward.o", csrc)
        return link([found, *runtime], csrc / "forward.so")

    names = ["none", *BROKEN_FORWARD]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(build, names), strict=True))


def test_forward_is_right(broken_forwards: dict[str, ctypes.CDLL]) -> None:
    for seed in SEEDS:
        error, right = forward(broken_forwards["none"], seed)
        assert error is None and right, f"seed {seed}: {error or 'wrong numbers'}"


@pytest.mark.parametrize("name", BROKEN_FORWARD)
def test_broken_forward_is_reported(broken_forwards: dict[str, ctypes.CDLL], name: str) -> None:
    for seed in SEEDS:
        error, _ = forward(broken_forwards[name], seed)
        assert error is not None, f"seed {seed}: not reported"
        assert re.search(BROKEN_FORWARD[name][3], error), f"seed {seed}: {error}"
