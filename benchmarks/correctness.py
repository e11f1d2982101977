"""Is what was timed right? Checked before timing, against float64 on a sample and against torch over everything.

The sample (a few heads, some rows of each) is held to the rule of the tests: at most ``FACTOR`` times the error of the
same formula computed in the input's dtype, plus ``FLOOR``. The whole result is then compared with torch's, in relative
L2 norm per row for outputs and per head for gradients, which shows a tile in the wrong place or never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Inputs
from .peers import load_torch
from .presets import Shape

FACTOR = {"fwd": 2.0, "bwd": 3.0}
FLOOR = 1e-5
# Two kernels that both round the weights and the output to 8 (11, 24) bits differ by about a tenth of these.
ROW_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-4}
GRADIENT_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-3}
SAMPLE_ROWS = 256
SAMPLE_RESULTS = 512
CHUNK_SCORES = 1 << 24  # scores in memory at a time


@dataclass(frozen=True)
class Verdict:
    """The largest error against what is allowed for it."""

    error: float
    allowed: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # false for NaN


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in their dtype; for 16-bit types summed in float32, which every CPU does fast, and rounded once."""
    if left.dtype.itemsize > 2:
        return left @ right
    return (left.float() @ right.float()).to(left.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, shape: Shape) -> Tensor:
    """The formula, in the dtype of its arguments: query rows (R, D) numbered ``rows``, key (Lk, D), value (Lk, Dv)."""
    scores = product(query, key.mT) * shape.softmax_scale
    if shape.causal:
        columns = torch.arange(key.shape[0], device=key.device)
        scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
    return product(scores.softmax(-1), value)


def spread_out(size: int, count: int) -> list[int]:
    """``count`` indices from 0 to size - 1, both ends included."""
    if count >= size:
        return list(range(size))
    return sorted({round(i * (size - 1) / max(1, count - 1)) for i in range(count)})


def gradients(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, shape: Shape, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one key head: query and grad_output are (group, Lq, .), key and value (Lk, .).

    The products run in ``dtype``, in blocks of rows; sums over blocks are kept in float64.
    """
    key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in (key, value))
    grad_query = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    grad_key, grad_value = (torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (key, value))
    step = max(1, CHUNK_SCORES // shape.length_k)
    for head in range(query.shape[0]):
        for start in range(0, shape.length_q, step):
            block = slice(start, min(start + step, shape.length_q))
            rows = torch.arange(block.start, block.stop, device=query.device)
            part = query[head, block].detach().to(dtype).requires_grad_()
            output = attend(part, key, value, rows, shape)
            dq, dk, dv = torch.autograd.grad(output, (part, key, value), grad_output[head, block].to(dtype))
            grad_query[head, block] = dq.double()
            grad_key += dk.double()
            grad_value += dv.double()
    return grad_query, grad_key, grad_value


def relative_error(result: Tensor, expected: Tensor, dims: tuple[int, ...]) -> float:
    """Largest relative L2 distance over the slices that ``dims`` span, one batch at a time; NaN stays NaN."""
    worst = torch.zeros((), device=result.device)
    for ours, theirs in zip(result, expected, strict=True):
        ours, theirs = ours.float(), theirs.float()
        reduced = tuple(dim - 1 for dim in dims)
        distance = (ours - theirs).square().sum(reduced)
        worst = torch.maximum(worst, (distance / theirs.square().sum(reduced).clamp_min(1e-30)).amax())
    return float(worst.sqrt())


class Reference:
    """What the results of one row must be."""

    def __init__(self, shape: Shape, inputs: Inputs) -> None:
        self.shape, self.inputs = shape, inputs
        self.direction = "fwd" if inputs.grad_output is None else "bwd"
        with torch.set_grad_enabled(self.direction == "bwd"):
            self.samples = self.sample_output() if self.direction == "fwd" else self.sample_gradients()
            self.torch = self.torch_results()

    def sample_output(self) -> list[tuple[int, tuple[slice | Tensor | int, ...], Tensor, float]]:
        """(result number, index into it, float64 value, allowed error) of each sampled head."""
        shape, (query, key, value) = self.shape, self.inputs.attended
        rows = torch.tensor(spread_out(shape.length_q, SAMPLE_ROWS), device=query.device)
        heads = max(2, min(16, SAMPLE_RESULTS // len(rows)))
        samples: list[tuple[int, tuple[slice | Tensor | int, ...], Tensor, float]] = []
        for flat in spread_out(shape.batch * shape.heads, heads):
            batch, head = divmod(flat, shape.heads)
            head_k = head * shape.heads_k // shape.heads
            parts = (query[batch, head, rows], key[batch, head_k], value[batch, head_k])
            exact = attend(parts[0].double(), parts[1].double(), parts[2].double(), rows, shape)
            formula = attend(parts[0], parts[1], parts[2], rows, shape)
            samples.append((0, (batch, head, rows), exact, self.allowed(formula, exact)))
        return samples

    def sample_gradients(self) -> list[tuple[int, tuple[slice | Tensor | int, ...], Tensor, float]]:
        """As sample_output, for all rows of the last key head and the query heads that share it."""
        shape, inputs = self.shape, self.inputs
        assert inputs.grad_output is not None
        group = shape.heads // shape.heads_k
        heads = slice(shape.heads - group, shape.heads)
        parts = (inputs.query[-1, heads], inputs.key[-1, -1], inputs.value[-1, -1], inputs.grad_output[-1, heads])
        exact = gradients(*parts, shape, torch.float64)
        formula = gradients(*parts, shape, shape.dtype)
        indices: tuple[tuple[int | slice, ...], ...] = ((-1, heads), (-1, -1), (-1, -1))
        return [(i, indices[i], exact[i], self.allowed(formula[i], exact[i])) for i in range(3)]

    def allowed(self, formula: Tensor, exact: Tensor) -> float:
        return FACTOR[self.direction] * float((formula.double() - exact).abs().max()) + FLOOR

    def torch_results(self) -> tuple[Tensor, ...] | None:
        """torch's answer over the whole shape, or None where torch cannot run it or is itself out of bounds."""
        try:
            results = load_torch().results(self.shape, self.inputs)
        except RuntimeError:
            return None
        return results if self.check_sample(results).passed else None

    def check_sample(self, results: tuple[Tensor, ...]) -> Verdict:
        worst = Verdict(0.0, 1.0)
        for number, index, exact, allowed in self.samples:
            error = float((results[number][index].double() - exact).abs().max())
            verdict = Verdict(error, allowed, "against float64 on sampled heads")
            if not verdict.passed:
                return verdict
            if error / allowed >= worst.error / worst.allowed:
                worst = verdict
        return worst

    def check(self, results: tuple[Tensor, ...]) -> Verdict:
        """The verdict on a peer's results, given as (B, H, L, D)."""
        verdict = self.check_sample(results)
        if not verdict.passed or self.torch is None:
            return verdict
        forward = self.direction == "fwd"
        tolerance = (ROW_TOLERANCE if forward else GRADIENT_TOLERANCE)[self.shape.dtype]
        for result, expected in zip(results, self.torch, strict=True):
            error = relative_error(result, expected, (3,) if forward else (2, 3))
            if not error <= tolerance:
                return Verdict(error, tolerance, "relative to torch, " + ("worst row" if forward else "worst head"))
        return verdict
