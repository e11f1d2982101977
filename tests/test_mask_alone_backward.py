"""The backward of calls that a bool mask alone modifies: rows of their own (`mask_alone` in backward_config.h)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import normal
from test_modified_backward import Call, call, options, replace_options
from torch import Tensor

from kittens_torch import attention

LENGTH_K = 384
machines = pytest.mark.parametrize(
    ("machine", "dtype"),
    [
        ("checked", torch.bfloat16),
        ("checked", torch.float16),
        ("checked", torch.float32),
        pytest.param("sm90", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("sm90", torch.float16, marks=pytest.mark.gpu),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
rows = pytest.mark.parametrize(
    ("head_dim", "value_dim", "row"), [(64, 64, 4), (40, 56, 4), (128, 128, 5), (72, 104, 5)]
)


def documents(length_q: int, device: torch.device) -> Tensor:
    """Causal in each of the documents, which begin off the tiles."""
    of = torch.tensor([0, 70, 71, 200, 310], device=device)
    row, key = torch.arange(length_q, device=device)[:, None], torch.arange(LENGTH_K, device=device)
    same = torch.searchsorted(of, row, right=True) == torch.searchsorted(of, key, right=True)
    return (same & (key <= row))[None, None]


def masks(length_q: int, device: torch.device) -> dict[str, Tensor]:
    """By name, of shapes that broadcast to (2, 6, length_q, LENGTH_K)."""
    padding = torch.arange(LENGTH_K, device=device) >= torch.tensor([100, 256], device=device)[:, None]
    blocks = torch.rand(1, 6, (length_q + 63) // 64, LENGTH_K // 64, device=device) > 0.6
    squares = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :length_q]
    some_rows = torch.rand(2, 1, length_q, LENGTH_K, device=device) > 0.5
    some_rows[:, :, 10:90] = False
    return {
        "random": torch.rand(2, 6, length_q, LENGTH_K, device=device) > 0.4,
        "documents": documents(length_q, device),
        "padding": padding[:, None, None],
        "squares": squares,
        "rows without keys": some_rows,
        "nothing hidden": torch.ones(1, 1, length_q, LENGTH_K, dtype=torch.bool, device=device),
        "all hidden": torch.zeros(2, 1, 1, LENGTH_K, dtype=torch.bool, device=device),
    }


def plain(
    machine: str, dtype: torch.dtype, length_q: int, head_dim: int, value_dim: int, row: int, **others: Any
) -> Call:
    shape = {"heads": 6, "heads_k": 2, "length_q": length_q, "length_k": LENGTH_K}
    return call(machine, dtype, **shape, head_dim=head_dim, value_dim=value_dim, configuration=row, **others)


@machines
@rows
@pytest.mark.parametrize("length_q", [1, 150, 320])
def test_values(machine: str, dtype: torch.dtype, length_q: int, head_dim: int, value_dim: int, row: int) -> None:
    for seed, name in enumerate(masks(length_q, torch.device("cpu"))):
        free = plain(machine, dtype, length_q, head_dim, value_dim, row, seed=seed)
        mask = masks(length_q, free.tensors[0].device)[name]
        assert mask.shape[2] == 1 or mask.stride(2) % 16 == 0
        replace_options(free, mask=mask).check()


@machines
@rows
def test_what_no_row_sees(machine: str, dtype: torch.dtype, head_dim: int, value_dim: int, row: int) -> None:
    """NaN there reaches no gradient but, at most, its own."""
    free = plain(machine, dtype, 150, head_dim, value_dim, row)
    mask = documents(150, free.tensors[0].device).clone()
    mask[..., 30:50] = False
    unseen = ~mask.any(2)[0, 0]
    masked = replace_options(free, mask=mask)
    saved = tuple(t.to(dtype if i == 0 else torch.float32) for i, t in enumerate(masked.formula(torch.float64)[:2]))
    expected = masked.gradients(saved)
    for tensor in masked.tensors[1:]:
        tensor[:, :, unseen] = float("nan")
    for name, mine, right in zip(("query", "key", "value"), masked.gradients(saved), expected, strict=False):
        torch.testing.assert_close(mine, right, msg=lambda text, name=name: f"{name}: {text}")


def test_who_takes_it() -> None:
    """The rule takes a mask alone, and leaves to the other rows what its own refuse."""
    free = call("checked", torch.bfloat16, length_k=LENGTH_K, head_dim=64, value_dim=64)
    alone = torch.rand(2, 1, 150, LENGTH_K) > 0.4
    for name, given in options(torch.device("cpu"), torch.bfloat16, length_k=LENGTH_K).items():
        if name not in ("mask", "sinks"):  # sinks are in the logsumexp
            with pytest.raises(RuntimeError, match=r"takes a bool mask alone|takes no soft cap"):
                replace_options(free, **given, mask=alone, configuration=4).gradients()
            replace_options(free, **given, mask=alone).check()
    for given in (
        {"interval": (1, -1, -1)},
        {"interval": (0, 30, -1)},
        {"deterministic": True},
        {"needed": (True, False, False, False)},
        {"needed": (False, True, True, False)},
    ):
        with pytest.raises(RuntimeError, match="takes a bool mask alone"):
            replace_options(free, **given, mask=alone, configuration=4).gradients()
        replace_options(free, **given, mask=alone).gradients()
    odd = torch.rand(2, 1, 150, LENGTH_K + 1)[..., :LENGTH_K] > 0.4
    for mask in (odd, (torch.rand(2, 1, LENGTH_K, 150) > 0.4).mT):
        displaced = mask.new_empty(mask.numel() + 1)[1:].view(mask.shape).copy_(mask)
        with pytest.raises(RuntimeError, match="takes a bool mask alone"):
            replace_options(free, mask=displaced, configuration=4).gradients()
        replace_options(free, mask=displaced).check()
    short = call("checked", torch.bfloat16, length_k=200, head_dim=64, value_dim=64)
    with pytest.raises(RuntimeError, match="takes a bool mask alone"):
        replace_options(short, mask=torch.rand(2, 1, 150, 200) > 0.4, configuration=4).gradients()


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["documents", "padding", "squares", "random"])
def test_long_rows(name: str, head_dim: int) -> None:
    """4096 keys, against the formula in float64."""
    length = 4096
    query, key, value = (normal(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    row, column = torch.arange(length, device="cuda")[:, None], torch.arange(length, device="cuda")
    mask = {
        "documents": (row // 700 == column // 700) & (column <= row),
        "padding": column >= torch.tensor([100, 3000], device="cuda")[:, None, None, None],
        "squares": (torch.rand(2, 1, 64, 64, device="cuda") > 0.7).repeat_interleave(64, 2).repeat_interleave(64, 3),
        "random": torch.rand(1, 4, length, length, device="cuda") > 0.3,
    }[name]
    while mask.dim() < 4:
        mask = mask[None]
    grad_output = normal(2, 4, length, head_dim, device="cuda", dtype=torch.bfloat16)
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    ours = torch.autograd.grad(attention(*leaves, mask=mask), leaves, grad_output)
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    scores = (exact[0] @ exact[1].mT * head_dim**-0.5).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    right = torch.autograd.grad(weights @ exact[2], exact, grad_output.double())
    for mine, other in zip(ours, right, strict=True):
        assert ((mine.double() - other).abs().max() / other.abs().max()).item() < 1e-2


def test_rows_of_the_table() -> None:
    """Rows 4 and 5, which the tests above ask for, are the last of the modified table."""
    with pytest.raises(RuntimeError, match="no such row"):
        plain("checked", torch.bfloat16, 8, 64, 64, 6, mask=torch.ones(1, 1, 8, LENGTH_K, dtype=torch.bool)).gradients()
