"""Compiles what is out of date, several files at once, and keeps what the compilers said.

An object is up to date while its command and all the files it was made from (the compiler lists them, -MD) are what
they were. Beside `x.o` lie `x.d`, that list, and `x.json`, the record: command, files, seconds and compiler's output.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .toolchain import BuildError


@dataclass
class Record:
    """How an object came to be."""

    source: str
    command: list[str]
    files: dict[str, list[int]]  # path: [size, time of change in ns]
    seconds: float
    output: str


@dataclass(frozen=True)
class Compilation:
    """One source file, the object it becomes and the command that does it, without the options that name either."""

    source: Path
    object: Path
    command: Sequence[str]
    # For a file compiled for a newer CPU than the rest: functions whose (mangled) name holds this text stay global.
    # Everything else the file defines, such as templates of the standard library, becomes local to it: the linker keeps
    # one copy of each, and the copy for the newer CPU would crash the older one.
    keep_global: str | None = None
    root: Path = field(default_factory=Path.cwd)

    @property
    def full_command(self) -> list[str]:
        dependencies = ["-MD", "-MF", str(self.object.with_suffix(".d"))]
        return [*self.command, *dependencies, "-c", str(self.source), "-o", str(self.object)]

    @property
    def record_file(self) -> Path:
        return self.root / self.object.with_suffix(".json")

    def record(self) -> Record | None:
        try:
            return Record(**json.loads(self.record_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def is_current(self) -> bool:
        record = self.record()
        return (
            record is not None
            and record.command == self.full_command
            and self.root.joinpath(self.object).exists()
            and all(_state(self.root / name) == state for name, state in record.files.items())
        )

    def run(self) -> Record:
        self.root.joinpath(self.object).parent.mkdir(parents=True, exist_ok=True)
        self.record_file.unlink(missing_ok=True)
        start = time.monotonic()
        output = _run(self.full_command, self.root, str(self.source))
        if self.keep_global is not None:
            _make_local(self.root / self.object, self.keep_global)
        seconds = time.monotonic() - start
        names = parse_dependencies(self.root.joinpath(self.object).with_suffix(".d").read_text())
        files = {name: _state(self.root / name) for name in names}
        record = Record(str(self.source), self.full_command, files, seconds, output)
        self.record_file.write_text(json.dumps(asdict(record)))
        return record


def parse_dependencies(text: str) -> list[str]:
    """The prerequisites of a make rule as compilers write them: `x.o: a.cpp b\\ c.h \\`, a newline, ..."""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    parts = re.findall(r"(?:\\.|\S)+", names.split("\n")[0])
    return [re.sub(r"\\(.)", r"\1", part).replace("$$", "$") for part in parts]


def compile_all(
    compilations: Sequence[Compilation], jobs: int, say: Callable[[str], None], log_file: Path | None = None
) -> int:
    """Compiles what is out of date, `jobs` files at once, and returns how many those were.

    `log_file` gets the records of all objects, also of those that were up to date. The first failure stops the rest.
    """
    stale = [compilation for compilation in compilations if not compilation.is_current()]
    done = 0

    def compile_one(compilation: Compilation) -> None:
        nonlocal done
        seconds = compilation.run().seconds
        done += 1
        say(f"[{done}/{len(stale)}] {compilation.source}  {seconds:.1f} s")

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(compile_one, compilation) for compilation in stale]
        wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
        for future in futures:
            if not future.cancelled():
                future.result()
    if log_file is not None:
        records = [record for record in (compilation.record() for compilation in compilations) if record is not None]
        log_file.write_text(json.dumps([asdict(record) for record in records], indent=1))
    return len(stale)


def link(objects: Sequence[Path], output: Path, command: Sequence[str], options: Sequence[str], root: Path) -> bool:
    """Links objects into a shared library unless it is newer than all of them; says whether it had to."""
    full = [*command, *map(str, objects), *options, "-o", str(output)]
    record = root / output.with_suffix(".link.json")
    state = {str(path): _state(root / path) for path in objects}
    if root.joinpath(output).exists() and record.exists() and json.loads(record.read_text()) == [full, state]:
        return False
    root.joinpath(output).parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    _run(full, root, str(output))
    record.write_text(json.dumps([full, state]))
    return True


def _state(path: Path) -> list[int]:
    try:
        found = os.stat(path)
    except OSError:
        return []
    return [found.st_size, found.st_mtime_ns]


def _run(command: Sequence[str], root: Path, what: str) -> str:
    try:
        told = subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise BuildError(f"{what}: {command[0]} does not run ({error})") from error
    if told.returncode != 0:
        raise BuildError(f"{what} failed (exit {told.returncode}):\n{shlex.join(command)}\n{told.stdout}")
    return told.stdout


def _make_local(path: Path, keep: str) -> None:
    """Makes the weak functions of an object local, but for those whose name holds `keep`.

    They lie in groups, and the linker keeps one of a name whatever the binding: `ld -r` dissolves the groups first.
    """
    weak = weak_functions(path, keep)
    if not weak:
        return
    merged, names = path.with_suffix(".r.o"), path.with_suffix(".local")
    names.write_text("".join(f"{name}\n" for name in weak))
    _run(["ld", "-r", "--force-group-allocation", str(path), "-o", str(merged)], path.parent, str(path))
    _run(["objcopy", f"--localize-symbols={names}", str(merged), str(path)], path.parent, str(path))
    merged.unlink()
    names.unlink()


def weak_functions(path: Path, keep: str) -> list[str]:
    """Names of the weak functions that an object defines, but for those whose name holds `keep`."""
    lines = _run(["nm", "--defined-only", str(path)], path.parent, str(path)).splitlines()
    symbols = [line.split() for line in lines]
    return [symbol[2] for symbol in symbols if len(symbol) == 3 and symbol[1] in "Ww" and keep not in symbol[2]]
