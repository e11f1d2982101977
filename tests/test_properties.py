"""Random shapes, strides and options, all at once, against the reference: forward and gradients, on both machines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dropout_rule import kept, share_dropped
from helpers import assert_accurate, assert_logsumexp, check_result, doubles
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
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
head_dims = st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 96, 128, 136]))
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "checked": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
sides = st.one_of(st.none(), st.integers(0, 150))


@st.composite
def laid_out(draw: st.DrawFn, tensor: Tensor, device: str) -> Tensor:
    """The same values in any memory layout, inside memory full of NaN; now and then one value for a whole dim."""
    order = draw(st.permutations(range(tensor.dim())))
    padding = [draw(st.sampled_from([0, 0, 1, 3])) for _ in order]
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in order]
    start = [draw(st.integers(0, amount)) for amount in padding]
    wide = [size * step + amount for size, step, amount in zip(tensor.shape, steps, padding, strict=True)]
    buffer = torch.full([wide[dim] for dim in order], float("nan"), dtype=tensor.dtype, device=device)
    view = buffer.permute([order.index(dim) for dim in range(tensor.dim())])
    places = zip(start, tensor.shape, steps, strict=True)
    view = view[tuple(slice(first, first + size * step, step) for first, size, step in places)]
    view.copy_(tensor)
    expand = [size > 1 and draw(st.integers(0, 9)) == 0 for size in tensor.shape[:3]]
    return view[tuple(slice(0, 1) if one else slice(None) for one in expand)].expand(tensor.shape)


@st.composite
def operands(draw: st.DrawFn, machine: str) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value) of any fitting sizes."""
    dtype, generator = draw(st.sampled_from(DTYPES[machine])), torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    batch, heads_k, ratio = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length_q, length_k, head_dim, value_dim = draw(lengths), draw(lengths), draw(head_dims), draw(head_dims)
    shapes = (
        (batch, heads_k * ratio, length_q, head_dim),
        (batch, heads_k, length_k, head_dim),
        (batch, heads_k, length_k, value_dim),
    )
    device = "cuda" if machine == "cuda" else "cpu"
    query, key, value = (draw(laid_out(torch.randn(shape, generator=generator).to(dtype), device)) for shape in shapes)
    return query, key, value


masks = st.fixed_dictionaries(
    {
        "causal": st.sampled_from([None, "upper_left", "lower_right"]),
        "window": st.one_of(st.none(), st.tuples(sides, sides)),
        "scale": st.one_of(st.none(), st.floats(-0.5, 0.5, allow_subnormal=False)),
    }
)


@devices
@given(st.data(), masks)
def test_forward(device: str, data: st.DataObject, keywords: dict[str, Any]) -> None:
    tensors = data.draw(operands(device))
    before = [tensor.clone() for tensor in tensors]
    check_modified(tensors, keywords, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    faked, _ = torch.ops.kittens_torch.forward(*(tensor.to("meta") for tensor in tensors), 1.0, 0, -1, -1)
    assert faked.shape == (*tensors[0].shape[:3], tensors[2].shape[3])


@given(operands("checked"), masks, st.integers(0, 2**31 - 1))
@settings(max_examples=40)
def test_checked_machine(tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], seed: int) -> None:
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
        step, start = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([0, 0, 1]))
        moved = tensor.permute(order)
        flat = torch.zeros(start + moved.numel() * step, dtype=tensor.dtype, device=query.device)[start::step]
        return flat.view(moved.shape).copy_(moved).permute([order.index(dim) for dim in range(tensor.dim())])

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
        counts = torch.randint(0, key.shape[2] + 1, (batch,), generator=generator, dtype=dtype)
        given["key_lengths"] = counts.to(query.device)
    if draw(st.booleans()):
        given["softcap"] = draw(st.sampled_from([0.5, 10.0, 50.0]))
    if draw(st.booleans()):
        of = (batch, heads) if draw(st.booleans()) else (heads,)
        given["alibi_slopes"] = torch.rand(of, generator=generator).to(query.device, real)
    if draw(st.booleans()):
        given["sinks"] = torch.randn(heads, generator=generator).to(query.device, real)
    return given


def of_reference(keywords: dict[str, Any], p: float, query: Tensor, key: Tensor) -> dict[str, Any]:
    """The options of a call after `torch.manual_seed(5)`, as the reference takes them."""
    if p == 0.0:
        return keywords
    torch.manual_seed(5)
    state = torch.randint(2**63 - 1, (2,), device=query.device)
    which = kept(state.cpu(), p, *query.shape[:3], key.shape[2]).to(query.device)
    return {**keywords, "kept": which, "dropout_p": share_dropped(p)}


def check_modified(tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], p: float) -> None:
    query, key, value = tensors
    torch.manual_seed(5)
    output, logsumexp = kittens_torch.attention(*tensors, return_lse=True, dropout_p=p, **keywords)
    keywords = of_reference(keywords, p, query, key)
    exact, exact_logsumexp = reference.attention(*doubles(*tensors), **keywords)
    same_formula, _ = reference.attention(*tensors, **keywords)
    # An output of few elements may be rounded luckily by the same formula.
    size, _ = reference.attention(*doubles(query, key, value.abs()), **keywords)
    allowed = exact + (same_formula - exact).abs() + torch.finfo(query.dtype).eps / 2 * size
    assert_accurate("output", output, exact, allowed, 2)
    assert_logsumexp(logsumexp, exact_logsumexp, query.dtype)


rates = st.sampled_from([0.0, 0.0, 0.2, 0.7])


@devices
@given(st.data(), masks, rates)
@settings(max_examples=120)
def test_modifiers(device: str, data: st.DataObject, keywords: dict[str, Any], p: float) -> None:
    tensors = data.draw(operands(device))
    check_modified(tensors, {**keywords, **data.draw(modifiers(*tensors[:2]))}, p)


@given(operands("checked"), masks, rates, st.integers(0, 2**31 - 1), st.data())
@settings(max_examples=60)
def test_modifiers_on_the_checked_machine(
    tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], p: float, seed: int, data: st.DataObject
) -> None:
    with kittens_torch.checked_machine(seed=seed):
        check_modified(tensors, {**keywords, **data.draw(modifiers(*tensors[:2]))}, p)


# Gradients


def magnitudes(
    tensors: tuple[Tensor, Tensor, Tensor], of_output: Tensor, of_logsumexp: Tensor, keywords: dict[str, Any]
) -> dict[str, Tensor]:
    """Of each gradient, the sum of the sizes of what is added up for it, in float64: rounding is in proportion to it.

    Where the sum cancels, as for a row of a single key, rounding is all that a gradient consists of.
    """
    query, key, value = (tensor.abs() for tensor in doubles(*tensors))
    keywords = {**keywords}
    factor = keywords.pop("kept", torch.ones((), device=query.device)) / (1 - keywords.pop("dropout_p", 0.0))
    group, length_k = query.shape[1] // key.shape[1], key.shape[2]
    each_key = torch.eye(length_k, dtype=torch.float64, device=query.device).expand(*key.shape[:3], length_k)
    weights, logsumexp = reference.attention(*doubles(*tensors[:2]), each_key, **keywords)
    scale = query.shape[3] ** -0.5 if keywords["scale"] is None else abs(keywords["scale"])
    key_of_head, value_of_head = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    grad_weights = (of_output.double().abs() @ value_of_head.mT) * factor
    total = (weights * grad_weights).sum(-1, keepdim=True) + of_logsumexp.double().abs().unsqueeze(-1)
    scores = weights * (grad_weights + total)
    found = {
        "query": scale * scores @ key_of_head,
        "key": (scale * scores.mT @ query).unflatten(1, (-1, group)).sum(2),
        "value": ((weights * factor).mT @ of_output.double().abs()).unflatten(1, (-1, group)).sum(2),
    }
    if "bias" in keywords:
        found["bias"] = scores.sum_to_size(keywords["bias"].shape)
    if "sinks" in keywords:
        share = torch.exp(keywords["sinks"].double().view(-1, 1) - logsumexp).masked_fill(logsumexp.isinf(), 0.0)
        found["sinks"] = (share.unsqueeze(-1) * total).sum((0, 2, 3))
    return found


def check_all_gradients(
    tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], p: float, data: st.DataObject
) -> None:
    """Some of the gradients, asked for together, of output and logsumexp or of one of them."""
    query, key, value = tensors
    names = ["query", "key", "value", *(name for name in ("bias", "sinks") if name in keywords)]
    wanted = [name for name in names if data.draw(st.sampled_from([True, True, False]))] or names[:1]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    of_output = torch.randn((*query.shape[:3], value.shape[3]), generator=generator).to(query.dtype)
    of_output = data.draw(laid_out(of_output, query.device.type))
    real = torch.float64 if query.dtype == torch.float64 else torch.float32
    of_logsumexp = torch.randn(query.shape[:3], generator=generator).to(query.device, real)
    if data.draw(st.booleans()):
        of_logsumexp = torch.zeros_like(of_logsumexp)

    def gradients(attend: Any, dtype: torch.dtype | None, keywords: dict[str, Any]) -> tuple[Tensor, ...]:
        given = dict(zip(("query", "key", "value"), tensors, strict=True)) | keywords
        for name in names:
            given[name] = given[name].detach() if dtype is None else given[name].detach().to(dtype)
            given[name].requires_grad_(name in wanted)
        output, logsumexp = attend(**given)
        # Rows without keys have a constant logsumexp of -inf: no gradient passes there.
        results = (output, logsumexp.masked_fill(logsumexp == -float("inf"), 0.0))
        sources = [of.to(result.dtype) for of, result in zip((of_output, of_logsumexp), results, strict=True)]
        both = [(result, source) for result, source in zip(results, sources, strict=True) if result.requires_grad]
        leaves = [given[name] for name in wanted]
        outputs, of_outputs = zip(*both, strict=True)
        found = torch.autograd.grad(outputs, leaves, of_outputs, allow_unused=True)
        return tuple(torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(found, leaves, strict=True))

    torch.manual_seed(5)
    deterministic = data.draw(st.sampled_from([None, True]))
    ours = gradients(
        lambda **given: kittens_torch.attention(
            given.pop("query"), given.pop("key"), given.pop("value"),
            dropout_p=p, deterministic=deterministic, return_lse=True, **given,
        ),
        None,
        keywords,
    )  # fmt: skip
    keywords = of_reference(keywords, p, query, key)
    exact, same_formula = (gradients(reference.attention, dtype, keywords) for dtype in (torch.float64, query.dtype))
    sizes = magnitudes(tensors, of_output, of_logsumexp, keywords)
    epsilon = torch.finfo(query.dtype).eps
    for name, mine, right, plain in zip(wanted, ours, exact, same_formula, strict=True):
        given = dict(zip(names, (*tensors, *(keywords[name] for name in names[3:])), strict=True))[name]
        assert mine.dtype == given.dtype and mine.shape == given.shape, name
        allowed = right + (plain - right).abs() + epsilon * sizes[name]
        assert_accurate(f"gradient of {name}", mine, right, allowed, 3)


@devices
@given(st.data(), masks)
@settings(max_examples=40)
def test_gradients(device: str, data: st.DataObject, keywords: dict[str, Any]) -> None:
    check_all_gradients(data.draw(operands(device)), keywords, 0.0, data)


@devices
@given(st.data(), masks, rates)
@settings(max_examples=60)
def test_gradients_with_modifiers(device: str, data: st.DataObject, keywords: dict[str, Any], p: float) -> None:
    tensors = data.draw(operands(device))
    check_all_gradients(tensors, {**keywords, **data.draw(modifiers(*tensors[:2]))}, p, data)


@given(operands("checked"), masks, rates, st.integers(0, 2**31 - 1), st.data())
@settings(max_examples=25)
def test_gradients_on_the_checked_machine(
    tensors: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any], p: float, seed: int, data: st.DataObject
) -> None:
    with kittens_torch.checked_machine(seed=seed):
        check_all_gradients(tensors, {**keywords, **data.draw(modifiers(*tensors[:2]))}, p, data)
