"""The build backend: setuptools' own, which asks for torch only if the environment being installed into has none.

Only torch's headers are needed, so an isolated build must not download a second torch.
"""

from __future__ import annotations

import setuptools
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from .toolchain import OLDEST_TORCH, find_torch, require_setuptools

require_setuptools(setuptools.__version__)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ConfigSettings = dict[str, str | list[str] | None] | None


def _torch_requirement() -> list[str]:
    return [] if find_torch() else [f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"]


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
