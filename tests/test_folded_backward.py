"""The backward that folds logsumexp and delta into products (head dim 128, dQ summed): scales, numbers not finite."""

from __future__ import annotations

import pytest
import torch
from helpers import check_gradients, inputs, normal

from kittens_torch import backward, dispatch, ops

SUMMED = 1  # the row of the table; asked for, it sums also where rows are short


@pytest.mark.parametrize("scale", [1e-22, 1e-19, 1e-3, 3.0])
def test_scales(scale: float) -> None:
    """Gradients at any scale; where the terms would leave the range of floats, dQ's owner makes it."""
    query, key, value = inputs("cpu", torch.float16, heads=2, length_q=150, length_k=200, head_dim=128)
    grad_output = normal(1, 2, 150, 128, device="cpu", dtype=torch.float16)
    saved = ops.forward(query, key, value, scale, 2, -1, -1)
    ours = backward.checked_backward(
        grad_output, None, query, key, value, *saved, scale, 2, -1, -1, True, True, True, False, SUMMED, 3
    )
    check_gradients(ours, query, key, value, grad_output, None, causal="lower_right", scale=scale)


@pytest.mark.skipif(not dispatch.has_plan(), reason="built without the plan module")
def test_plan_of_extreme_scales() -> None:
    sizes = {
        "batch": 1,
        "heads": 2,
        "heads_k": 2,
        "length_q": 4096,
        "length_k": 4096,
        "head_dim": 128,
        "value_dim": 128,
    }
    mask = {"corner": 0, "window_left": -1, "window_right": -1}
    for scale, sums in ((1e-21, False), (1e-20, True), (1.0, True), (1e20, True), (1e21, False)):
        plan = dispatch._plan.backward(machine="sm90", dtype="float16", **sizes, **mask, scale=scale)
        assert plan.sums_query == sums, scale


def test_nan_in_a_value_stays_out_of_the_values_gradient() -> None:
    query, key, value = inputs("cpu", torch.bfloat16, heads=2, length_q=200, length_k=200, head_dim=128)
    value[0, 0, 150, 3] = float("nan")
    grad_output = normal(1, 2, 200, 128, device="cpu", dtype=torch.bfloat16)
    saved = ops.forward(query, key, value, 0.1, 1, -1, -1)
    grads = backward.checked_backward(
        grad_output, None, query, key, value, *saved, 0.1, 1, -1, -1, True, True, True, False, SUMMED, 5
    )
    of_query, _, of_value = (~gradient.isfinite().all(-1) for gradient in grads)
    spoilt = ~saved[0].isfinite().all(-1)  # the rows whose output is NaN
    assert spoilt[0, 0, 150:].all() and not spoilt[0, 0, :128].any() and torch.equal(of_query, spoilt)
    assert not of_query[0, 1].any() and not of_value.any()
