"""Every test kernel by family, element type and sizes, as kernel_list.h makes them. What the sizes mean stands with the
kernel; test_tiles.py checks that none is missing here."""

from __future__ import annotations

from typing import Any

import pytest

from .machine import Machine

CPU = [Machine("fast"), Machine("checked", seed=1), Machine("checked", seed=2)]
SM90 = Machine("sm90", "cuda")

Sizes = tuple[int, ...]
Table = dict[str, list[Sizes]]


def same(*elements: str, sizes: list[Sizes]) -> Table:
    return dict.fromkeys(elements, sizes)


OTHERS = ("fp16", "float", "double")
EVERY = ("bf16", *OTHERS)
REALS = ("float", "double")

ALL_PRODUCTS: list[Sizes] = [(16, 16), (32, 48), (64, 64), (80, 96), (160, 32), (192, 128)]
MAIN_PRODUCTS: list[Sizes] = [(48, 32), (96, 80), (112, 128), (128, 16), (176, 64), (224, 48), (256, 64)]
LARGE_PRODUCTS: list[Sizes] = [(64, 192), (128, 256), (256, 128)]
OTHER_PRODUCTS = same(*OTHERS, sizes=[(48, 48), (128, 64)])
WIDTHS: list[Sizes] = [(8,), (24,), (80,), (128,), (192,)]

FAMILIES: dict[str, Table] = {
    "copy": {
        "bf16": [(64, 64), (128, 128), (64, 96), (128, 32), (192, 16), (64, 48), (128, 80), (64, 256), (256, 64)],
        **same(*OTHERS, sizes=[(64, 32), (64, 80), (128, 64)]),
    },
    "store": {
        "bf16": [(16,), (32,), (48,), (64,), (80,), (96,), (128,), (192,), (256,)],
        **same(*OTHERS, sizes=[(32,), (80,), (128,)]),
    },
    "convert": {"bf16": [(64, 256, 64), (48, 80, 32), (16, 96, 8)], **same(*OTHERS, sizes=[(48, 80, 16)])},
    "mma_ABt_shared": {"bf16": ALL_PRODUCTS + MAIN_PRODUCTS + LARGE_PRODUCTS, **OTHER_PRODUCTS},
    "mma_AB_registers": {"bf16": ALL_PRODUCTS + MAIN_PRODUCTS, **OTHER_PRODUCTS},
    "mma_ABt_registers": {"bf16": ALL_PRODUCTS, **OTHER_PRODUCTS},
    "mma_AB_shared": {"bf16": ALL_PRODUCTS + LARGE_PRODUCTS, **OTHER_PRODUCTS},
    "mma_AtB": {"bf16": ALL_PRODUCTS + LARGE_PRODUCTS, **OTHER_PRODUCTS},
    "mma_AtB_columns": {
        "bf16": [(48, 96, 80, 80), (32, 128, 96, 96), (128, 64, 192, 192)],
        **same(*OTHERS, sizes=[(64, 80, 128, 128)]),
    },
    "exchange": {"bf16": [(64,), (96,), (128,)], **same(*OTHERS, sizes=[(128,)])},
    "ring": {"bf16": [(2,), (3,), (4,)], **same(*OTHERS, sizes=[(4,)])},
    "exp2_into": {"bf16": [(16,), (80,), (128,)], **same(*OTHERS, sizes=[(80,), (128,)])},
    "odd": same(*EVERY, sizes=[(80,), (128,)]),
    "load": same(*EVERY, sizes=[(80,), (128,)]),
    "keep_drawn": same(*EVERY, sizes=[(64,), (128,)]),
    "riders": same(*EVERY, sizes=[(64,), (128,)]),
    "zero_rows": same(*EVERY, sizes=[(64,), (80,)]),
    "signed": same(*EVERY, sizes=[(64,), (96,)]),
    "finite": same(*EVERY, sizes=[(64,), (80,), (128,)]),
    "terms": same("bf16", "fp16", "float", sizes=[(64,), (128,)]),
    "scalars": same(*EVERY, sizes=[()]),
    "gemm": same(*EVERY, sizes=[()]),
    "map": same(*REALS, sizes=WIDTHS),
    "keep_columns": same(*REALS, sizes=[(8,), (80,), (96,), (128,)]),
    "hide": same(*REALS, sizes=[(32,), (64,), (128,)]),
    "rows": same(*REALS, sizes=WIDTHS),
    "column_sums": same(*REALS, sizes=[(64,), (80,)]),
    "vectors": same(*REALS, sizes=[()]),
    "map_columns": same(*REALS, sizes=[(64,), (80,)]),
    "weights": same(*REALS, sizes=[(64,), (80,)]),
    "sums": same(*REALS, sizes=[(64,), (80,)]),
    "turnstile": same(*REALS, sizes=[(64,), (128,)]),
    "parts": same(*REALS, sizes=[(64, 32), (128, 128), (192, 8)]),
    "mail": {"int": [()]},
    "turns_named": {"int": [()]},
    "turns_mbarrier": {"int": [()]},
}


def name(family: str, element: str, sizes: Sizes = ()) -> str:
    return " ".join([family, element, *map(str, sizes)])


def instances(machine: Machine, family: str) -> list[tuple[str, Sizes]]:
    """The kernels of a family that a machine has. sm90 has 16-bit elements, and float where a kernel has sums alone."""
    table = FAMILIES[family]
    missing = () if machine is not SM90 else ("float", "double") if "bf16" in table else ("double",)
    return [(element, sizes) for element, rows in table.items() if element not in missing for sizes in rows]


def on_every_machine(*families: str) -> Any:
    """Parametrizes a test over (machine, family, element, sizes)."""
    return pytest.mark.parametrize(
        ("machine", "family", "element", "sizes"),
        [
            pytest.param(
                machine,
                family,
                element,
                sizes,
                marks=[pytest.mark.gpu] if machine is SM90 else [],
                id="-".join([str(machine), family, element, *map(str, sizes)]),
            )
            for family in families
            for machine in (*CPU, SM90)
            for element, sizes in instances(machine, family)
        ],
    )
