"""The backward ops with modifiers as operators: finite differences, refusals, fake tensors, vmap.

tests/test_modified_backward.py holds their numbers on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import inputs, normal
from test_modified_backward import (
    BATCH,
    HEADS,
    HEADS_K,
    INF,
    LENGTH_K,
    LENGTH_Q,
    OPTIONS,
    call,
    options,
    replace_options,
    together,
)
from torch import Tensor

from kittens_torch import backward

# Against finite differences


@pytest.mark.parametrize("name", ["none", *OPTIONS])
def test_gradients_of_finite_differences(name: str) -> None:
    """The op's gradients against differences of the formula, without autograd."""
    plain = call("cpu", torch.float64, batch=1, heads=2, heads_k=1, length_q=3, length_k=5, head_dim=2, value_dim=3)
    given: dict[str, dict[str, Any]] = {
        "mask": {"mask": torch.rand(1, 2, 3, 5) > 0.3},
        "bias": {"bias": normal(1, 2, 1, 5, dtype=torch.float64)},
        "key_lengths": {"key_lengths": torch.tensor([4], dtype=torch.int32)},
        "alibi_slopes": {"alibi_slopes": torch.rand(2, dtype=torch.float64)},
        "softcap": {"softcap": 0.7},
        "dropout": {"dropout_state": torch.tensor([1, 2]), "dropout_p": 0.4},
        "sinks": {"sinks": normal(2, dtype=torch.float64)},
        "interval": {"interval": (2, 3, -1)},
    }
    plain = replace_options(plain, **given.get(name, {}))
    if name != "bias":
        plain = replace_options(plain, bias=torch.zeros(1, 1, 3, 5, dtype=torch.float64))
    ours = plain.gradients()
    operands = [*plain.tensors, plain.bias]
    step = 1e-5
    for operand, gradient in zip(operands, ours, strict=True):
        assert operand is not None
        flat = operand.view(-1)
        for i in range(flat.numel()):
            values = []
            for sign in (1, -1):
                flat[i] += sign * step
                output, logsumexp, _ = plain.formula(torch.float64)
                logsumexp = logsumexp.masked_fill(logsumexp == -INF, 0.0)
                values.append((output * plain.grad_output).sum() + (logsumexp * plain.grad_logsumexp).sum())
                flat[i] -= sign * step
            difference = (values[0] - values[1]) / (2 * step)
            assert abs(difference - gradient.view(-1)[i]) < 1e-8


# Refusals, fake tensors, vmap


def test_what_is_refused() -> None:
    plain = call("cpu", torch.float32)
    whole = (BATCH, HEADS, LENGTH_Q, LENGTH_K)
    for changes, message in (
        ({"mask": torch.ones(BATCH, HEADS, LENGTH_Q, LENGTH_K)}, "mask: its dtype must be bool"),
        ({"mask": torch.ones(BATCH, 3, 1, 1, dtype=torch.bool)}, r"mask \(2, 3, 1, 1\) must broadcast to"),
        ({"bias": torch.zeros(whole, dtype=torch.float64)}, "bias: its dtype must be"),
        ({"key_lengths": torch.zeros(3, dtype=torch.int32)}, "key_lengths"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout_p": 0.5}, "dropout_state"),
        ({"needed": (True, True, True, True)}, "need_bias: there is no bias"),
        ({"configuration": 9}, "configuration 9"),
    ):
        saved = torch.zeros(BATCH, HEADS, LENGTH_Q, 24), torch.zeros(BATCH, HEADS, LENGTH_Q)
        with pytest.raises(RuntimeError, match=message):
            replace_options(plain, **changes).gradients(saved)


def test_a_row_without_soft_caps_refuses_one() -> None:
    with pytest.raises(RuntimeError, match="configuration 1: this row of the table takes no soft cap"):
        call("checked", torch.bfloat16, head_dim=100, configuration=1, softcap=2.0).gradients()


@pytest.mark.parametrize("of_query", [False, True])
def test_fake_gradients(of_query: bool) -> None:
    plain = together(call("cpu", torch.bfloat16))
    if of_query:
        plain.bias = normal(1, 1, LENGTH_Q, LENGTH_K, dtype=torch.bfloat16).transpose(2, 3).contiguous().transpose(2, 3)
    plain.tensors = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in plain.tensors)  # type: ignore[assignment]
    output, logsumexp, _ = plain.formula(torch.float64)
    modifiers = (plain.mask, plain.bias, plain.key_lengths, plain.alibi_slopes, plain.dropout_state, 0.3, 1.5)
    for needed in ((True, True, True, True), (True, False, True, False)):
        arguments = (
            plain.grad_output,
            plain.grad_logsumexp,
            *plain.tensors,
            output.bfloat16(),
            logsumexp.float(),
            0.2,
            2,
            60,
            -1,
            *modifiers,
            *needed,
            False,
            -1,
        )
        torch.library.opcheck(backward.backward_modified, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["mask", "bias", "key_lengths", "alibi_slopes", "softcap", "sinks"])
def test_vmap(name: str) -> None:
    """Each element of the mapped dimension gets the gradients of a call of its own, those of a shared bias included."""
    plain = call("cpu", torch.float64, length_q=20, length_k=30)
    plain = replace_options(plain, **options(torch.device("cpu"), torch.float64, 20, 30)[name])
    samples = [plain, replace(plain, tensors=inputs("cpu", torch.float64, batch=BATCH, heads=HEADS, heads_k=HEADS_K,
                                                    length_q=20, length_k=30, head_dim=40, value_dim=24))]  # fmt: skip
    saved = [sample.formula(torch.float64)[:2] for sample in samples]
    apart = [sample.gradients(mine) for sample, mine in zip(samples, saved, strict=True)]

    def run(grad_output: Tensor, grad_logsumexp: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        modifiers = (plain.mask, plain.bias, plain.key_lengths, plain.alibi_slopes, None, 0.0, plain.softcap)
        needed = (True, True, True, plain.bias is not None)
        return backward.run_backward_modified(
            grad_output, grad_logsumexp, operands, (40**-0.5, 0, -1, -1), modifiers, needed, False
        )

    per_sample = [
        (sample.grad_output, sample.grad_logsumexp, *sample.tensors, *mine)
        for sample, mine in zip(samples, saved, strict=True)
    ]
    mapped = torch.func.vmap(run)(*(torch.stack(parts) for parts in zip(*per_sample, strict=True)))
    for ours, parts in zip(mapped, zip(*apart, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(parts))
