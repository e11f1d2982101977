"""A progress bar on stderr: tqdm's if it is installed, else one line of our own."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any


class Progress:
    """Counts finished rows. Use as a context manager."""

    def __init__(self, total: int, use_tqdm: bool = True) -> None:
        self.total, self.done, self.start = total, 0, time.perf_counter()
        self.bar: Any = None
        if use_tqdm:
            try:
                tqdm = importlib.import_module("tqdm").tqdm
            except ImportError:
                return
            # In a log every refresh is a line, so refresh seldom there.
            self.bar = tqdm(total=total, unit="row", file=sys.stderr, mininterval=0.1 if sys.stderr.isatty() else 15)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        elif sys.stderr.isatty():
            sys.stderr.write("\n")

    def begin(self, name: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(name, refresh=sys.stderr.isatty())
        else:
            elapsed = time.perf_counter() - self.start
            line = f"[{self.done}/{self.total}] {elapsed:.0f} s  {name}"
            sys.stderr.write(f"\r{line:<78}" if sys.stderr.isatty() else line + "\n")
            sys.stderr.flush()

    def finish(self) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update()
