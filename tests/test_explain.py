"""explain() tells what a call does; each statement is checked against the call itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import inputs, normal

import kittens_torch
from kittens_torch import Plan, attention, dispatch, explain

needs_plan = pytest.mark.skipif(not dispatch.has_plan(), reason="the plan module was not built")


@pytest.fixture(autouse=True)
def _ours_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: False)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@needs_plan
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("function", [None, attention], ids=["drop_in", "attention"])
def test_a_kernel(device: str, head_dim: int, function: object) -> None:
    tensors = inputs(device, torch.bfloat16, batch=2, heads=4, length_q=300, head_dim=head_dim)
    plan = explain(*tensors, **({} if function is None else {"function": function}))
    assert plan.machine == {"cpu": "cpu", "cuda": "sm90"}[device]
    assert plan.function == ("attention" if function else "scaled_dot_product_attention")
    assert plan.kernel == f"forward_{plan.machine}" and plan.reason
    assert plan.tile is not None and plan.tile[0] % 64 == 0 and plan.tile[1] > 0
    assert plan.configuration is not None and plan.configuration >= 0
    assert plan.stages >= 1 and plan.consumers >= 1 and plan.grid >= 1 and plan.copies == ()
    # At least one K and one V tile have to lie in shared memory.
    assert plan.shared_bytes >= 2 * plan.tile[1] * head_dim * 2
    text = str(plan)
    for part in (plan.kernel, f"{plan.tile[0]} query rows x {plan.tile[1]} keys", str(plan.shared_bytes), plan.reason):
        assert part in text


@needs_plan
def test_the_checked_machine_runs_the_gpus_configurations() -> None:
    tensors = inputs("cpu", torch.bfloat16, length_q=300, head_dim=128)
    with kittens_torch.checked_machine():
        plan = explain(*tensors)
    assert plan.machine == "checked" and plan.kernel == "forward_sm90"
    other = 3 if plan.configuration != 3 else 2
    with kittens_torch.checked_machine(configuration=other):
        assert explain(*tensors, function=attention).configuration == other


def _copies(plan: Plan) -> set[str]:
    return {copy.split()[0] for copy in plan.copies}


def test_copies_by_the_drop_in(device: str) -> None:
    query, key, value = inputs(device, torch.bfloat16, batch=2, heads=4, length_q=10, head_dim=16)
    assert _copies(explain(query, key, value)) == set()
    negative = explain(query, key, value, scale=-1.0)
    assert _copies(negative) == {"query"} and "scale" in negative.copies[0]
    assert _copies(explain(query, key, value, scale=0)) == {"query"}
    assert _copies(explain(query, key, value, scale=0.5)) == set()
    many = explain(query, key.expand(3, 2, 4, 10, 16), value)  # (3, 2) does not flatten with a stride of 0
    assert _copies(many) == {"query", "key", "value"} and "flatten" in many.copies[0]
    with torch.autocast(device, torch.bfloat16):
        cast = explain(query, key.float(), value)
    assert _copies(cast) == {"key"} and "autocast" in cast.copies[0]


def test_copies_for_tma(device: str) -> None:
    """Only TMA asks for alignment; the cpu machine reads everything in place."""
    query, key, value = inputs(device, torch.bfloat16, batch=2, heads=4, length_q=10, head_dim=16)
    flat = normal(key.numel() + 1, device=device, dtype=torch.bfloat16)
    misaligned = flat[1:].view(key.shape)
    strided = normal(2, 4, 10, 32, device=device, dtype=torch.bfloat16)[..., ::2]
    odd = normal(2, 4, 10, 17, device=device, dtype=torch.bfloat16)[..., :16]
    single = normal(2, 4, 1, 17, device=device, dtype=torch.bfloat16)[..., :16]
    for bad, word in ((misaligned, "address"), (strided, "stride 2"), (odd, "not a multiple of 16")):
        plan = explain(query, bad, value, function=attention)
        assert _copies(plan) == ({"key"} if device == "cuda" else set())
        assert device == "cpu" or word in plan.copies[0]
    assert _copies(explain(query, single, single, function=attention)) == (
        {"key", "value"} if device == "cuda" else set()
    )
    moved = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert explain(*moved).copies == () and explain(query.expand(2, 4, 10, 16), key[:, :1], value[:, :1]).copies == ()
    narrow = explain(query, key, value[..., :6].contiguous(), function=attention)
    assert _copies(narrow) == ({"value", "output"} if device == "cuda" else set())


def test_nothing_is_computed_or_warned(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("explain ran the op")

    monkeypatch.setattr("kittens_torch.ops.run_forward", never)
    monkeypatch.setattr("kittens_torch.modified.run_forward", never)
    query, key, value = inputs("cpu", torch.float32, length_q=5, head_dim=8)
    assert explain(query, key, value).machine == "cpu"
    assert explain(query, key, value, torch.ones(5, 5, dtype=torch.bool)).machine == "cpu"
    wide = torch.randn(1, 2, 5, 300)
    assert explain(wide, wide, wide, torch.ones(5, 5, dtype=torch.bool)).machine == "torch"
    before = kittens_torch.set_fallback("error")
    try:
        plan = explain(wide, wide, wide, dropout_p=0.5)
    finally:
        kittens_torch.set_fallback(before)
    assert plan.machine == "torch" and "300" in plan.reason and plan.kernel is None
    assert not recwarn.list
    assert str(plan) == f"scaled_dot_product_attention on torch: {plan.reason}"


def test_plan_that_prefers_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "cpu_prefers_torch", lambda *operands: True)
    tensors = inputs("cpu", torch.float32, length_q=5, head_dim=8)
    plan = explain(*tensors)
    assert plan.machine == "torch" and "faster" in plan.reason
    assert explain(*tensors, function=attention).machine == "cpu"


def test_modified_scores() -> None:
    """attention runs its own kernel, whose rows are those of the plan."""
    query, key, value = inputs("cpu", torch.float32, length_q=5, head_dim=8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    for keywords in ({"mask": mask}, {"softcap": 3.0}, {"dropout_p": 0.5}, {"key_lengths": torch.tensor([3])}):
        plan = explain(query, key, value, function=attention, **keywords)
        assert plan.machine == "cpu"
        if dispatch.has_plan():
            assert plan.kernel == "modified_forward_cpu" and plan.configuration == 0
    with kittens_torch.checked_machine():
        plan = explain(query, key, value, function=attention, mask=mask)
    if dispatch.has_plan():
        assert plan.machine == "checked" and plan.kernel == "modified_forward_sm90" and plan.tile == (192, 128)
    plan = explain(query, key, value, function=attention, sinks=torch.zeros(query.shape[1]))
    if dispatch.has_plan():
        assert plan.kernel == "forward_cpu"  # every class has sinks


def test_meta_tensors() -> None:
    query = torch.empty(2, 3, 5, 8, device="meta")
    assert explain(query, query, query).machine == "meta"


def test_other_functions_are_refused() -> None:
    query = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="function is"):
        explain(query, query, query, function=F.scaled_dot_product_attention)
    with pytest.raises(TypeError):
        explain(query, query)
    with pytest.raises(TypeError):
        explain(query, query, query, windows=(1, 1))
