"""Second derivatives: of torch operations where they are asked for, refused where they are not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from dropout_rule import kept, share_dropped
from helpers import check_gradients, dtype_of, inputs, leaves, normal, usual_place
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kittens_torch
from kittens_torch import attention, dropout, reference

pytestmark = pytest.mark.usefixtures("only_ours")
twice = functools.partial(attention, double_backward=True)
REFUSAL = r"no second derivative.*attention\(\.\.\., double_backward=True\).*sdpa_kernel\(.*SDPBackend\.MATH\)"


def options(device: str = "cpu", real: torch.dtype = torch.float64) -> dict[str, dict[str, Any]]:
    """One value of each option, by its name, for 2 batches of 2 heads, 3 rows and 4 keys."""
    mask = torch.rand(2, 1, 3, 4, device=device) > 0.3
    mask[0, 0, 1] = False  # a row without a key
    return {
        "none": {},
        "causal": {"causal": "lower_right"},
        "window": {"window": (2, 1), "causal": "upper_left"},
        "mask": {"mask": mask},
        "bias": {"bias": normal(1, 2, 1, 4, device=device, dtype=real)},
        "key_lengths": {"key_lengths": torch.tensor([3, 0], device=device)},
        "softcap": {"softcap": 0.7},
        "alibi_slopes": {"alibi_slopes": torch.rand(2, 2, device=device).to(real)},
        "sinks": {"sinks": normal(2, device=device, dtype=real)},
        "scale": {"scale": -0.4},
        "dropout_p": {"dropout_p": 0.4},
    }


COMBINATIONS = [
    *options(),
    "causal window",
    "mask bias sinks",
    "softcap alibi_slopes scale",
    "bias dropout_p sinks",
    " ".join(name for name in options() if name not in ("none", "causal")),
]
combinations = pytest.mark.parametrize("names", COMBINATIONS)


def given(names: str, device: str = "cpu", real: torch.dtype = torch.float64) -> dict[str, Any]:
    values = options(device, real)
    return {key: value for name in names.split() for key, value in values[name].items()}


def operands(device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape = {"batch": 2, "heads": 2, "heads_k": 1, "length_q": 3, "length_k": 4, "head_dim": 2, "value_dim": 3}
    return leaves(*inputs(device, dtype, **shape))


def of_differentiable(
    attend: Callable[..., Any], keywords: dict[str, Any]
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """A function of the differentiable options, after query, key and value; and these options."""
    names = [name for name in ("bias", "sinks") if name in keywords]

    def run(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)  # the same dropout at each call
        given = {**keywords, **dict(zip(names, others, strict=True))}
        output, logsumexp = attend(query, key, value, return_lse=True, **given)
        return output, logsumexp.masked_fill(logsumexp == -float("inf"), 0.0)

    return run, leaves(*(keywords[name] for name in names))


@combinations
def test_gradcheck_and_gradgradcheck(names: str) -> None:
    function, others = of_differentiable(twice, given(names))
    tensors = [*operands(), *others]
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


@usual_place
@combinations
def test_both_backward_passes_agree(device: str, dtype: torch.dtype, names: str) -> None:
    """The kernels' gradients and those of torch operations; and that only create_graph=True makes the latter."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    function, others = of_differentiable(twice, given(names, device, real))
    tensors = [*operands(device, dtype), *others]
    results = function(*tensors)
    sources = [torch.randn_like(result) for result in results]
    kernels = torch.autograd.grad(results, tensors, sources, retain_graph=True)
    recorded = torch.autograd.grad(results, tensors, sources, create_graph=True)
    assert not any(gradient.requires_grad for gradient in kernels)
    assert all(gradient.requires_grad for gradient in recorded)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for mine, other, operand in zip(kernels, recorded, tensors, strict=True):
        assert other.dtype == operand.dtype and other.shape == operand.shape
        size = max(1.0, mine.abs().max().item())
        torch.testing.assert_close(mine / size, other / size, atol=tolerance, rtol=tolerance)


@usual_place
def test_second_derivatives_are_those_of_the_reference(device: str, dtype: torch.dtype) -> None:
    keywords = given("mask bias softcap sinks alibi_slopes", device, torch.float32)
    found = []
    for attend, to in ((twice, dtype), (reference.attention, torch.float64)):
        function, others = of_differentiable(
            lambda *a, return_lse, f=attend, **k: _with_logsumexp(f, *a, **k), keywords
        )
        torch.manual_seed(1)
        tensors = [tensor.detach().to(to).requires_grad_() for tensor in (*operands(device, dtype), *others)]
        results = function(*tensors)
        first = torch.autograd.grad(sum(result.square().sum() for result in results), tensors, create_graph=True)
        found.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors))
    for ours, exact in zip(*found, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(ours.double() / exact.abs().max(), exact / exact.abs().max(), atol=tolerance, rtol=0)


def _with_logsumexp(attend: Callable[..., Any], *tensors: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
    if attend is twice:
        return attend(*tensors, return_lse=True, **keywords)
    keywords = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in keywords.items()}
    return attend(*tensors, **keywords)


def test_third_derivatives() -> None:
    keywords = given("bias softcap sinks")
    (query, key, value), found = operands(), []
    for attend in (twice, reference.attention):
        gradient = attend(query, key, value, **keywords)
        gradient = gradient[0] if isinstance(gradient, tuple) else gradient
        for _ in range(3):
            (gradient,) = torch.autograd.grad(gradient.square().sum(), query, create_graph=True)
        found.append(gradient)
    torch.testing.assert_close(*found)


def test_one_tensor_for_all_and_a_gradient_that_is_not_asked_for() -> None:
    """The gradient of a tensor that comes in thrice is that of its three uses, not thrice their sum."""
    tensor = normal(2, 2, 4, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: twice(x, x, x * 2, causal="upper_left"), tensor)
    query, key, value = operands()
    for some in ((query,), (key,), (value,), (query, value)):
        rest = [one if any(one is wanted for wanted in some) else one.detach() for one in (query, key, value)]
        first = torch.autograd.grad(twice(*rest).square().sum(), some, create_graph=True)
        torch.autograd.grad(sum(gradient.square().sum() for gradient in first), some)


def test_what_is_hidden_stays_out_of_second_derivatives() -> None:
    query, key, value = operands()
    mask = torch.arange(4) != 2
    for keywords in ({"mask": mask}, {"mask": mask, "softcap": 2.0, "bias": torch.zeros(4, dtype=torch.float64)}):
        found = []
        for poison in (0.0, float("nan")):
            hidden = [tensor.detach().index_fill(2, torch.tensor(2), poison) for tensor in (key, value)]
            tensors = [query, *leaves(*hidden)]
            (first,) = torch.autograd.grad(twice(*tensors, **keywords).square().sum(), query, create_graph=True)
            found.append((first, *torch.autograd.grad(first.square().sum(), tensors)))
        for clean, other in zip(*found, strict=True):
            assert torch.isfinite(other).all() and torch.equal(clean, other)


def test_no_keys_and_no_queries() -> None:
    for length_q, length_k in ((3, 0), (0, 3)):
        tensors = leaves(*inputs("cpu", torch.float64, length_q=length_q, length_k=length_k, head_dim=4))
        first = torch.autograd.grad(twice(*tensors).square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), tensors)
        assert all(
            not gradient.any() and gradient.shape == one.shape for gradient, one in zip(second, tensors, strict=True)
        )


# The same dropout


@usual_place
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99999])
def test_the_rule_of_dropout_in_torch_operations(device: str, dtype: torch.dtype, p: float) -> None:
    scores = torch.zeros(2, 3, 70, 140, device=device, dtype=dtype)
    for state in ((0, 0), (123456789012345678, 987654321), (-5, 2**40 + 3), (2**62 + 12345, -1)):
        ours = dropout.kept(torch.tensor(state, device=device), scores, p)
        assert torch.equal(ours.cpu(), kept(torch.tensor(state), p, 2, 3, 70, 140))
    assert dropout.keep_scale(p) == 1 / (1 - share_dropped(p))


# Where else autograd comes in


def test_transforms_of_torch_func() -> None:
    query, key, value = (tensor.detach() for tensor in operands())
    bias = normal(2, 1, 3, 4, dtype=torch.float64)

    def per_batch(attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        output = attend(query[None], key[None], value[None], bias=bias, softcap=2.0)
        return (output[0] if isinstance(output, tuple) else output).square().sum()

    def second(attend: Callable[..., Any]) -> Callable[..., Tensor]:
        loss = functools.partial(per_batch, attend)
        return torch.func.grad(lambda *a: torch.func.grad(loss, argnums=1)(*a).square().sum())

    def by_hand(*tensors: Tensor) -> Tensor:
        return torch.stack([second(reference.attention)(*parts) for parts in zip(*tensors, strict=True)])

    expected = by_hand(query, key, value, bias)
    torch.testing.assert_close(torch.func.vmap(second(twice))(query, key, value, bias), expected)

    def of_all(query: Tensor) -> Tensor:
        return torch.func.vmap(functools.partial(per_batch, twice))(query, key, value, bias).sum()

    def of_all_exact(query: Tensor) -> Tensor:
        return reference.attention(query, key, value, bias=bias, softcap=2.0)[0].square().sum()

    hessians = [torch.func.jacrev(torch.func.jacrev(function))(query) for function in (of_all, of_all_exact)]
    torch.testing.assert_close(*hessians)
    with pytest.raises(NotImplementedError, match=r"attention has no forward-mode .*jacrev of jacrev"):
        torch.func.hessian(lambda query: twice(query, key, value, bias=bias).square().sum())(query)


def test_dropout_under_vmap() -> None:
    """Batches of a mapped dimension drop differently; either backward drops what the forward did, with sinks too."""
    query, key, value = (normal(3, 2, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    sinks = normal(3, 2, dtype=torch.float64)

    for randomness in ("same", "different"):
        for of_sinks in (None, 0):

            def loss(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, twice: bool) -> tuple[Tensor, Tensor]:
                output = attention(query, key, value, dropout_p=0.5, sinks=sinks, double_backward=twice)
                return output.sum(), output

            found = []
            for twice in (False, True):
                run = torch.func.grad(functools.partial(loss, twice=twice), argnums=(2, 3), has_aux=True)
                torch.manual_seed(2)
                mapped = torch.func.vmap(run, (0, 0, 0, of_sinks), randomness=randomness)
                (of_value, gradient), output = mapped(query, key, value, sinks if of_sinks == 0 else sinks[0])
                # The output is linear in the values.
                torch.testing.assert_close((of_value * value).sum(), output.sum())
                found.append((of_value, gradient, output))
            for ours, recorded in zip(*found, strict=True):
                torch.testing.assert_close(ours, recorded)


def test_batched_gradients() -> None:
    """`is_grads_batched` and what builds on it record the backward pass too."""
    tensors = [tensor.detach() for tensor in operands()]

    def hessian(attend: Callable[..., Any], **how: Any) -> Tensor:
        def loss(query: Tensor) -> Tensor:
            output = attend(query, *tensors[1:], softcap=2.0)
            return (output[0] if isinstance(output, tuple) else output).square().sum()

        return torch.autograd.functional.hessian(loss, tensors[0], **how)

    torch.testing.assert_close(hessian(twice, vectorize=True), hessian(reference.attention))
    with pytest.raises(RuntimeError, match=REFUSAL):
        hessian(attention, vectorize=True)


def test_checkpoint_and_autocast() -> None:
    query, key, value = operands()
    plain = twice(query, key, value)
    (first,) = torch.autograd.grad(plain.square().sum(), query, create_graph=True)
    expected = torch.autograd.grad(first.square().sum(), key)[0]
    output = torch.utils.checkpoint.checkpoint(twice, query, key, value, use_reentrant=False)
    (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(first.square().sum(), key)[0], expected)

    single = [tensor.detach().float().requires_grad_() for tensor in (query, key, value)]
    output = twice(*single)
    with torch.autocast("cpu", torch.bfloat16):
        (first,) = torch.autograd.grad(output.square().sum(), single[0], create_graph=True)
    found = torch.autograd.grad(first.square().sum(), single[1])[0]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled(backend: str) -> None:
    """One backward pass of a compiled graph is the kernels'; of two torch has none."""
    torch._dynamo.reset()
    tensors = operands()
    output = torch.compile(twice, fullgraph=True, backend=backend)(*tensors, softcap=2.0)
    source = torch.randn_like(output)
    grads = torch.autograd.grad(output, tensors, source, retain_graph=True)
    check_gradients(grads, *tensors, source, softcap=2.0)
    with pytest.raises(RuntimeError, match="double backward"):
        (first,) = torch.autograd.grad(output, tensors[0], source, create_graph=True)
        first.sum().backward()


# Where it is not asked for


def _plain(**keywords: Any) -> Callable[..., Any]:
    return lambda *tensors: attention(*tensors, **keywords)


REFUSED: dict[str, Callable[..., Any]] = {
    "drop-in": functools.partial(kittens_torch.scaled_dot_product_attention, enable_gqa=True),
    "attention": attention,
    "explicit": _plain(double_backward=False),
    "modified": _plain(softcap=2.0),
    "dropout": _plain(dropout_p=0.5),
    "checkpoint": lambda *tensors: torch.utils.checkpoint.checkpoint(attention, *tensors, use_reentrant=False),
}
refused = pytest.mark.parametrize("name", REFUSED)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@every_device
@refused
def test_second_derivative_names_the_way_out(name: str, device: str) -> None:
    tensors = operands(device, dtype_of(device))
    torch.manual_seed(0)
    output = REFUSED[name](*tensors)
    plain = torch.autograd.grad(output.square().sum(), tensors, retain_graph=True)
    first = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)  # alone it is no error
    if device == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))
    for gradient in first:
        for operand in tensors:
            with pytest.raises(RuntimeError, match=REFUSAL):
                torch.autograd.grad(gradient.sum() + operand.sum(), operand, retain_graph=True)
    output.sum().backward()


@refused
def test_refused_in_the_incoming_gradient(name: str) -> None:
    """The first derivative is linear in it: no 0 there either."""
    tensors = operands()
    output = REFUSED[name](*tensors)
    source = torch.randn_like(output).requires_grad_()
    (first,) = torch.autograd.grad(output, tensors[0], source, create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.autograd.grad(first.sum(), source)


@pytest.mark.parametrize("name", ["drop-in", "attention", "modified"])
def test_refused_under_torch_func(name: str) -> None:
    query, key, value = (tensor.detach() for tensor in operands())
    function = REFUSED[name]

    def gradient(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.func.grad(lambda q: function(q, key, value).square().sum())(query)

    torch.func.vmap(gradient)(*(tensor.expand(3, *tensor.shape) for tensor in (query, key, value)))  # once is no error
    squared = [torch.func.grad(lambda *a: gradient(*a).square().sum(), argnums=argnum) for argnum in range(3)]
    for run in (
        *(functools.partial(of_one, query, key, value) for of_one in squared),
        lambda: torch.func.vmap(squared[0])(*(tensor.expand(3, *tensor.shape) for tensor in (query, key, value))),
        lambda: torch.func.jacrev(torch.func.jacrev(lambda q: function(q, key, value).sum()))(query),
    ):
        with pytest.raises(RuntimeError, match=REFUSAL):
            run()

    def in_the_incoming_gradient(source: Tensor) -> Tensor:
        _, pull = torch.func.vjp(lambda q: function(q, key, value), query)
        return pull(source)[0].sum()

    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.func.grad(in_the_incoming_gradient)(torch.ones(2, 2, 3, 3, dtype=torch.float64))


@every_device
def test_torchs_attention_that_is_ours(device: str, torchs_attention_as_before: None) -> None:
    """Under `enable` torch refuses as without us, and its math has all derivatives."""
    tensors = leaves(*inputs(device, dtype_of(device), length_q=8, head_dim=8))
    with kittens_torch.enabled():
        output = F.scaled_dot_product_attention(*tensors, is_causal=True)
        (first,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
        with pytest.raises(RuntimeError, match=r"derivative for aten::_scaled_dot_product.*is not implemented"):
            torch.autograd.grad(first.sum() + tensors[0].sum(), tensors[0])
        small = [tensor.detach()[..., :3, :2].double().requires_grad_() for tensor in tensors]
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, small)


def test_argument_is_checked() -> None:
    with pytest.raises(TypeError, match=r"double_backward.*True or False"):
        attention(*operands(), double_backward=1)
    assert kittens_torch.explain(*operands(), function=attention, double_backward=True).machine == "cpu"
