"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Threads that spin between small operations make the suite ten times slower wherever anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

import kittens_torch
from kittens_torch import dispatch


def has_hopper() -> bool:
    return torch.cuda.is_available() and not dispatch.gpu_missing(0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if has_hopper():
        return
    skip = pytest.mark.skip(reason="needs a GPU of compute capability 9.0 and a build with CUDA kernels")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def only_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing goes to torch: a call without a kernel raises, and the plan does not prefer torch on the CPU."""
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    before = kittens_torch.set_fallback("error")
    yield
    kittens_torch.set_fallback(before)
