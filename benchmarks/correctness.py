"""Is what was timed right? Checked before timing, against float64 on a sample and against torch over everything.

The sample (a few heads, some rows of each) is held to the rule of the tests: at most ``FACTOR`` times the error of the
same formula computed in the input's dtype, plus ``FLOOR``. The whole result is then compared with torch's, in relative
L2 norm per row for outputs and per head for gradients, which shows a tile in the wrong place or never written. Where
torch's function cannot say what a row asks for, the formula in float32 stands in its place, over everything too.

Rows that see no key are left out: peers differ in what they return there, and nothing uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .inputs import Inputs
from .modifiers import NO_MODIFIERS, Modifiers, modified_scores, visible, weights_of
from .peers import Peer, load_torch
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


def attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, shape: Shape, modifiers: Modifiers = NO_MODIFIERS
) -> Tensor:
    """The formula, in the dtype of its arguments: query rows (R, D) numbered ``rows``, key (Lk, D), value (Lk, Dv).

    ``modifiers`` are those of this head (`Modifiers.of_head`).
    """
    scores = modified_scores(product(query, key.mT) * shape.softmax_scale, rows, shape.length_q, modifiers)
    seen = visible(rows, shape.length_q, key.shape[0], shape.causal, modifiers)
    return product(weights_of(scores, seen, rows, modifiers).to(value.dtype), value)


def spread_out(size: int, count: int) -> list[int]:
    """``count`` indices from 0 to size - 1, both ends included."""
    if count >= size:
        return list(range(size))
    return sorted({round(i * (size - 1) / max(1, count - 1)) for i in range(count)})


def row_blocks(shape: Shape) -> Iterator[slice]:
    """The query rows of a head in blocks of CHUNK_SCORES scores."""
    step = max(1, CHUNK_SCORES // shape.length_k)
    for start in range(0, shape.length_q, step):
        yield slice(start, min(start + step, shape.length_q))


def gradients(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, shape: Shape, dtype: torch.dtype,
    modifiers: Modifiers = NO_MODIFIERS, batch: int = 0, first_head: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of one key head: query and grad_output are (group, Lq, .), key and value (Lk, .).

    ``batch`` and ``first_head`` say where they stand among ``modifiers``, whose leaves get their share of a gradient
    each, behind the three. The products run in ``dtype``, in blocks of rows; sums over blocks are kept in float64.
    """
    modifiers = modifiers.differentiated(dtype)
    leaves = (*(tensor.detach().to(dtype).requires_grad_() for tensor in (key, value)), *modifiers.leaves)
    grad_query = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    sums = [torch.zeros(leaf.shape, dtype=torch.float64, device=leaf.device) for leaf in leaves]
    for head in range(query.shape[0]):
        for block in row_blocks(shape):
            rows = torch.arange(block.start, block.stop, device=query.device)
            part = query[head, block].detach().to(dtype).requires_grad_()
            output = attend(part, leaves[0], leaves[1], rows, shape, modifiers.of_head(batch, first_head + head))
            found = torch.autograd.grad(output, (part, *leaves), grad_output[head, block].to(dtype))
            grad_query[head, block] = found[0].double()
            for total, share in zip(sums, found[1:], strict=True):
                total += share.double()
    return grad_query, *sums


def by_head(tensor: Tensor) -> Tensor:
    """A gradient with its heads in dimension 1; that of the sinks, a number for each, counts as one head."""
    return tensor if tensor.dim() == 4 else tensor.reshape(1, 1, 1, -1)


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
        self.shape, self.inputs, self.modifiers = shape, inputs, inputs.modifiers
        self.blind = self.modifiers.blind_rows()
        self.direction = "fwd" if inputs.grad_output is None else "bwd"
        with torch.set_grad_enabled(self.direction == "bwd"):
            self.samples = self.sample_output() if self.direction == "fwd" else self.sample_gradients()
            if self.modifiers.none:
                self.torch = self.torch_results()
            else:
                self.torch = self.formula_output() if self.direction == "fwd" else self.formula_gradients()

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
            modifiers = self.modifiers.of_head(batch, head)
            exact = attend(parts[0].double(), parts[1].double(), parts[2].double(), rows, shape, modifiers)
            formula = attend(parts[0], parts[1], parts[2], rows, shape, modifiers)
            samples.append((0, (batch, head, rows), exact, self.allowed(formula, exact)))
        return samples

    def sample_gradients(self) -> list[tuple[int, tuple[slice | Tensor | int, ...], Tensor, float]]:
        """As sample_output, for all rows of the last key head and the query heads that share it."""
        shape, inputs = self.shape, self.inputs
        assert inputs.grad_output is not None
        group = shape.heads // shape.heads_k
        heads = slice(shape.heads - group, shape.heads)
        parts = (inputs.query[-1, heads], inputs.key[-1, -1], inputs.value[-1, -1], inputs.grad_output[-1, heads])
        place = (self.modifiers, shape.batch - 1, heads.start)
        exact = gradients(*parts, shape, torch.float64, *place)
        formula = gradients(*parts, shape, shape.dtype, *place)
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

    def formula_output(self) -> tuple[Tensor, ...]:
        """The output by the formula in float32, over the whole shape."""
        shape, (query, key, value) = self.shape, self.inputs.attended
        output = query.new_empty((*query.shape[:3], shape.value_dim), dtype=torch.float32)
        for batch in range(shape.batch):
            for head in range(shape.heads):
                head_k = head * shape.heads_k // shape.heads
                keys, values = key[batch, head_k].float(), value[batch, head_k].float()
                modifiers = self.modifiers.of_head(batch, head)
                for block in row_blocks(shape):
                    rows = torch.arange(block.start, block.stop, device=query.device)
                    part = query[batch, head, block].float()
                    output[batch, head, block] = attend(part, keys, values, rows, shape, modifiers)
        return (output,)

    def formula_gradients(self) -> tuple[Tensor, ...]:
        """The gradients by the formula in float32, over the whole shape: query, key, value, then the leaves."""
        shape, inputs = self.shape, self.inputs
        assert inputs.grad_output is not None
        group = shape.heads // shape.heads_k
        operands = (*inputs.attended, *self.modifiers.differentiated().leaves)
        totals = [torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in operands]
        for batch in range(shape.batch):
            for head_k in range(shape.heads_k):
                heads = slice(head_k * group, (head_k + 1) * group)
                parts = (inputs.query[batch, heads], inputs.key[batch, head_k], inputs.value[batch, head_k])
                place = (self.modifiers, batch, heads.start)
                found = gradients(*parts, inputs.grad_output[batch, heads], shape, torch.float32, *place)
                totals[0][batch, heads] = found[0].float()
                totals[1][batch, head_k] = found[1].float()
                totals[2][batch, head_k] = found[2].float()
                for total, share in zip(totals[3:], found[3:], strict=True):
                    total += share.float()
        return tuple(totals)

    def settled(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The results with zeros where they do not count: in the rows of output or query gradient that see no key."""
        if self.blind is None:
            return results
        return results[0].masked_fill(self.blind, 0.0), *results[1:]

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
        results = self.settled(results)
        verdict = self.check_sample(results)
        if not verdict.passed or self.torch is None:
            return verdict
        forward = self.direction == "fwd"
        tolerance = (ROW_TOLERANCE if forward else GRADIENT_TOLERANCE)[self.shape.dtype]
        for result, expected in zip(results, self.torch, strict=True):
            error = relative_error(by_head(result), by_head(expected), (3,) if forward else (2, 3))
            if not error <= tolerance:
                return Verdict(error, tolerance, "relative to torch, " + ("worst row" if forward else "worst head"))
        return verdict


DROPOUT_SEED = 1234


def judge(peer: Peer, shape: Shape, inputs: Inputs, reference: Reference | None) -> Verdict:
    """Whether a peer's results are right; ``reference`` is None for a row with dropout, which has one for each peer."""
    if reference is not None:
        return reference.check(peer.results(shape, inputs))
    torch.manual_seed(DROPOUT_SEED)
    results = peer.results(shape, inputs)
    kept = recovered_dropout(peer, shape, inputs)
    modifiers = replace(inputs.modifiers, kept=kept)
    verdict = dropout_rate(kept, shape, modifiers)
    if not verdict.passed:
        return verdict
    return Reference(shape, replace(inputs, modifiers=modifiers)).check(results)


def recovered_dropout(peer: Peer, shape: Shape, inputs: Inputs) -> Tensor:
    """Bool (B, Hq, Lq, Lk): the weights that a peer keeps when its generator begins at DROPOUT_SEED.

    With columns of the identity as values the output is the weights themselves; one call shows value_dim keys.
    """
    kept = torch.empty((*inputs.query.shape[:3], shape.length_k), dtype=torch.bool, device=inputs.query.device)
    differentiated = inputs.grad_output is not None
    for start in range(0, shape.length_k, shape.value_dim):
        stop = min(start + shape.value_dim, shape.length_k)
        value = torch.zeros_like(inputs.value)
        value[:, :, start:stop, : stop - start] = torch.eye(stop - start, dtype=value.dtype, device=value.device)
        # As in the timed call: some kernels draw other numbers where no gradient is asked for.
        operands = (t.detach().requires_grad_(differentiated) for t in (inputs.query, inputs.key, value))
        query, key, value = operands
        torch.manual_seed(DROPOUT_SEED)
        (weights,) = peer.results(shape, Inputs(query, key, value, None, inputs.modifiers))
        kept[..., start:stop] = weights.detach()[..., : stop - start] > 0
    return kept


def dropout_rate(kept: Tensor, shape: Shape, modifiers: Modifiers) -> Verdict:
    """Whether the share of kept weights is right; it may come in steps of 1/256, as some kernels draw bytes."""
    rows = torch.arange(shape.length_q, device=kept.device)
    seen = visible(rows, shape.length_q, shape.length_k, shape.causal, NO_MODIFIERS)
    pairs = kept.numel() if seen is None else int(seen.sum()) * kept.shape[0] * kept.shape[1]
    counted = sum(int((head if seen is None else head & seen).sum()) for head in kept.flatten(0, 1))
    share = 1.0 - modifiers.dropout_p
    allowed = 1 / 256 + 6 * (share * (1 - share) / pairs) ** 0.5
    return Verdict(abs(counted / pairs - share), allowed, "share of kept weights")
