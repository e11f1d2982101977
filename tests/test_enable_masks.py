"""Under `enable`, calls of torch's own function with a mask stay torch's, whose backward pass is the faster one."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import check_gradients, check_result, dtype_of, inputs, leaves, normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kittens_torch
from kittens_torch.enable import Outcome

enable = importlib.import_module("kittens_torch.enable")  # `kittens_torch.enable` is the function.
pytestmark = pytest.mark.usefixtures("torchs_attention_as_before")

LENGTHS = {"batch": 2, "heads": 4, "heads_k": 2, "length_q": 70, "length_k": 90}


def make_mask(shape: tuple[int, ...], kind: str, device: str = "cpu") -> Tensor:
    """bool, or additive in the dtype of the device's queries; every row sees a key."""
    visible = (torch.rand(shape, device=device) > 0.4).index_fill(-1, torch.tensor([3], device=device), True)
    if kind == "bool":
        return visible
    return normal(*shape, device=device, dtype=dtype_of(device)).masked_fill(~visible, -torch.inf)


shapes = pytest.mark.parametrize("shape", [(70, 90), (2, 1, 1, 90), (1, 4, 70, 90), (2, 4, 1, 90)])


@shapes
def test_the_override_of_cudnn(shape: tuple[int, ...], outcomes: list[Outcome]) -> None:
    """Called itself: forward and backward hand a mask on to torch's own kernels."""
    handed_on = []

    class Torchs:
        def call_boxed(self, keys: Any, *arguments: Any, **keywords: Any) -> str:
            handed_on.append(arguments)
            return "torch's"

    overrides = {operator: override(Torchs()) for operator, _, override in enable.OVERRIDES}
    query, key, value = inputs("cpu", torch.float32, **LENGTHS)
    mask, logsumexp = make_mask(shape, "added"), torch.zeros(2, 4, 70, 1)
    forward = overrides["_scaled_dot_product_cudnn_attention"](None, query, key, value, mask, True, scale=0.2)
    rest = (query, logsumexp, None, None, mask, None, None, 70, 90, 0.0, False)
    backward = overrides["_scaled_dot_product_cudnn_attention_backward"](None, query, query, key, value, *rest)
    assert forward == backward == "torch's" and handed_on[0][3] is mask and handed_on[1][8] is mask
    assert [outcome.reason for outcome in outcomes] == [enable.MASKED]


@pytest.mark.gpu
@shapes
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_on_the_gpu(shape: tuple[int, ...], kind: str, outcomes: list[Outcome]) -> None:
    query, key, value = leaves(*inputs("cuda", torch.bfloat16, **LENGTHS))
    mask = make_mask(shape, kind, "cuda")
    keywords = {"mask": mask} if kind == "bool" else {"bias": mask}
    kittens_torch.set_fallback("error")
    with kittens_torch.enabled(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        output = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        grad_output = normal(*output.shape, device="cuda", dtype=torch.bfloat16)
        gradients = torch.autograd.grad(output, (query, key, value), grad_output)
    _, logsumexp = kittens_torch.attention(query, key, value, return_lse=True, **keywords)
    check_result(output, logsumexp, query, key, value, **keywords)
    check_gradients(gradients, query, key, value, grad_output, **keywords)
    assert [outcome.reason for outcome in outcomes] == [enable.MASKED]


def test_on_the_cpu_they_stay_torchs(outcomes: list[Outcome]) -> None:
    operands = leaves(*inputs("cpu", torch.float32, **{**LENGTHS, "heads_k": 4}))
    mask = make_mask((70, 90), "bool")

    def run() -> list[Tensor]:
        output = F.scaled_dot_product_attention(*operands, mask)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), operands)]

    expected = run()
    with kittens_torch.enabled(), warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run()
    assert all(torch.equal(mine, torchs) for mine, torchs in zip(results, expected, strict=True))
    assert [outcome.reason for outcome in outcomes] == [enable.MASKED]
