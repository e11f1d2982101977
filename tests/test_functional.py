"""The drop-in: torch's signature and the meaning of torch's math backend."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_accurate, inputs, leaves, normal, places, usual_place
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import kittens_torch
from kittens_torch import dispatch, functional, reference
from kittens_torch import scaled_dot_product_attention as ours

pytestmark = pytest.mark.usefixtures("only_ours")


def math_backend(*tensors: Tensor, **keywords: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **keywords)


def check(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    """Output of the drop-in, held against torch's math backend in float64 and in the input dtype."""
    output = ours(query, key, value, **keywords)
    exact = math_backend(query.double(), key.double(), value.double(), **keywords)
    assert output.dtype == query.dtype
    # torch computes 16-bit inputs in float32; the rule's yardstick is the formula in the input dtype.
    same_formula = exact.to(query.dtype) if exact.numel() == 0 else _in_dtype(query, key, value, **keywords)
    assert_accurate("output", output, exact, same_formula, 2)
    return output


def _in_dtype(query: Tensor, key: Tensor, value: Tensor, **keywords: Any) -> Tensor:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        return math_backend(query, key, value, **keywords)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def test_version() -> None:
    assert kittens_torch.__version__ == kittens_torch.build_info()["version"]
    assert all(hasattr(kittens_torch, name) for name in kittens_torch.__all__)


def test_signature_is_torchs() -> None:
    """Names, order, defaults and keyword-only parts, from what torch documents and from its schema."""
    mine = inspect.signature(ours)
    documented = F.scaled_dot_product_attention.__doc__.split("\n\n")[0].replace("\n", " ")
    names = re.findall(r"(\w+)(?:=([^,)]+))?(?=[,)])", documented[documented.index("(") + 1 :])
    assert [name for name, _ in names] == list(mine.parameters)
    for name, default in names:
        parameter = mine.parameters[name]
        assert (parameter.default is inspect.Parameter.empty) == (default == "")
        assert default == "" or repr(parameter.default) == default
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    assert {argument.name for argument in schema.arguments if argument.kwarg_only} == {
        name for name, parameter in mine.parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


@usual_place
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("shape_q", "shape_k", "shape_v"),
    [
        ((5, 8), (7, 8), (7, 6)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((5, 8), (3, 7, 8), (3, 7, 6)),
        ((3, 5, 8), (7, 8), (1, 7, 6)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)),
        ((2, 3, 5, 8), (1, 3, 7, 8), (2, 1, 7, 6)),
        ((1, 3, 5, 8), (4, 3, 7, 8), (4, 3, 7, 6)),
        ((2, 1, 5, 8), (2, 3, 7, 8), (1, 3, 7, 6)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)),
        ((2, 4, 5, 8), (7, 8), (7, 6)),
        ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 6)),
        ((2, 3, 4, 5, 8), (3, 1, 7, 8), (1, 1, 4, 7, 6)),
        ((4, 5, 8), (2, 3, 1, 7, 8), (3, 4, 7, 6)),
        ((2, 1, 2, 1, 2, 5, 8), (2, 2, 2, 7, 8), (7, 6)),
    ],
    ids=str,
)
def test_ranks_and_broadcasting(
    device: str, dtype: torch.dtype, shape_q: tuple[int, ...], shape_k: Any, shape_v: Any, is_causal: bool
) -> None:
    check(*(normal(*shape, device=device, dtype=dtype) for shape in (shape_q, shape_k, shape_v)), is_causal=is_causal)


@usual_place
@pytest.mark.parametrize(("heads", "heads_k"), [(4, 4), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_enable_gqa(device: str, dtype: torch.dtype, heads: int, heads_k: int, rank: int) -> None:
    query, key, value = inputs(
        device, dtype, batch=2, heads=heads, heads_k=heads_k, length_q=33, length_k=40, head_dim=16
    )
    if rank == 3:
        query, key, value = query[0], key[0], value[0]
    if rank == 5:
        query, key, value = query.expand(3, -1, -1, -1, -1), key.unsqueeze(0), value
    check(query, key, value, enable_gqa=True)


@usual_place
@pytest.mark.parametrize("scale", [None, 0.3, 1, -0.3, 0.0, 1e-41, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scale(device: str, dtype: torch.dtype, scale: float | None, is_causal: bool) -> None:
    check(*inputs(device, dtype, length_q=65, length_k=80, head_dim=64), scale=scale, is_causal=is_causal)


@usual_place
@pytest.mark.parametrize(
    ("batch", "heads", "length_q", "length_k"), [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 0, 0)]
)
def test_empty_sizes(device: str, dtype: torch.dtype, batch: int, heads: int, length_q: int, length_k: int) -> None:
    tensors = inputs(device, dtype, batch=batch, heads=heads, length_q=length_q, length_k=length_k, head_dim=8)
    output = ours(*tensors)
    assert torch.equal(output, math_backend(*tensors)) and output.dtype == dtype


@pytest.mark.parametrize("heads_k", [0, 1, 2])
def test_attention_without_heads(heads_k: int) -> None:
    tensors = inputs("cpu", torch.float32, batch=2, heads=0, heads_k=heads_k, length_q=3, head_dim=8)
    output = kittens_torch.attention(*tensors, causal="upper_left")
    assert isinstance(output, Tensor) and output.shape == (2, 0, 3, 8)


@usual_place
def test_causal_bias_objects(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=40, length_k=70, head_dim=32)
    assert torch.equal(ours(query, key, value, causal_upper_left(40, 70)), ours(query, key, value, is_causal=True))
    output = ours(query, key, value, causal_lower_right(40, 70))
    assert torch.equal(output, kittens_torch.attention(query, key, value, causal="lower_right"))
    visible = torch.ones(40, 70, dtype=torch.bool, device=device).tril(30)
    assert torch.allclose(output.float(), math_backend(query, key, value, attn_mask=visible).float(), atol=2e-2)
    with pytest.raises(ValueError, match="CausalBias"):
        ours(query, key, value, causal_upper_left(40, 70), is_causal=True)
    with pytest.raises(RuntimeError, match=r"attn_mask is \(40, 71\)"):
        ours(query, key, value, causal_lower_right(40, 71))


@places(torch.bfloat16, torch.float16)
def test_layout_of_the_output_is_the_querys(device: str, dtype: torch.dtype) -> None:
    qkv = normal(4, 128, 3 * 512, device=device, dtype=dtype)
    query, key, value = (part.view(4, 128, 8, 64).transpose(1, 2) for part in qkv.split(512, 2))
    for operands in ((query, key, value), leaves(query, key, value)):
        output = ours(*operands)
        merged = output.transpose(1, 2).reshape(4, 128, 512)
        assert merged.data_ptr() == output.data_ptr()
    contiguous = ours(query.contiguous(), key, value)
    assert contiguous.stride() == query.contiguous().stride() and torch.equal(contiguous, output)


class TestAutocast:
    """Inside autocast the drop-in casts as torch's own attention does."""

    @pytest.fixture(
        params=[
            ("cpu", torch.bfloat16),
            pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu),
            pytest.param(("cuda", torch.float16), marks=pytest.mark.gpu),
        ]
    )
    def place(self, request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
        return request.param

    @pytest.mark.parametrize("function", [ours, kittens_torch.attention], ids=["drop_in", "attention"])
    def test_casts(self, place: tuple[str, torch.dtype], function: Callable[..., Tensor]) -> None:
        device, dtype = place
        query, key, value = inputs(device, torch.float32, length_q=65, head_dim=64)
        operands = leaves(query, key, value.to(torch.bfloat16))
        with torch.autocast(device, dtype):
            output = function(*operands)
            expected = F.scaled_dot_product_attention(*operands)
        assert output.dtype == expected.dtype == dtype
        assert torch.equal(output, function(*(operand.detach().to(dtype) for operand in operands)))
        output.float().square().sum().backward()
        for operand in operands:
            assert operand.grad is not None and operand.grad.dtype == operand.dtype

    def test_gradients_are_not_cast_down(self, place: tuple[str, torch.dtype]) -> None:
        """backward() under autocast gives what backward() outside gives."""
        device, dtype = place
        tensors = inputs(device, dtype, length_q=65, head_dim=64)
        grads = []
        for enabled in (False, True):
            operands = leaves(*tensors)
            output = ours(*operands)
            with torch.autocast(device, dtype, enabled=enabled):
                output.backward(torch.ones_like(output))
            grads.append([operand.grad for operand in operands])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    def test_float64_is_left_alone(self) -> None:
        query, key, value = inputs("cpu", torch.float64, length_q=5, head_dim=4)
        with torch.autocast("cpu", torch.bfloat16):
            assert ours(query, key, value).dtype == torch.float64
            with pytest.raises(RuntimeError, match="float64"):
                ours(query, key.float(), value)


class TestMonkeyPatched:
    """Modules of torch that call F.scaled_dot_product_attention give the same with the drop-in in its place."""

    @pytest.fixture
    def silent(self, only_ours: None) -> Any:
        before = kittens_torch.set_fallback("silent")
        yield
        kittens_torch.set_fallback(before)

    @pytest.mark.usefixtures("silent")
    @pytest.mark.parametrize("train", [True, False])
    @pytest.mark.parametrize("masked", [True, False])
    def test_multihead_attention(self, monkeypatch: pytest.MonkeyPatch, train: bool, masked: bool) -> None:
        module = torch.nn.MultiheadAttention(32, 4, batch_first=True).train(train)
        x = torch.randn(3, 10, 32, requires_grad=True)
        mask = torch.ones(10, 10, dtype=torch.bool).triu(1) if masked else None
        before = module(x, x, x, need_weights=False, attn_mask=mask)[0]
        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        after = module(x, x, x, need_weights=False, attn_mask=mask)[0]
        assert torch.allclose(after, before, atol=1e-5)

    @pytest.mark.usefixtures("silent")
    @pytest.mark.parametrize("train", [True, False])
    def test_encoder_layer(self, monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).train(train)
        x = torch.randn(3, 10, 32, requires_grad=True)
        before = layer(x)
        before.sum().backward()
        grad, x.grad = x.grad, None
        monkeypatch.setattr(F, "scaled_dot_product_attention", ours)
        after = layer(x)
        after.sum().backward()
        assert torch.allclose(after, before, atol=1e-5) and torch.allclose(x.grad, grad, atol=1e-4)


def test_tensor_subclasses_and_parameters() -> None:
    class Mine(Tensor):
        pass

    query, key, value = inputs("cpu", torch.float32, length_q=5, head_dim=4)
    expected = ours(query, key, value)
    output = ours(query.as_subclass(Mine), key, value)
    assert type(output) is Mine and torch.equal(output.as_subclass(Tensor), expected)
    parameter = torch.nn.Parameter(query)
    assert torch.equal(ours(parameter, key, value), expected) and ours(parameter, key, value).requires_grad


def test_function_modes() -> None:
    """torch.device as a context is a mode that every function passes through."""
    query, key, value = inputs("cpu", torch.float32, length_q=5, head_dim=4)
    expected = ours(query, key, value)
    with torch.device("cpu"):
        assert torch.equal(ours(query, key, value), expected)
        assert torch.equal(kittens_torch.attention(query, key, value), expected)


def test_torch_function_can_intercept() -> None:
    calls: list[Any] = []

    class Counting(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    query, key, value = inputs("cpu", torch.float32, length_q=5, head_dim=4)
    ours(query, key.as_subclass(Counting), value, is_causal=True)
    assert ours in calls


def test_vmap_and_func_grad() -> None:
    query, key, value = (tensor.double() for tensor in inputs("cpu", torch.float32, batch=3, length_q=6, head_dim=4))
    expected = ours(query, key, value, is_causal=True)
    mapped = torch.func.vmap(lambda q, k, v: ours(q, k, v, is_causal=True))(query, key, value)
    assert torch.allclose(mapped, expected, atol=1e-12)
    shared = torch.func.vmap(lambda q, k, v: ours(q, k, v), in_dims=(0, None, None))(query, key[0], value[0])
    assert torch.allclose(shared, ours(query, key[:1], value[:1]), atol=1e-12)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ours(q, k, v, is_causal=True).square().sum()

    operands = leaves(query, key, value)
    loss(*operands).backward()
    for transform in (torch.func.grad, lambda f, argnums: torch.func.vmap(torch.func.grad(f, argnums=argnums))):
        grads = transform(loss, argnums=(0, 1, 2))(query, key, value)
        assert all(torch.allclose(g, operand.grad, atol=1e-12) for g, operand in zip(grads, operands, strict=True))


@pytest.mark.gpu
def test_every_way_gives_the_same() -> None:
    """The short way of the usual CUDA call against the general way."""
    for dtype in (torch.bfloat16, torch.float16):
        for keywords in ({}, {"is_causal": True}, {"scale": 0.2}):
            tensors = inputs("cuda", dtype, batch=2, heads=4, length_q=100)
            arguments = (None, 0.0, keywords.get("is_causal", False), keywords.get("scale"), False)
            assert torch.equal(ours(*tensors, **keywords), functional._any_call(*tensors, *arguments))
    query, key, value = inputs("cuda", torch.bfloat16, batch=2, heads=4, length_q=100)
    for operands in ((query, key[:1], value[:1]), (query, key[:, :1], value), (query, key, value[..., :40])):
        check(*operands)


class TestFunctionalTransforms:
    """A tensor under vmap does not tell whether an outer level differentiates it."""

    def test_gradient_of_a_batched_call(self) -> None:
        batched = torch.randn(3, 1, 2, 5, 8)

        def each(x: Tensor) -> Tensor:
            return kittens_torch.attention(x, x, x)

        looped = torch.func.grad(lambda x: torch.stack([each(y) for y in x]).square().sum())(batched)
        assert looped.abs().max() > 0.1
        mapped = torch.func.grad(lambda x: torch.func.vmap(each)(x).square().sum())(batched)
        torch.testing.assert_close(mapped, looped)
        leaf = batched.clone().requires_grad_()
        torch.func.vmap(each)(leaf).square().sum().backward()
        torch.testing.assert_close(leaf.grad, looped)

    def test_gradient_of_what_a_batched_call_closes_over(self) -> None:
        batched, layer = torch.randn(3, 1, 2, 5, 8), torch.nn.Linear(8, 8)

        def loss(run: Any) -> Tensor:
            layer.zero_grad()
            run(lambda x: kittens_torch.attention(layer(x), x, x)).square().sum().backward()
            assert layer.weight.grad is not None
            return layer.weight.grad.clone()

        mapped = loss(lambda f: torch.func.vmap(f)(batched))
        torch.testing.assert_close(mapped, loss(lambda f: torch.stack([f(x) for x in batched])))

    def test_an_empty_batch(self) -> None:
        x = torch.randn(0, 1, 2, 4, 8)
        assert torch.func.vmap(lambda y: kittens_torch.attention(y, y, y))(x).shape == x.shape


@pytest.mark.parametrize(
    "number",
    [np.float32(0.25), np.float64(0.25), np.int64(1), np.bool_(True), torch.tensor(0.25), torch.tensor(1)],
    ids=lambda number: type(number).__name__ + str(number),
)
def test_numbers_that_torch_reads(number: Any) -> None:
    """Scalars of numpy and tensors without dims are numbers, as for torch; in `attention` the soft cap too."""
    query, key, value = inputs("cpu", torch.float32, length_q=5, length_k=7, head_dim=8)
    plain = float(number)
    torchs = F.scaled_dot_product_attention(query, key, value, scale=number)
    assert torch.allclose(ours(query, key, value, scale=number), torchs, atol=1e-5)
    for name in ("scale", "dropout_p") if isinstance(number, np.bool_) else ("scale", "dropout_p", "softcap"):
        results = []
        for given in (number, plain):
            torch.manual_seed(0)
            results.append(kittens_torch.attention(query, key, value, **{name: given}))
        assert torch.equal(*results)
    # dropout_p: the same call for either.
    assert str(kittens_torch.explain(query, key, value, dropout_p=number)) == str(
        kittens_torch.explain(query, key, value, dropout_p=plain)
    )


def test_number_of_numpy_in_a_graph() -> None:
    query, key, value = inputs("cpu", torch.float32, length_q=5, length_k=7, head_dim=8)
    scale = 1 / np.sqrt(16.0)
    compiled = torch.compile(lambda q, k, v: ours(q, k, v, scale=scale), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(query, key, value), ours(query, key, value, scale=0.25), atol=1e-6)


@pytest.mark.parametrize("length", [64, 1024])
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_torchs_causal_cpu_kernel_gets_wrong(length: int, scale: float) -> None:
    x = torch.randn(1, 2, length, 64)
    exact, _ = reference.attention(x.double(), x.double(), x.double(), causal="upper_left", scale=scale)
    for leaf in (x, x.clone().requires_grad_()):
        assert (ours(leaf, leaf, leaf, is_causal=True, scale=scale) - exact).abs().max() < 1e-4


def test_importing_leaves_the_compiler_alone() -> None:
    """torch._dynamo takes seconds to import."""
    code = "import sys, torch, kittens_torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_constants_while_tracing_are_marked_as_torch_marks_them() -> None:
    def marked_here() -> None: ...

    def marked_by_torch() -> None: ...

    torch.compiler.assume_constant_result(marked_by_torch)
    assert vars(dispatch._constant_while_tracing(marked_here)) == vars(marked_by_torch)
