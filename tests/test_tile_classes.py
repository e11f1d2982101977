"""What is known of a bool mask before a kernel looks at it (csrc/attention/tile_classes.h)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import inputs, masks_classified, usual_place
from torch import Tensor

from kittens_torch import attention, backward, modified, ops


@usual_place
def test_classes_of_another_mask_are_refused(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=100, length_k=200)
    mask = torch.rand(1, 1, 100, 200, device=device) > 0.5
    tiles, ranges, seen = ops.classify_mask(mask, query, key, 0, -1, -1)
    assert tiles.numel() == 2 * 16 * 16 and ranges.numel() == 4 and torch.equal(seen.bool(), mask.any(2).flatten())
    settings = (1.0, 0, -1, -1, mask, None, None, None, None, None, 0.0, 0.0, -1)
    with pytest.raises(RuntimeError, match=r"mask_tiles.*of another mask"):
        ops.forward_modified(query, key, value, *settings, tiles[:-1].clone(), ranges, seen)


@usual_place
def test_the_backward_takes_what_the_forward_knows(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = [tensor.requires_grad_() for tensor in inputs(device, dtype, length_q=300, length_k=400)]
    mask = torch.rand(1, 1, 300, 400, device=device) > 0.5
    mask[..., 128:192] = False
    calls = masks_classified(monkeypatch)
    output = attention(*operands, mask=mask)
    source = torch.randn_like(output)
    once = torch.autograd.grad(output, operands, source, retain_graph=True)
    assert len(calls) == 1
    modified._known.clear()
    again = torch.autograd.grad(output, operands, source)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))

    saved = [tensor.detach() for tensor in (*operands, output)]
    arguments = (source, None, *saved, output.new_zeros(output.shape[:3], dtype=torch.float32), 1.0, 0, -1, -1, mask)
    tiles, ranges, seen = ops.classify_mask(mask, *saved[:2], 0, -1, -1)
    rest = (None, None, None, None, 0.0, 0.0, True, True, True, False, False, -1)
    with pytest.raises(RuntimeError, match=r"mask_seen.*of another mask"):
        backward.backward_modified(*arguments, *rest, tiles, ranges, seen[1:].clone())


@usual_place
def test_every_class_of_tiles(device: str, dtype: torch.dtype) -> None:
    """The classes themselves, of every shape of mask, against torch."""
    batch, heads, length_q, length_k = 2, 3, 150, 210
    query, key, _ = inputs(device, dtype, batch=batch, heads=heads, length_q=length_q, length_k=length_k, head_dim=8)
    pad = torch.nn.functional.pad
    for shape in ((2, 3, 150, 210), (1, 3, 150, 210), (2, 1, 150, 210), (1, 1, 1, 210), (2, 3, 1, 210), (1, 1, 150, 1)):
        chosen = torch.randint(0, 3, (*shape[:2], -(-shape[2] // 64), -(-shape[3] // 64)), device=device)
        large = chosen.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, : shape[2], : shape[3]]
        mask = (large == 2) | ((large == 1) & (torch.rand(shape, device=device) > 0.5))
        tiles, ranges, seen = ops.classify_mask(mask, query, key, 0, -1, -1)
        wide = mask.expand(*shape[:3], length_k)
        rows, columns = -shape[2] % 64, -length_k % 64

        def reduced(fill: bool, of: Any, wide: Tensor = wide, rows: int = rows, columns: int = columns) -> Tensor:
            whole = pad(wide, (0, columns, 0, rows), value=fill)
            return of(of(whole.unflatten(3, (-1, 64)).unflatten(2, (-1, 64)), 5), 3)

        any_seen, all_seen = reduced(False, torch.any), reduced(True, torch.all)
        expected = (any_seen + 2 * ~all_seen).flatten(0, 1)  # by rows and transposed, with padding to look beyond
        sizes = [count // 8 * 8 + 16 for count in expected.shape[1:]]
        by_rows, by_keys = tiles.view(2, -1)
        for found, right, padded in ((by_rows, expected, sizes), (by_keys, expected.mT, sizes[::-1])):
            whole = torch.zeros(expected.shape[0], *padded, dtype=torch.uint8, device=device)
            whole[:, : right.shape[1], : right.shape[2]] = right
            assert torch.equal(found.view_as(whole), whole)
        for begin_end, row in zip(ranges.view(-1, 2).tolist(), any_seen.flatten(0, 2).tolist(), strict=True):
            inside = [index for index, value in enumerate(row) if value]
            assert begin_end == ([inside[0], inside[-1] + 1] if inside else [0, 0])
        if shape[2] > 1:
            assert torch.equal(seen.bool(), wide.any(2).flatten())
