"""Random shapes, strides and flags against the reference."""

from __future__ import annotations

from typing import Any

import torch
from dropout_rule import kept, share_dropped
from helpers import assert_accurate, assert_logsumexp, check_forward, check_gradients, check_result, doubles
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kittens_torch
from kittens_torch import reference

# No deadline: the machine may be busy. The same examples in every run.
settings.register_profile(
    "kittens_torch", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=150
)
settings.load_profile("kittens_torch")

lengths = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 79, 80, 81, 127, 128, 129, 130, 193]))
head_dims = st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 96, 128, 136]))
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
sides = st.one_of(st.none(), st.integers(0, 150))


@st.composite
def operands(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value) of any fitting sizes, each in any memory layout, inside memory full of NaN."""
    dtype, generator = draw(dtypes), torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    batch, heads_k, ratio = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length_q, length_k, head_dim, value_dim = draw(lengths), draw(lengths), draw(head_dims), draw(head_dims)

    def laid_out(*shape: int) -> Tensor:
        order = draw(st.permutations(range(4)))
        padding = [draw(st.sampled_from([0, 0, 1, 3])) for _ in range(4)]
        steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in range(4)]
        start = [draw(st.integers(0, amount)) for amount in padding]
        wide = [size * step + amount for size, step, amount in zip(shape, steps, padding, strict=True)]
        buffer = torch.full([wide[dim] for dim in order], float("nan"), dtype=dtype)
        view = buffer.permute([order.index(dim) for dim in range(4)])
        view = view[tuple(slice(s, s + n * step, step) for s, n, step in zip(start, shape, steps, strict=True))]
        view.copy_(torch.randn(shape, generator=generator))
        expand = [size > 1 and draw(st.integers(0, 9)) == 0 for size in shape[:3]]
        one = view[tuple(slice(0, 1) if e else slice(None) for e in expand)]
        return one.expand(shape)

    return (
        laid_out(batch, heads_k * ratio, length_q, head_dim),
        laid_out(batch, heads_k, length_k, head_dim),
        laid_out(batch, heads_k, length_k, value_dim),
    )


masks = st.fixed_dictionaries(
    {
        "causal": st.sampled_from([None, "upper_left", "lower_right"]),
        "window": st.one_of(st.none(), st.tuples(sides, sides)),
        "scale": st.one_of(st.none(), st.floats(-0.5, 0.5, allow_subnormal=False)),
    }
)


@given(operands(), masks)
def test_forward(tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any]) -> None:
    before = [tensor.clone() for tensor in tensors]
    output, _ = check_forward(*tensors, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    faked, _ = torch.ops.kittens_torch.forward(*(tensor.to("meta") for tensor in tensors), 1.0, 0, -1, -1)
    assert faked.shape == output.shape


@given(operands(), masks)
@settings(max_examples=40)
def test_gradients(tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(7)
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
    output = kittens_torch.attention(query, key, value, **keywords)
    grad_output = torch.randn(output.shape, generator=generator).to(output.dtype)
    grads = torch.autograd.grad(output, (query, key, value), grad_output)
    check_gradients(grads, query, key, value, grad_output, **keywords)


@given(operands(), masks, st.integers(0, 2**31 - 1))
@settings(max_examples=40)
def test_checked_machine(tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], seed: int) -> None:
    if tensors[0].dtype == torch.float64:  # not built for the checking flavour
        tensors = tuple(tensor.float() for tensor in tensors)
    with kittens_torch.checked_machine(seed=seed):
        output, logsumexp = kittens_torch.attention(*tensors, return_lse=True, **keywords)
    check_result(output, logsumexp, *tensors, **keywords)


@st.composite
def modifiers(draw: st.DrawFn, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Some of the options that change scores or weights, of shapes that broadcast and of any strides."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    batch, heads, length_q = query.shape[:3]
    whole = (batch, heads, length_q, key.shape[2])
    real = torch.float64 if query.dtype == torch.float64 else torch.float32

    def shape() -> list[int]:
        full = [1 if draw(st.booleans()) else size for size in whole]
        return full[draw(st.integers(0, 3)) :] if draw(st.booleans()) else full

    def laid_out(tensor: Tensor) -> Tensor:
        order = draw(st.permutations(range(tensor.dim())))
        step = draw(st.sampled_from([1, 1, 2]))
        moved = tensor.permute(order)
        wide = torch.zeros([*moved.shape, step], dtype=tensor.dtype)
        wide[..., 0] = moved
        return wide[..., 0].permute([order.index(dim) for dim in range(tensor.dim())])

    given: dict[str, Any] = {}
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
        given["mask"] = laid_out(torch.rand(shape(), generator=generator) < share)
    if draw(st.booleans()):
        bias = torch.randn(shape(), generator=generator).to(draw(st.sampled_from([real, query.dtype])))
        hidden = torch.rand(bias.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3]))
        given["bias"] = laid_out(bias.masked_fill(hidden, -float("inf")))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        given["key_lengths"] = torch.randint(0, key.shape[2] + 1, (batch,), generator=generator, dtype=dtype)
    if draw(st.booleans()):
        given["softcap"] = draw(st.sampled_from([0.5, 10.0, 50.0]))
    if draw(st.booleans()):
        of = (batch, heads) if draw(st.booleans()) else (heads,)
        given["alibi_slopes"] = torch.rand(of, generator=generator).to(real)
    if draw(st.booleans()):
        given["sinks"] = torch.randn(heads, generator=generator).to(real)
    return given


def check_modified(
    tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], given: dict[str, Any], p: float
) -> None:
    query, key = tensors[:2]
    torch.manual_seed(5)
    output, logsumexp = kittens_torch.attention(*tensors, return_lse=True, dropout_p=p, **keywords, **given)
    if p > 0.0:
        torch.manual_seed(5)
        state = torch.randint(2**63 - 1, (2,))
        which = kept(state, p, *query.shape[:3], key.shape[2])
        given = {**given, "kept": which, "dropout_p": share_dropped(p)}
    exact, exact_logsumexp = reference.attention(*doubles(*tensors), **keywords, **given)
    same_formula, _ = reference.attention(*tensors, **keywords, **given)
    assert_accurate("output", output, exact, same_formula, 2)
    assert_logsumexp(logsumexp, exact_logsumexp, query.dtype)


rates = st.sampled_from([0.0, 0.0, 0.2, 0.7])


@given(operands(), masks, rates, st.data())
def test_modifiers(
    tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], p: float, data: st.DataObject
) -> None:
    check_modified(tensors, keywords, data.draw(modifiers(*tensors[:2])), p)


@given(operands(), masks, rates, st.integers(0, 2**31 - 1), st.data())
@settings(max_examples=60)
def test_modifiers_on_the_checked_machine(
    tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], p: float, seed: int, data: st.DataObject
) -> None:
    if tensors[0].dtype == torch.float64:  # not built for the checking flavour
        tensors = tuple(tensor.float() for tensor in tensors)
    with kittens_torch.checked_machine(seed=seed):
        check_modified(tensors, keywords, data.draw(modifiers(*tensors[:2])), p)
