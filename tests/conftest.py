"""Fixtures of all tests."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

# Threads that spin between small operations make the suite ten times slower wherever anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl

import kittens_torch
from kittens_torch import dispatch
from kittens_torch.enable import Outcome


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
    """Nothing goes to torch: a call without a kernel raises, and torch is not preferred for its speed."""
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    monkeypatch.setattr(dispatch, "gpu_prefers_torch", lambda *operands: False)
    before = kittens_torch.set_fallback("error")
    yield
    kittens_torch.set_fallback(before)


@pytest.fixture
def torchs_attention_as_before() -> Iterator[None]:
    """For tests of `enable`: afterwards torch's attention and the fallback mode are what they were."""
    before = kittens_torch.set_fallback("warn")
    yield
    kittens_torch.disable()
    kittens_torch.set_fallback(before)
    assert current_flash_attention_impl() is None


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What became of the calls that reached an override of `enable`. The plan does not prefer torch."""
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)
    seen: list[Outcome] = []
    monkeypatch.setattr(importlib.import_module("kittens_torch.enable"), "watchers", [seen.append])
    return seen
