"""Sums of many CTAs in a fixed order: the turnstile on every machine, and what the checked machine says of misuse."""

from __future__ import annotations

import torch
from tiles.cases import name, on_every_machine
from tiles.machine import DTYPES, Machine
from test_tiles import assert_equal


@on_every_machine("turnstile")
def test_sums_in_a_fixed_order(machine: Machine, family: str, element: str, sizes: tuple[int]) -> None:
    """Every bit of each sum is that of the tiles' additions one after the other; places have their own first tile."""
    (columns,), real, device = sizes, DTYPES[element], machine.device
    for tiles, places_, width, ctas in ((40, 24, 5, 7), (9, 8, 8, 2), (3, 3, 1, 5), (12, 4, 100, 1), (0, 1, 1, 3)):
        values = torch.randn(max(tiles, 1), 2, dtype=real) * 10.0 ** torch.randint(-4, 5, (max(tiles, 1), 2))
        expected, visits = torch.zeros(places_, 2, dtype=real), [0] * places_
        for tile in range(tiles):
            for place in range(tile // 2, min(tile // 2 + width, places_)):
                expected[place] += values[tile]
                visits[place] += 1
        counter = torch.zeros(2, dtype=torch.int32, device=device)
        for _ in range(3):
            sums = torch.zeros(places_, 2, 64 * columns, dtype=real, device=device)
            ended = torch.zeros(places_, dtype=torch.int32, device=device)
            tensors = [counter, values.to(device), sums, ended]
            machine.run(name(family, element, sizes), tensors, [tiles, places_, width], grid=ctas)
            assert_equal(f"{tiles} tiles on {ctas} CTAs", sums, expected.unsqueeze(-1).expand_as(sums))
            assert ended.tolist() == visits and not counter.any()
