"""The same call gives the same bits, a thousand times, while other work changes what runs where and when.

Dao-AILab/flash-attention#2244: a flag says deterministic and the gradients are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import inputs, normal
from torch import Tensor

from kittens_torch import backward, ops

BURST = 5  # calls in a row before anything else: each begins while the one before it ends
places = pytest.mark.parametrize(
    ("device", "repeats"), [("cpu", 4), pytest.param("cuda", 1000, marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
head_dims = pytest.mark.parametrize("head_dim", [64, 128, 256])
corners = pytest.mark.parametrize("corner", [0, 1], ids=["full", "causal"])


class OtherWork:
    """Products and copies on a stream of their own, more of them now and fewer then."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        if self.stream is not None:
            self.matrix = normal(1024, 1024, device=device, dtype=torch.bfloat16)
            self.memory = torch.zeros(2, 2**24, device=device)

    def begin(self, index: int) -> None:
        if self.stream is None:
            return
        with torch.cuda.stream(self.stream):
            for _ in range(index % 4):
                torch.mm(self.matrix, self.matrix)
            if index % 3 == 0:
                self.memory[1].copy_(self.memory[0])


def assert_repeats(run: Callable[[], tuple[Tensor, ...]], names: tuple[str, ...], device: str, repeats: int) -> None:
    """Every result has the bits of the first call's at each of the repeats."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])

    first = [bits(result) for result in run()]
    assert len(first) == len(names)
    different = torch.zeros(len(names), dtype=torch.int64, device=device)
    other_work = OtherWork(device)
    for start in range(0, repeats, BURST):
        other_work.begin(start // BURST)
        burst = [run() for _ in range(min(BURST, repeats - start))]
        for results in burst:
            different += torch.stack([(bits(a) != b).any() for a, b in zip(results, first, strict=True)])
    wrong = {name: count for name, count in zip(names, different.tolist(), strict=True) if count}
    assert not wrong, f"of {repeats} repeats so many differ: {wrong}"


def test_a_single_difference_is_found() -> None:
    values = [torch.zeros(3) for _ in range(12)]
    values[11][1] = -0.0
    with pytest.raises(AssertionError, match=r"of 11 repeats so many differ: \{'right': 1\}"):
        assert_repeats(lambda: (torch.ones(2), values.pop(0)), ("left", "right"), "cpu", 11)


def operands(device: str, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Grouped heads, lengths that are not whole tiles; on the GPU several tiles for each multiprocessor."""
    size = {"batch": 4, "heads": 16, "heads_k": 4, "length_q": 650, "length_k": 600}
    if device == "cpu":
        size = {"batch": 1, "heads": 4, "heads_k": 2, "length_q": 150, "length_k": 140}
    return inputs(device, torch.bfloat16, **size, head_dim=head_dim)


@places
@head_dims
@corners
def test_forward(device: str, repeats: int, head_dim: int, corner: int) -> None:
    tensors = operands(device, head_dim)
    settings = (head_dim**-0.5, corner, -1, -1)
    assert_repeats(lambda: ops.forward(*tensors, *settings), ("output", "logsumexp"), device, repeats)


@places
@head_dims
@corners
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward(device: str, repeats: int, head_dim: int, corner: int, deterministic: bool) -> None:
    """All gradients where it is asked for; without asking those of the keys and values."""
    tensors = operands(device, head_dim)
    settings = (head_dim**-0.5, corner, -1, -1)
    saved = ops.forward(*tensors, *settings)
    source, of_rows = torch.randn_like(saved[0]), torch.randn_like(saved[1])

    def run() -> tuple[Tensor, ...]:
        grads = backward.backward(source, of_rows, *tensors, *saved, *settings, True, True, True, deterministic)
        return grads if deterministic else grads[1:]

    assert_repeats(run, ("query", "key", "value")[0 if deterministic else 1 :], device, repeats)


def options(name: str, query: Tensor, key: Tensor) -> tuple[tuple[Any, ...], float, float]:
    """(mask, bias, key_lengths, alibi_slopes, sinks, state), dropout_p and softcap of one kind of call."""
    (batch, heads, length_q), length_k, device = query.shape[:3], key.shape[2], query.device
    mask = torch.rand(batch, 1, length_q, length_k, device=device) > 0.4
    mask[:, :, :200, 64:256] = False  # empty tiles
    bias = normal(1, heads, length_q, length_k, device=device)
    state = torch.tensor([12345, 678], device=device)
    nothing = (None,) * 6
    return {
        "mask": ((mask, *nothing[1:]), 0.0, 0.0),
        "bias": ((None, bias, *nothing[2:]), 0.0, 0.0),
        "bias of a batch and a key": ((None, normal(batch, 1, 1, length_k, device=device), *nothing[2:]), 0.0, 0.0),
        "dropout": ((*nothing[:5], state), 0.2, 0.0),
        "all": (
            (
                mask,
                bias.bfloat16(),
                torch.full((batch,), length_k - 7, dtype=torch.int32, device=device),
                torch.rand(heads, device=device) / 10,
                normal(heads, device=device),
                state,
            ),
            0.2,
            2.0,
        ),
    }[name]


@places
@head_dims
@pytest.mark.parametrize("name", ["mask", "bias", "bias of a batch and a key", "dropout", "all"])
def test_modified(device: str, repeats: int, head_dim: int, name: str) -> None:
    """Output, and every gradient, that of the bias included."""
    query, key, value = operands(device, head_dim)
    tensors, dropout_p, softcap = options(name, query, key)
    mask, bias, key_lengths, alibi_slopes, _, state = tensors
    settings = (head_dim**-0.5, 2, -1, -1)
    forward = (query, key, value, *settings, *tensors, dropout_p, softcap)
    saved = ops.forward_modified(*forward)
    source, of_rows = torch.randn_like(saved[0]), torch.randn_like(saved[1])
    modifiers = (mask, bias, key_lengths, alibi_slopes, state, dropout_p, softcap)
    needed = (True, True, True, bias is not None)

    def run() -> tuple[Tensor, ...]:
        output, logsumexp = ops.forward_modified(*forward)
        grads = backward.backward_modified(
            source, of_rows, query, key, value, output, logsumexp, *settings, *modifiers, *needed, True
        )
        return output, logsumexp, *grads[: sum(needed)]

    names = ("output", "logsumexp", "query", "key", "value", "bias")[: 2 + sum(needed)]
    assert_repeats(run, names, device, repeats)
