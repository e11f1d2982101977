"""What goes to torch, and what it says."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kittens_torch
from kittens_torch import FallbackError, FallbackWarning, dispatch, ops
from kittens_torch import scaled_dot_product_attention as ours

MASK = torch.rand(5, 7) > 0.3
MASK[:, 0] = True

needs_plan = pytest.mark.skipif(not dispatch.has_plan(), reason="the plan module was not built")


@pytest.fixture(autouse=True)
def _warn() -> Iterator[None]:
    before = kittens_torch.set_fallback("warn")
    yield
    kittens_torch.set_fallback(before)


def _tensors(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(
        "cpu", torch.float32, **{"batch": 2, "heads": 4, "length_q": 5, "length_k": 7, "head_dim": 8, **sizes}
    )


CALLS: list[tuple[str, tuple[Tensor, ...], dict[str, Any], str]] = [
    ("head dim 300", _tensors(head_dim=300), {}, "300"),
    ("head dim 300 with a mask", _tensors(head_dim=300), {"attn_mask": MASK}, "300"),
    ("value head dim 300", _tensors(value_dim=300), {}, "300"),
    ("head dim 0", _tensors(head_dim=0, value_dim=8), {}, "head dims (0, 8)"),
    ("value head dim 0", _tensors(value_dim=0), {"is_causal": True}, "head dims (8, 0)"),
    (
        "heads of k and v",
        (_tensors()[0], _tensors()[1][:, :2], _tensors()[2][:, :1]),
        {"enable_gqa": True},
        "numbers of heads",
    ),
]


@pytest.mark.parametrize(
    ("tensors", "keywords", "reason"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS]
)
def test_result_is_torchs_and_one_warning(tensors: tuple[Tensor, ...], keywords: dict[str, Any], reason: str) -> None:
    expected = F.scaled_dot_product_attention(*tensors, **keywords)
    with pytest.warns(FallbackWarning) as caught:
        assert torch.equal(ours(*tensors, **keywords), expected)
        ours(*tensors, **keywords)
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning must point at the caller"
    plan = kittens_torch.explain(*tensors, **keywords)
    assert plan.machine == "torch" and plan.reason in str(caught[0].message)


@pytest.mark.parametrize(
    ("tensors", "keywords", "reason"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS]
)
def test_error_and_silent(tensors: tuple[Tensor, ...], keywords: dict[str, Any], reason: str) -> None:
    assert kittens_torch.set_fallback("error") == "warn"
    with pytest.raises(FallbackError) as raised:
        ours(*tensors, **keywords)
    assert reason in str(raised.value)
    assert kittens_torch.set_fallback("silent") == "error"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours(*tensors, **keywords).shape == F.scaled_dot_product_attention(*tensors, **keywords).shape


def test_one_warning_per_reason() -> None:
    with pytest.warns(FallbackWarning) as caught:
        for _ in range(3):
            ours(*_tensors(head_dim=300))
            ours(*_tensors(head_dim=301), MASK)
    assert len(caught) == 2
    kittens_torch.set_fallback("warn")  # starts anew
    with pytest.warns(FallbackWarning):
        ours(*_tensors(head_dim=300))


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match=r"'quiet'.*'warn', 'error', 'silent'"):
        kittens_torch.set_fallback("quiet")
    assert kittens_torch.set_fallback("warn") == "warn"


@needs_plan
@pytest.mark.parametrize("mask", [MASK, torch.randn(2, 1, 5, 7), torch.randn(1, 7), None], ids=list("bfrn"))
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_masks_and_dropout_on_the_cpu_are_torchs(mask: Tensor | None, dropout_p: float) -> None:
    """Without a warning: the call is covered, and was not measured against torch's kernel."""
    tensors = _tensors(length_q=5, batch=2)
    kittens_torch.set_fallback("error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(2)
        output = ours(*tensors, mask, dropout_p)
    torch.manual_seed(2)
    assert torch.equal(output, F.scaled_dot_product_attention(*tensors, mask, dropout_p))


def test_masks_that_torch_gets_wrong_are_ours() -> None:
    """A scale of zero or below is not what torch's CPU kernel was written for."""
    tensors = _tensors()
    for scale in (0.0, -0.5):
        output = ours(*tensors, MASK, scale=scale)
        exact = F.scaled_dot_product_attention(*(t.double() for t in tensors), MASK, scale=scale)
        assert torch.allclose(output.double(), exact, atol=1e-5)
        assert kittens_torch.explain(*tensors, MASK, scale=scale).machine == "cpu"


def test_dropout_is_torchs() -> None:
    tensors = _tensors()
    kittens_torch.set_fallback("silent")
    torch.manual_seed(3)
    mine = ours(*tensors, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(mine, F.scaled_dot_product_attention(*tensors, dropout_p=0.4))
    assert not torch.equal(mine, ours(*tensors))
    assert not ours(*tensors, dropout_p=1.0).any()


def test_mask_keeps_its_gradient() -> None:
    kittens_torch.set_fallback("silent")
    mask = torch.randn(5, 7, requires_grad=True)
    ours(*_tensors(), mask).sum().backward()
    assert mask.grad is not None and mask.grad.shape == mask.shape


def test_forward_mode_derivative() -> None:
    tensors = _tensors()
    tangent = torch.randn_like(tensors[0])
    with sdpa_kernel(SDPBackend.MATH):  # the one backend of torch that has it
        with pytest.warns(FallbackWarning, match="forward-mode"):
            _, mine = torch.func.jvp(lambda query: ours(query, *tensors[1:]), (tensors[0],), (tangent,))
        _, torchs = torch.func.jvp(
            lambda query: F.scaled_dot_product_attention(query, *tensors[1:]), (tensors[0],), (tangent,)
        )
        # What vmap maps inside of it does not tell that it has a tangent.
        _, mapped = torch.func.jvp(
            torch.func.vmap(lambda query: ours(query[None], *(tensor[:1] for tensor in tensors[1:]))[0]),
            (tensors[0],),
            (tangent,),
        )
    assert torch.allclose(mine, torchs, atol=1e-5)
    assert torch.allclose(mapped[0], torchs[0], atol=1e-5)


def test_float64_under_checked_machine() -> None:
    tensors = tuple(tensor.double() for tensor in _tensors())
    with kittens_torch.checked_machine():
        with pytest.warns(FallbackWarning, match="checked machine has float16"):
            output = ours(*tensors)
        with pytest.raises(NotImplementedError, match=r"cannot run torch.float64 on cpu: the checked machine has"):
            kittens_torch.attention(*tensors)
    assert torch.equal(output, F.scaled_dot_product_attention(*tensors))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_nested_tensors(device: str) -> None:
    parts = [torch.randn(4, length, 8, device=device, dtype=torch.bfloat16) for length in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    with pytest.warns(FallbackWarning, match="nested"):
        output = ours(nested, nested, nested)
    assert output.is_nested and output.dtype == torch.bfloat16


def test_jagged_tensors() -> None:
    parts = [torch.randn(5, 4, 16), torch.randn(6, 4, 16)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with pytest.warns(FallbackWarning, match="nested"):
        output = ours(jagged, jagged, jagged)
    expected = F.scaled_dot_product_attention(jagged, jagged, jagged)
    assert all(torch.equal(a, b) for a, b in zip(output.unbind(), expected.unbind(), strict=True))


def test_plan_may_prefer_torch_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning: the call is covered, torch is faster. attention(...) and the checked machine never go there."""
    torchs: list[int] = []

    def counting(*arguments: Any, **keywords: Any) -> Tensor:
        torchs.append(1)
        return F.scaled_dot_product_attention(*arguments, **keywords)

    monkeypatch.setattr("kittens_torch.functional._torch_attention", counting)
    tensors = _tensors()
    for prefers in (False, True):
        monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands, answer=prefers: answer)
        torchs.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output = ours(*tensors, is_causal=True)
            assert len(torchs) == prefers
            assert torch.allclose(output, kittens_torch.attention(*tensors, causal="upper_left"), atol=1e-5)
            with kittens_torch.checked_machine():
                assert torch.allclose(ours(*tensors, is_causal=True), output, atol=1e-5)
            assert len(torchs) == prefers
            # Calls for which torch has no fused kernel stay here.
            ours(tensors[0], tensors[1][:, :1], tensors[2][:, :1])
            ours(*(tensor[0] for tensor in tensors))
            assert len(torchs) == prefers
    assert kittens_torch.explain(*tensors).machine == "torch"


@needs_plan
@pytest.mark.parametrize(
    ("changes", "prefers"),
    [
        ({}, False),
        ({"cpu_features": "avx512"}, False),
        ({"cpu_features": "avx2"}, True),
        ({"cpu_features": "generic", "corner": 1}, True),
        ({"cpu_features": "avx2", "corner": 1, "processors": 1}, False),
        ({"corner": 2, "length_q": 256, "length_k": 256}, False),
        ({"corner": 1, "length_q": 255}, True),
        ({"length_k": 255}, True),
        ({"processors": 3}, True),
        ({"dtype": "float32"}, False),
        ({"dtype": "float64"}, True),
        ({"dtype": "float16"}, True),
        ({"head_dim": 64, "value_dim": 64}, False),
        ({"head_dim": 64}, True),
        ({"head_dim": 80, "value_dim": 80}, True),
        ({"head_dim": 256, "value_dim": 256}, True),
        ({"length_q": 1, "corner": 2}, True),
    ],
)
def test_where_the_cpu_machine_is_faster(changes: dict[str, Any], prefers: bool) -> None:
    """The measured rules of plan.cpp: what was not measured goes to torch."""
    problem = {"machine": "cpu", "dtype": "bfloat16", "batch": 1, "heads": 8, "heads_k": 8, "length_q": 512}
    problem |= {"length_k": 512, "head_dim": 128, "value_dim": 128, "corner": 0, "window_left": -1, "window_right": -1}
    plan = dispatch._plan.forward(**{**problem, "processors": 4, "cpu_features": "amx", **changes})
    assert plan.prefer_torch == prefers
    assert ("faster" in plan.reason) and (("goes to torch" in plan.reason) == prefers)


@needs_plan
def test_gradients_on_the_cpu_go_to_torch() -> None:
    tensors = tuple(torch.randn(1, 8, 512, 64) for _ in range(3))
    wanting = (tensors[0].clone().requires_grad_(), *tensors[1:])
    assert dispatch.cpu_prefers_torch(*wanting, 1)
    with torch.no_grad():
        assert dispatch.cpu_prefers_torch(*wanting, 1) == dispatch.cpu_prefers_torch(*tensors, 1)


def test_preference_is_asked_once_per_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Answer:
        prefer_torch = False

    def plan(*operands: Any) -> Answer:
        asked.append(operands)
        return Answer()

    monkeypatch.setattr(dispatch, "_plan", object())
    monkeypatch.setattr(dispatch, "_prefers_torch", {})
    monkeypatch.setattr(dispatch, "plan", plan)
    for _ in range(3):
        ours(*_tensors())
        ours(*_tensors(), is_causal=True)
        ours(*_tensors(length_q=6))
        ours(*(tensor.double() for tensor in _tensors()))
    assert len(asked) == 4


def test_without_the_plan_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_plan", None)
    tensors = _tensors()
    assert torch.allclose(ours(*tensors), F.scaled_dot_product_attention(*tensors), atol=1e-5)
    plan = kittens_torch.explain(*tensors)
    assert plan.machine == "cpu" and "plan module" in plan.reason and plan.kernel is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_on_the_gpu(dtype: torch.dtype) -> None:
    tensors = [tensor.to("cuda", dtype) for tensor in _tensors()]
    with pytest.warns(FallbackWarning, match=str(dtype)):
        assert torch.equal(ours(*tensors), F.scaled_dot_product_attention(*tensors))
    with pytest.raises(NotImplementedError, match=str(dtype)):
        kittens_torch.attention(*tensors)


def test_what_torch_runs_faster_on_the_gpu() -> None:
    """Measured: additive masks without a gradient of their own, and dropout with a gradient. Bool masks are ours."""
    query, key, value = _tensors()
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    prefers = dispatch.gpu_prefers_torch
    assert not prefers(query, key, value, visible, 0.0) and not prefers(query, key, value, visible, 0.1)
    bias = visible.float().requires_grad_()
    assert prefers(query, key, value, visible.float(), 0.0)
    assert not prefers(query, key, value, bias, 0.0) and prefers(query, key, value, bias, 0.1)
    query.requires_grad_()
    assert not prefers(query, key, value, visible, 0.0) and prefers(query, key, value, visible, 0.1)
    with torch.no_grad():
        assert not prefers(query, key, value, visible, 0.1)


def test_symbolic_sizes_stay_ours() -> None:
    """A graph of make_fx is for all lengths, as one of torch.compile."""
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(lambda q, k, v: ours(q, k, v, is_causal=True), tracing_mode="symbolic")(*_tensors())
    assert any(node.target is ops.forward for node in traced.graph.nodes)
    longer = _tensors(length_q=9)
    assert torch.allclose(traced(*longer), ours(*longer, is_causal=True), atol=1e-5)
