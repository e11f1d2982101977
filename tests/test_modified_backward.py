"""The backward ops with modifiers on every machine: masks, a bias and its gradient, soft cap, ALiBi, dropout.

tests/test_modified.py holds the forward; here output and logsumexp come from the reference.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from dropout_rule import kept, share_dropped
from helpers import CORNERS, assert_accurate, inputs, normal
from torch import Tensor

from kittens_torch import backward, ops, reference

INF = float("inf")
BATCH, HEADS, HEADS_K, LENGTH_Q, LENGTH_K = 2, 4, 2, 150, 200
MACHINES = [("cpu", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
MACHINES += [("checked", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
on_machines = pytest.mark.parametrize(
    ("machine", "dtype"),
    [*MACHINES, *(pytest.param("sm90", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16))],
    ids=lambda value: str(value).removeprefix("torch."),
)
usual = pytest.mark.parametrize(
    ("machine", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("checked", torch.bfloat16),
        pytest.param("sm90", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("sm90", torch.float16, marks=pytest.mark.gpu),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Call:
    """A backward call: its operands, and what modifies the scores."""

    tensors: tuple[Tensor, Tensor, Tensor]
    interval: tuple[int, int, int] = (0, -1, -1)
    mask: Tensor | None = None
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_state: Tensor | None = None
    dropout_p: float = 0.0
    softcap: float = 0.0
    sinks: Tensor | None = None
    needed: tuple[bool, bool, bool, bool] | None = None
    deterministic: bool = False
    configuration: int = -1
    seed: int | None = None
    grad_output: Tensor = field(init=False)
    grad_logsumexp: Tensor = field(init=False)

    def __post_init__(self) -> None:
        query, _, value = self.tensors
        shape = query.shape[:3]
        self.grad_output = normal(*shape, value.shape[3], device=query.device, dtype=query.dtype)
        self.grad_logsumexp = normal(*shape, device=query.device, dtype=_real(query.dtype))

    def formula(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, logsumexp and the gradients of query, key, value and bias, of the reference in `dtype`."""
        operands = [tensor.detach().to(dtype).contiguous().requires_grad_() for tensor in self.tensors]
        bias = None if self.bias is None else self.bias.detach().to(dtype).requires_grad_()
        corner, *sides = self.interval
        batch, heads, length_q, _ = operands[0].shape
        keep = None
        if self.dropout_p > 0:
            assert self.dropout_state is not None
            shape = (batch, heads, length_q, operands[1].shape[2])
            keep = kept(self.dropout_state.cpu(), self.dropout_p, *shape).to(operands[0].device)
        output, logsumexp = reference.attention(
            *operands,
            causal=CORNERS[corner],
            window=tuple(None if side < 0 else side for side in sides),
            mask=self.mask,
            bias=bias,
            key_lengths=self.key_lengths,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            kept=keep,
            dropout_p=share_dropped(self.dropout_p),
        )
        # Rows without keys have a constant logsumexp of -inf: no gradient passes there.
        targets = [output, logsumexp.masked_fill(logsumexp == -INF, 0.0)]
        sources = [self.grad_output.to(dtype), self.grad_logsumexp.to(dtype)]
        wanted = [*operands, *([] if bias is None else [bias])]
        return output.detach(), logsumexp.detach(), torch.autograd.grad(targets, wanted, sources)

    def gradients(self, saved: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
        """The op's, from output and logsumexp in float64 unless others are given."""
        query = self.tensors[0]
        if saved is None:
            output, logsumexp, _ = self.formula(torch.float64)
            saved = output.to(query.dtype), logsumexp.to(_real(query.dtype))
        arguments = (
            self.grad_output,
            self.grad_logsumexp,
            *self.tensors,
            *saved,
            query.shape[-1] ** -0.5,
            *self.interval,
            self.mask,
            self.bias,
            self.key_lengths,
            self.alibi_slopes,
            self.dropout_state,
            self.dropout_p,
            self.softcap,
            *(self.needed or (True, True, True, self.bias is not None)),
            self.deterministic,
            self.configuration,
        )
        if self.seed is None:
            return backward.backward_modified(*arguments)
        return backward.checked_backward_modified(*arguments, self.seed)

    def check(self) -> tuple[Tensor, ...]:
        output, logsumexp, exact = self.formula(torch.float64)
        dtype = self.tensors[0].dtype
        _, _, same_formula = self.formula(dtype)
        ours = self.gradients((output.to(dtype), logsumexp.to(_real(dtype))))
        operands = (*self.tensors, *([] if self.bias is None else [self.bias]))
        assert len(ours) == 4 and (self.bias is not None or ours[3].numel() == 0)
        names = ("grad_query", "grad_key", "grad_value", "grad_bias")
        for name, mine, operand, right, plain in zip(names, ours, operands, exact, same_formula, strict=False):
            assert mine.dtype == operand.dtype and mine.shape == operand.shape, name
            assert_accurate(name, mine, right, plain, 3)
        assert self.bias is None or ours[3].is_contiguous()
        return ours


def call(machine: str, dtype: torch.dtype, **keywords: Any) -> Call:
    """Tensors of the usual shape, on the machine's device, unless others are named."""
    shape = {"batch": BATCH, "heads": HEADS, "heads_k": HEADS_K, "length_q": LENGTH_Q, "length_k": LENGTH_K}
    shape |= {"head_dim": 40, "value_dim": 24}
    for name in [name for name in keywords if name in shape]:
        shape[name] = keywords.pop(name)
    tensors = inputs("cuda" if machine == "sm90" else "cpu", dtype, **shape)
    seed = keywords.pop("seed", 0)
    return Call(tensors, **keywords, seed=seed if machine == "checked" else None)


def options(
    device: torch.device, dtype: torch.dtype, length_q: int = LENGTH_Q, length_k: int = LENGTH_K
) -> dict[str, dict[str, Any]]:
    """One value of each option, by its name."""
    real = _real(dtype)
    return {
        "mask": {"mask": torch.rand(BATCH, 1, length_q, length_k, device=device) > 0.4},
        "bias": {"bias": normal(1, HEADS, length_q, length_k, device=device, dtype=real)},
        "key_lengths": {"key_lengths": torch.tensor([length_k * 2 // 3, 0], dtype=torch.int32, device=device)},
        "alibi_slopes": {"alibi_slopes": (torch.rand(BATCH, HEADS, device=device) / 10).to(real)},
        "softcap": {"softcap": 1.5},
        "dropout": {"dropout_state": torch.tensor([-(2**61) + 7, 5], device=device), "dropout_p": 0.3},
        "sinks": {"sinks": normal(HEADS, device=device, dtype=real)},
        "interval": {"interval": (2, 60, -1)},
    }


OPTIONS = tuple(options(torch.device("cpu"), torch.float32))


def together(of: Call) -> Call:
    """The call with every option."""
    query, key, _ = of.tensors
    for values in options(query.device, query.dtype, query.shape[2], key.shape[2]).values():
        of = replace_options(of, **values)
    lengths = torch.tensor([key.shape[2], key.shape[2] // 2], dtype=torch.int32, device=query.device)
    return replace_options(of, key_lengths=lengths)


def replace_options(of: Call, **values: Any) -> Call:
    return replace(of, **values)


# Every option, on every machine


@on_machines
@pytest.mark.parametrize("name", ["none", *OPTIONS])
def test_each_option_alone(machine: str, dtype: torch.dtype, name: str) -> None:
    plain = call(machine, dtype)
    given = options(plain.tensors[0].device, dtype)
    replace_options(plain, **given.get(name, {})).check()


@on_machines
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(1, 1), (24, 64), (64, 40), (72, 128), (128, 100), (160, 40), (40, 200), (256, 256)]
)
def test_all_options_together(machine: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    together(call(machine, dtype, head_dim=head_dim, value_dim=value_dim)).check()


@usual
@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="-".join)
def test_options_in_pairs(machine: str, dtype: torch.dtype, pair: tuple[str, str]) -> None:
    plain = call(machine, dtype, length_q=70, length_k=90)
    given = options(plain.tensors[0].device, dtype, 70, 90)
    replace_options(plain, **given[pair[0]], **given[pair[1]]).check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("head_dim", "configuration"), [(64, 0), (128, 1), (128, 2), (256, 3)])
@pytest.mark.parametrize("interval", [(0, -1, -1), (1, -1, -1), (2, 30, -1), (0, 20, 9)])
def test_checked_seeds(seed: int, head_dim: int, configuration: int, interval: tuple[int, int, int]) -> None:
    """More tiles than blocks, a group of three heads; every row of the GPU's table."""
    plain = call(
        "checked",
        torch.bfloat16,
        heads=6,
        heads_k=2,
        length_k=270,
        head_dim=head_dim,
        value_dim=48,
        configuration=configuration,
        seed=seed,
    )
    query = plain.tensors[0]
    given = {
        "mask": torch.rand(1, 6, LENGTH_Q, 270) > 0.4,
        # Of these rows a copy to shared memory can read the first's alone.
        "bias": normal(BATCH, 1, LENGTH_Q, 272 if seed % 2 else 270, dtype=query.dtype)[..., :270],
        "key_lengths": torch.tensor([270, 100], dtype=torch.int32),
        "softcap": 0.0 if configuration == 1 else 1.5,  # that row takes none
        "dropout_state": torch.tensor([3, 4]),
        "dropout_p": 0.2,
    }
    replace_options(plain, **given, interval=interval).check()


@on_machines
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", [(1, 1), (BATCH, 1), (1, 4), (BATCH, 4)], ids=str)
def test_biases_that_copies_read(machine: str, dtype: torch.dtype, head_dim: int, shape: tuple[int, int]) -> None:
    """Aligned rows, of every plane or of one for all; the same out of alignment is read in place."""
    plain = call(machine, dtype, heads=4, heads_k=2, length_q=140, length_k=136, head_dim=head_dim)
    device = plain.tensors[0].device
    bias = normal(*shape, 140, 136, device=device, dtype=dtype)
    bias[..., 3] = -INF
    replace_options(plain, bias=bias).check()
    replace_options(plain, bias=bias.new_empty(bias.numel() + 1)[1:].view(bias.shape).copy_(bias)).check()


@usual
@pytest.mark.parametrize(("length_q", "length_k"), [(1, 1), (1, 130), (130, 1), (65, 64), (64, 129), (5, 0), (0, 5)])
@pytest.mark.parametrize("corner", range(3))
def test_edges(machine: str, dtype: torch.dtype, length_q: int, length_k: int, corner: int) -> None:
    plain = call(machine, dtype, length_q=length_q, length_k=length_k, interval=(corner, -1, -1))
    device = plain.tensors[0].device
    mask = torch.rand(BATCH, HEADS, length_q, length_k, device=device) > 0.3
    bias = normal(1, 1, length_q, length_k, device=device)
    replace_options(plain, mask=mask, bias=bias).check()


@usual
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_whose_rows_lie_in_vectors(machine: str, dtype: torch.dtype, head_dim: int) -> None:
    """Strides and addresses that are multiples of 16 bytes: blocks without anything else load the mask beforehand."""
    device = "cuda" if machine == "sm90" else "cpu"
    tensors = inputs(device, dtype, batch=1, heads=2, heads_k=1, length_q=200, length_k=336, head_dim=head_dim)
    mask = torch.rand(1, 2, 200, 336, device=device) > 0.5
    mask[:, 0, 64:128, 128:256], mask[:, 1, 70], mask[:, 1, :, 300] = True, False, False
    for given in (mask, mask[:, :1], mask[..., 3:]):
        shifted = tuple(t[:, :, : given.shape[-1]] if i else t for i, t in enumerate(tensors))
        for interval in ((0, -1, -1), (1, -1, -1)):
            for seed in (3, 4) if machine == "checked" else (None,):
                Call(shifted, interval, mask=given, seed=seed).check()


@usual
def test_intervals_that_begin_late(machine: str, dtype: torch.dtype) -> None:
    """Keys before the first that a row sees count in every modifier, and in dropout."""
    for interval in ((2, 20, -1), (0, 3, 9), (2, 70, 5)):
        plain = call(machine, dtype, length_q=40, length_k=330, interval=interval)
        given = options(plain.tensors[0].device, dtype, 40, 330)
        replace_options(plain, **given["bias"], **given["alibi_slopes"], **given["dropout"]).check()


# The bias and its gradient


@usual
@pytest.mark.parametrize("apart", list(itertools.product((False, True), repeat=4)), ids=str)
@pytest.mark.parametrize("of_query", [False, True], ids=["float32", "dtype of the query"])
def test_bias_that_broadcasts(machine: str, dtype: torch.dtype, apart: tuple[bool, ...], of_query: bool) -> None:
    """The gradient is summed over what is broadcast, several tiles of rows and of keys included."""
    plain = call(machine, dtype)
    whole = (BATCH, HEADS, LENGTH_Q, LENGTH_K)
    shape = [n if full else 1 for n, full in zip(whole, apart, strict=True)]
    bias = normal(*shape, device=plain.tensors[0].device, dtype=dtype if of_query else torch.float32)
    biased = replace_options(plain, bias=bias, softcap=2.0, interval=(2, -1, -1))
    if any(apart):
        biased.check()
        return
    # One number for everything: what remains of sums that cancel is small beside them.
    ours, exact = biased.gradients()[3].double(), biased.formula(torch.float64)[2][3]
    assert (ours - exact).abs().max() < (1e-3 if dtype == torch.float32 else 0.3)


@usual
@pytest.mark.parametrize("layout", ["transposed", "sliced", "misaligned", "expanded"])
def test_strides_of_modifiers(machine: str, dtype: torch.dtype, layout: str) -> None:
    plain = call(machine, dtype)
    device = plain.tensors[0].device
    mask = torch.rand(BATCH, HEADS, LENGTH_Q, LENGTH_K, device=device) > 0.4
    bias = normal(BATCH, HEADS, LENGTH_Q, LENGTH_K, device=device)
    if layout == "expanded":
        mask, bias = mask[:, :1].expand(mask.shape), bias[:, :, :1].expand(bias.shape)

    def laid_out(tensor: Tensor) -> Tensor:
        if layout == "transposed":
            return tensor.transpose(1, 3).contiguous().transpose(1, 3)
        if layout == "sliced":
            wide = tensor.new_zeros(BATCH, HEADS, LENGTH_Q + 3, 2 * LENGTH_K + 5)
            return wide[:, :, 2 : 2 + LENGTH_Q, 3 : 3 + 2 * LENGTH_K : 2].copy_(tensor)
        return tensor.new_empty(tensor.numel() + 1)[1:].copy_(tensor.flatten()).view(tensor.shape)

    moved = replace_options(plain, mask=mask, bias=bias) if layout == "expanded" else None
    plain = replace_options(plain, mask=mask.contiguous(), bias=bias.contiguous())
    moved = moved or replace_options(plain, mask=laid_out(mask), bias=laid_out(bias))
    moved.grad_output, moved.grad_logsumexp = plain.grad_output, plain.grad_logsumexp
    assert all(torch.equal(a, b) for a, b in zip(moved.gradients(), plain.gradients(), strict=True))


@usual
@pytest.mark.parametrize("deterministic", [False, True])
def test_repeats_are_the_same_bit_for_bit(machine: str, dtype: torch.dtype, deterministic: bool) -> None:
    """Also the gradient of a bias that is summed over everything but the keys."""
    plain = together(call(machine, dtype, deterministic=deterministic))
    plain = replace_options(plain, bias=normal(1, 1, 1, LENGTH_K, device=plain.tensors[0].device))
    first = plain.gradients()
    for seed in range(1, 4):
        if machine == "checked":
            plain.seed = seed
        assert all(torch.equal(a, b) for a, b in zip(plain.gradients(), first, strict=True))


@usual
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_only_what_is_asked_for(machine: str, dtype: torch.dtype, head_dim: int) -> None:
    plain = together(call(machine, dtype, head_dim=head_dim))
    full = plain.gradients()
    for needed in itertools.product((False, True), repeat=4):
        plain.needed = needed
        for gradient, wanted, expected in zip(plain.gradients(), needed, full, strict=True):
            assert torch.equal(gradient, expected) if wanted else gradient.shape == (0,)


# What is hidden


@usual
@pytest.mark.parametrize("hidden_by", ["mask", "mask of one row", "bias", "key_lengths"])
@pytest.mark.parametrize("poison", [float("nan"), INF])
def test_what_no_row_sees_reaches_nothing(machine: str, dtype: torch.dtype, hidden_by: str, poison: float) -> None:
    for head_dim in (40, 100, 200):
        plain = call(machine, dtype, head_dim=head_dim)
        device = plain.tensors[0].device
        hidden = torch.zeros(BATCH, LENGTH_K, dtype=torch.bool, device=device)
        hidden[0, 170:] = hidden[1, 100:] = True
        if hidden_by != "key_lengths":
            hidden[:, 30:70] = hidden[:, 80] = True
        rows = hidden.view(BATCH, 1, 1, LENGTH_K)
        if hidden_by == "mask":
            mask = torch.rand(BATCH, HEADS, LENGTH_Q, LENGTH_K, device=device) > 0.3
            plain.mask = mask & ~rows
        elif hidden_by == "mask of one row":
            plain.mask = ~rows
        elif hidden_by == "bias":
            bias = normal(BATCH, HEADS, LENGTH_Q, LENGTH_K, device=device).masked_fill(rows, -INF)
            plain.bias = bias
        else:
            plain.key_lengths = torch.tensor([170, 100], dtype=torch.int32, device=device)
        output, logsumexp, _ = plain.formula(torch.float64)
        saved = output.to(dtype), logsumexp.to(_real(dtype))
        clean = plain.gradients(saved)
        query, key, value = plain.tensors
        where = hidden[:, None, :, None]
        plain.tensors = query, key.masked_fill(where, poison), value.masked_fill(where, poison)
        ours = plain.gradients(saved)
        assert all(torch.equal(a, b) for a, b in zip(ours, clean, strict=True))
        assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in ours[:3])
        for gradient in ours[1:3]:
            assert not gradient.masked_select(where.expand_as(gradient)).any()


@usual
@pytest.mark.parametrize("head_dim", [40, 100, 200])
@pytest.mark.parametrize("heads_of_mask", [1, HEADS])
def test_blocks_that_a_mask_hides(machine: str, dtype: torch.dtype, head_dim: int, heads_of_mask: int) -> None:
    """Whole tiles are empty: documents in a row, keys that no row sees, rows that see none, and poison there."""
    plain = call(machine, dtype, length_q=400, length_k=450, head_dim=head_dim)
    query, key, value = plain.tensors
    documents = torch.tensor([0, 100, 130, 300, 450], device=query.device)
    row, column = (torch.bucketize(torch.arange(n, device=query.device), documents, right=True) for n in (400, 450))
    mask = (row[:, None] == column).expand(BATCH, heads_of_mask, -1, -1).clone()
    mask[1, :, :, 130:300] = False  # a document without keys
    mask[:, -1, 320:400] = False
    bias = normal(1, HEADS, 400, 450, device=query.device)
    plain = replace_options(plain, mask=mask, bias=bias, softcap=2.0)
    clean = plain.check()
    output, logsumexp, _ = plain.formula(torch.float64)
    saved = output.to(dtype), logsumexp.to(_real(dtype))
    key, value = key.clone(), value.clone()
    key[1, :, 130:300] = value[1, :, 130:300] = float("nan")
    plain.tensors = query, key, value
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients(saved), clean, strict=True))


@usual
def test_rows_without_a_key(machine: str, dtype: torch.dtype) -> None:
    plain = call(machine, dtype)
    mask = torch.rand(BATCH, HEADS, LENGTH_Q, LENGTH_K, device=plain.tensors[0].device) > 0.5
    mask[0, :, 3:90] = False
    mask[1, 1] = False
    plain = replace_options(plain, mask=mask, bias=normal(1, 1, LENGTH_Q, 1, device=mask.device))
    ours = plain.check()
    empty = ~mask.any(-1)
    assert not ours[0][empty].any()
    plain.grad_logsumexp[empty] = float("nan")
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients(), ours, strict=True))


@on_machines
@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e30, -1e9], ids=["least", "-1e30", "-1e9"])
@pytest.mark.parametrize("slopes", [False, True], ids=["", "alibi"])
def test_biases_that_swallow_the_scores(machine: str, dtype: torch.dtype, lowest: float, slopes: bool) -> None:
    """Beside others such a key is as good as hidden; in a row of nothing else all count alike, as in torch's sums."""
    if dtype == torch.float64 and lowest == -1e9:
        pytest.skip("float64 keeps both summands")
    plain = call(machine, dtype, interval=(2, -1, -1))
    query, key, value = plain.tensors
    device, real = query.device, _real(dtype)
    swallows = torch.zeros(LENGTH_Q, LENGTH_K, dtype=torch.bool, device=device)
    swallows[:, ::3] = swallows[20:70] = True
    mask = torch.rand(BATCH, 1, LENGTH_Q, LENGTH_K, device=device) > 0.5
    mask[:, :, 70] = torch.arange(LENGTH_K, device=device) == 30  # one key, and it is such a one
    bias = normal(BATCH, 1, LENGTH_Q, LENGTH_K, device=device, dtype=real)
    alibi = torch.rand(HEADS, device=device).to(real) / 10 if slopes else None
    exact = replace_options(plain, mask=mask, bias=bias.masked_fill(swallows, -1e30), alibi_slopes=alibi)
    (output, _, grads), (plain_output, _, plain_grads) = exact.formula(torch.float64), exact.formula(dtype)
    ours = replace_options(exact, bias=bias.masked_fill(swallows, lowest))
    ours.grad_output, ours.grad_logsumexp = exact.grad_output, exact.grad_logsumexp
    settings = (query.shape[-1] ** -0.5, 2, -1, -1, mask, ours.bias, None, alibi, None, None, 0.0, 0.0)
    if machine == "checked":
        saved = ops.checked_forward_modified(query, key, value, *settings, -1, 0)
    else:
        saved = ops.forward_modified(query, key, value, *settings)
    assert_accurate("output", saved[0], output, plain_output, 2)
    names = ("grad_query", "grad_key", "grad_value", "grad_bias")
    for name, mine, right, same_formula in zip(names, ours.gradients(saved), grads, plain_grads, strict=True):
        # A logsumexp near -16384 (base 2) has ten bits after the point: so far are the weights off, all of a row alike.
        allowed = right + (same_formula - right).abs() + 2**-12 * right.abs().max()
        assert_accurate(name, mine, right, allowed, 3)


@usual
def test_a_visible_nan_stays(machine: str, dtype: torch.dtype) -> None:
    plain = call(machine, dtype)
    query, key, value = plain.tensors
    key = key.clone()
    key[0, 0, 17, 3] = float("nan")
    mask = torch.ones(1, 1, LENGTH_Q, LENGTH_K, dtype=torch.bool, device=key.device)
    mask[:, :, :70, 17] = False
    plain.tensors, plain.mask = (query, key, value), mask
    output, logsumexp, _ = plain.formula(torch.float64)
    ours = plain.gradients((output.to(dtype), logsumexp.to(_real(dtype))))
    assert ours[0][0, :2, 70:].isnan().all() and ours[0][1].isfinite().all() and ours[0][0, 2:].isfinite().all()
    assert ours[1][0, 0].isnan().all() and ours[1][0, 1].isfinite().all()
