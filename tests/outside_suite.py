"""Test files of other projects, run as they are and with our kernels in the place of theirs: what is lost?"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """A pytest plugin that writes a line for each test: its name, its outcome, our calls in it, its error."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self.calls = 0

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


def run_here(path: Path, recorder: Recorder, options: list[str]) -> int:
    """One of the two runs, in this process."""
    import pytest

    # Nothing of this project's configuration of pytest applies to the file.
    own = ["-q", "--no-header", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={path.parent}"]
    return int(pytest.main([*own, *options, str(path)], plugins=[recorder]))


def run_in_child(script: str, path: Path, with_us: bool, options: list[str]) -> dict[str, dict[str, Any]]:
    """The results of one run by the name of the test. Our folder of tests must not be the package `tests` there."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        command = [sys.executable, script, str(path), "--results", str(results)]
        print(f"{path.name} {'with' if with_us else 'without'} us ...", flush=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            [*command, *(["--with-us"] if with_us else []), *options],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
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


def main(script: str, document: str, what: str, put_us_in: Callable[[Recorder], None], arguments: list[str]) -> int:
    """The command of a script. what: the file that it takes; put_us_in: replaces, in the run with us, what is ours."""
    parser = argparse.ArgumentParser(prog=f"python tests/{Path(script).name}", description=document.split("\n")[0])
    parser.add_argument("path", type=Path, help=what)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # of one run; its presence makes it a child
    parser.add_argument("--with-us", action="store_true", help=argparse.SUPPRESS)
    known, options = parser.parse_known_args(arguments)
    if not known.path.is_file():
        parser.error(f"path is {known.path}; allowed: {what}")
    if known.results is not None:
        recorder = Recorder(known.results)
        if known.with_us:
            put_us_in(recorder)
        return run_here(known.path, recorder, options)
    path = known.path.resolve()
    return int(bool(compare(*(run_in_child(script, path, with_us, options) for with_us in (False, True)))))
