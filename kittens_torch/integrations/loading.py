"""Acts on a module of another library as soon as it is loaded, without importing it and whatever is imported first."""

# mypy: allow-untyped-calls

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any


class _AfterLoading(importlib.abc.MetaPathFinder):
    """Calls `act` at the end of the import of one module, which no one has to wait for before that."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: Any) -> None:
                load(module)
                self.act()

            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec


def when_loaded(name: str, act: Callable[[], None]) -> None:
    """Calls `act` now if the module is loaded, else at the end of its import, once. Imports nothing."""
    if name in sys.modules:
        act()
    elif not any(isinstance(finder, _AfterLoading) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterLoading(name, act))
