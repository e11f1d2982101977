"""PyTorch's own tests of its attention, with our kernels in the place of torch's.

    python -m tests.torch_suite PATH/TO/pytorch/test/test_transformers.py [options of pytest, -k for example]

runs the file twice, each time in a process of its own: as it is, and under `kittens_torch.enable()`. Take the file from
the sources of the installed torch's version; it needs `pip install expecttest`. On the CPU the calls that the plan
would leave to torch come to our kernels too, and warnings about fallbacks are off, because some tests count warnings.
Prints every test that passes without us and fails with us, and exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """A pytest plugin that writes a line for each test: its name, its outcome, our calls in it, its error."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.calls = 0

    def count(self, outcome: Any) -> None:
        self.calls += outcome.reason == ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        calls, self.calls = self.calls, 0
        line = {"test": report.nodeid.partition("::")[2], "outcome": report.outcome, "calls": calls}
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            line["error"] = (crash.message if crash else str(report.longrepr)).strip().splitlines()[0]
        with self.results.open("a") as file:  # line by line: what a crash leaves behind counts
            file.write(json.dumps(line) + "\n")


def run_here(path: Path, results: Path, with_us: bool, options: list[str]) -> int:
    """One of the two runs, in this process."""
    import pytest

    recorder = Recorder(results)
    if with_us:
        import importlib

        import kittens_torch
        from kittens_torch import dispatch

        importlib.import_module("kittens_torch.enable").watchers.append(recorder.count)
        dispatch.cpu_prefers_torch = lambda *operands: False
        kittens_torch.set_fallback("silent")
        kittens_torch.enable()
    # Nothing of this project's configuration of pytest applies to the file.
    own = ["-q", "--no-header", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={path.parent}"]
    return int(pytest.main([*own, *options, str(path)], plugins=[recorder]))


def run_in_child(path: Path, with_us: bool, options: list[str]) -> dict[str, dict[str, Any]]:
    """The results of one run by the name of the test."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        command = [sys.executable, "-m", "tests.torch_suite", str(path), "--results", str(results)]
        print(f"{path.name} {'with' if with_us else 'without'} us ...", flush=True)
        done = subprocess.run(
            [*command, *(["--with-us"] if with_us else []), *options], cwd=ROOT, stdout=subprocess.PIPE
        )
        if not results.exists():
            sys.stdout.buffer.write(done.stdout)
            raise SystemExit("no test ran")
        lines = [json.loads(line) for line in results.read_text().splitlines()]
    if done.returncode not in (0, 1):
        print(f"pytest ended with {done.returncode} after {len(lines)} tests")
    return {line["test"]: line for line in lines}


def compare(without: dict[str, dict[str, Any]], with_us: dict[str, dict[str, Any]]) -> list[str]:
    """Prints what the two runs say; returns the tests that pass without us and do not with us."""
    for name, results in (("without us", without), ("with us", with_us)):
        counted = Counter(line["outcome"] for line in results.values())
        print(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counted.items())))
    ours = [line for line in with_us.values() if line["calls"]]
    print(f"calls on our kernels: {sum(line['calls'] for line in ours)}, in {len(ours)} tests")
    lost = []
    for test, line in without.items():
        mine = with_us.get(test, {"outcome": "not run", "error": "the run ended before it"})
        if line["outcome"] == "passed" and mine["outcome"] != "passed":
            lost.append(test)
            print(f"LOST {test}: {mine['outcome']}, {mine.get('error', '')}")
    print(f"{len(lost)} tests pass without us and not with us")
    return lost


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", type=Path, help="test_transformers.py of the installed torch's version")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # of one run; its presence makes it a child
    parser.add_argument("--with-us", action="store_true", help=argparse.SUPPRESS)
    known, options = parser.parse_known_args(arguments)
    if not known.path.is_file():
        parser.error(f"path is {known.path}; allowed: a file of torch's tests")
    if known.results is not None:
        return run_here(known.path, known.results, known.with_us, options)
    path = known.path.resolve()
    return int(bool(compare(*(run_in_child(path, with_us, options) for with_us in (False, True)))))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
