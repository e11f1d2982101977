"""The tolerance rule, and the inputs that many tests share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kittens_torch
from kittens_torch import modified, ops, reference

# Lengths on either side of the tile edges of every configuration (64, 80, 128, 192), and the smallest one.
LENGTHS = (1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 193, 257, 333)
RATIOS = (1, 2, 3, 6, 7, 8, 71)
CORNERS = (None, "upper_left", "lower_right")
# Errors that rounding of the result alone explains. Float64 has its own, or it would be tested as float32.
SLACK = {torch.float64: 1e-12}
LOGSUMEXP_TOLERANCE = {torch.float64: 1e-10}


def places(*cpu_dtypes: torch.dtype) -> Any:
    """Parametrizes a test over (device, dtype): the CPU with `cpu_dtypes`, and the GPU with its two."""
    return pytest.mark.parametrize(
        ("device", "dtype"),
        [("cpu", dtype) for dtype in cpu_dtypes]
        + [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)],
        ids=lambda value: str(value).removeprefix("torch."),
    )


every_place = places(torch.float32, torch.bfloat16, torch.float16, torch.float64)
usual_place = places(torch.float32, torch.bfloat16)


def normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32).to(device=device, dtype=dtype)


def inputs(
    device: str,
    dtype: torch.dtype,
    *,
    batch: int = 1,
    heads: int = 2,
    heads_k: int | None = None,
    length_q: int = 64,
    length_k: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal query, key and value; whatever is left out is as for plain self-attention."""
    heads_k = heads if heads_k is None else heads_k
    length_k = length_q if length_k is None else length_k
    value_dim = head_dim if value_dim is None else value_dim
    return (
        normal(batch, heads, length_q, head_dim, device=device, dtype=dtype),
        normal(batch, heads_k, length_k, head_dim, device=device, dtype=dtype),
        normal(batch, heads_k, length_k, value_dim, device=device, dtype=dtype),
    )


def assert_accurate(name: str, ours: Tensor, exact: Tensor, same_formula: Tensor, factor: float) -> None:
    """error(ours) <= factor * error(same formula in the input dtype) + slack, for the largest and the mean error."""
    assert ours.shape == exact.shape, f"{name}: shape {tuple(ours.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(exact).all(), f"{name}: the test itself is wrong, its reference is not finite"
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    if exact.numel() == 0:
        return
    error, allowed = (ours.double() - exact).abs(), (same_formula.double() - exact).abs()
    slack = SLACK.get(ours.dtype, 1e-5)
    for statistic, of_error, of_allowed, extra in (
        ("largest", error.max(), allowed.max(), slack),
        ("mean", error.mean(), allowed.mean(), slack / 10),
    ):
        assert of_error <= factor * of_allowed + extra, (
            f"{name}: {statistic} error {of_error:.3e}, the same formula in {ours.dtype} has {of_allowed:.3e}"
        )


def assert_logsumexp(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours.shape == exact.shape and ours.is_contiguous()
    empty = exact == float("-inf")
    assert torch.equal(ours == float("-inf"), empty), "logsumexp: rows without keys"
    difference = (ours.double() - exact)[~empty].abs()
    assert difference.numel() == 0 or difference.max() <= LOGSUMEXP_TOLERANCE.get(dtype, 1e-3), (
        f"logsumexp: error {difference.max():.3e}"
    )


def doubles(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().contiguous() for tensor in tensors]


def check_forward(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    """Runs `attention` and holds output and logsumexp against the float64 reference."""
    output, logsumexp = kittens_torch.attention(query, key, value, return_lse=True, **keywords)
    check_result(output, logsumexp, query, key, value, **keywords)
    return output, logsumexp


def check_result(output: Tensor, logsumexp: Tensor, query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> None:
    exact, exact_logsumexp = reference.attention(*doubles(query, key, value), **keywords)
    same_formula, _ = reference.attention(query.detach(), key.detach(), value.detach(), **keywords)
    assert output.dtype == query.dtype
    assert_accurate("output", output.detach(), exact, same_formula, 2)
    assert_logsumexp(logsumexp.detach(), exact_logsumexp, query.dtype)
    empty = (exact_logsumexp == float("-inf")).unsqueeze(-1).expand_as(output)
    assert not output[empty].any(), "rows without keys must be 0"


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def check_gradients(
    ours: tuple[Tensor, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    grad_logsumexp: Tensor | None = None,
    **keywords: Any,
) -> None:
    """Holds the three gradients against those of the reference, in float64 and in the dtype of the inputs."""

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        operands = [tensor.detach().to(dtype).contiguous().requires_grad_() for tensor in (query, key, value)]
        output, logsumexp = reference.attention(*operands, **keywords)
        # Rows without keys have a constant logsumexp of -inf: no gradient passes there.
        targets, sources = [output], [grad_output.to(dtype)]
        if grad_logsumexp is not None:
            targets.append(logsumexp.masked_fill(logsumexp == float("-inf"), 0.0))
            sources.append(grad_logsumexp.to(dtype))
        return torch.autograd.grad(targets, operands, sources)

    names = ("grad_query", "grad_key", "grad_value")
    for name, mine, operand, exact, same_formula in zip(
        names, ours, (query, key, value), gradients(torch.float64), gradients(query.dtype), strict=True
    ):
        assert mine.dtype == operand.dtype and mine.shape == operand.shape, name
        assert_accurate(name, mine, exact, same_formula, 3)


def dtype_of(device: str) -> torch.dtype:
    """The dtype that a test takes which needs one alone."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def masks_classified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of each call of `classify_mask` from here on, which nothing is remembered of yet."""
    calls: list[tuple[Any, ...]] = []
    classify = ops.classify_mask

    def counting(*arguments: Any) -> Any:
        calls.append(arguments)
        return classify(*arguments)

    monkeypatch.setattr(ops, "classify_mask", counting)
    modified._known.clear()
    return calls
