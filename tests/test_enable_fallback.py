"""Under `enable`: what our kernels do not cover is torch's, and warns once; errors are torch's own."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import dtype_of, inputs, leaves
from torch import Tensor

import kittens_torch
from kittens_torch import FallbackError, FallbackWarning, dispatch
from kittens_torch.enable import Outcome

enable = importlib.import_module("kittens_torch.enable")  # `kittens_torch.enable` is the function.
pytestmark = pytest.mark.usefixtures("torchs_attention_as_before")


UNCOVERED = [
    ("head dim", "cpu", {}, {"head_dim": 300}, "300"),
    pytest.param("dropout", "cuda", {"dropout_p": 0.3}, {}, "dropout_p", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("name", "device", "keywords", "sizes", "reason"), UNCOVERED)
def test_what_has_no_kernel_is_torchs(
    name: str, device: str, keywords: dict[str, Any], sizes: dict[str, int], reason: str, outcomes: list[Outcome]
) -> None:
    operands = leaves(*inputs(device, dtype_of(device), **sizes))

    def run() -> list[Tensor]:
        torch.manual_seed(2)
        output = F.scaled_dot_product_attention(*operands, **keywords)
        gradients = torch.autograd.grad(output.square().sum(), operands)
        return [output.detach(), *(gradients if device == "cpu" else ())]

    expected = run()
    with kittens_torch.enabled(), pytest.warns(FallbackWarning) as caught:
        results = run() + run()
    assert all(torch.equal(mine, torchs) for mine, torchs in zip(results, expected * 2, strict=True))
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning must point at the caller"
    assert len(outcomes) == 2 and reason in outcomes[0].reason
    kittens_torch.set_fallback("error")
    with kittens_torch.enabled(), pytest.raises(FallbackError, match=reason):
        run()


def test_calls_that_torch_runs_faster_stay_there(monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome]) -> None:
    query, key, value = inputs("cpu", torch.float32)
    expected = F.scaled_dot_product_attention(query, key, value)
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: True)
    with kittens_torch.enabled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)
        assert [outcome.reason for outcome in outcomes] == [enable.TORCH_IS_FASTER]
        assert torch.equal(kittens_torch.scaled_dot_product_attention(query, key, value), expected), (
            "the drop-in's way to torch does not come back to us"
        )


def test_errors_are_torchs() -> None:
    query, key, value = inputs("cpu", torch.float32)
    with kittens_torch.enabled():
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            F.scaled_dot_product_attention(query, key.double(), value)
        with pytest.raises(RuntimeError, match="is not implemented"):
            query.requires_grad_()
            (grad,) = torch.autograd.grad(
                F.scaled_dot_product_attention(query, key, value).sum(), query, create_graph=True
            )
            grad.sum().backward()
