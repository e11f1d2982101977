"""Failures that other attention libraries had, one test per row of the project's list of cases, named by it.

Others of the list are in the files test_known_failures_*, row 46 in test_devices, rows 51 to 54 in test_build and
test_install. Rows that need kernels not written yet (variable lengths, caches, decoding) are left out.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import check_forward, check_gradients, inputs, leaves, normal, places, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import ops
from kittens_torch import scaled_dot_product_attention as drop_in

pytestmark = pytest.mark.usefixtures("only_ours")
ROOT = Path(kittens_torch.__file__).parents[1]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@usual_place
@pytest.mark.parametrize("length", [33, 65, 97, 129, 34, 96])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_row_01_heads_broadcast_by_stride_0(device: str, dtype: torch.dtype, length: int, head_dim: int) -> None:
    """pytorch/pytorch#191937; the lower-triangular mask is causal here."""
    query = normal(1, 8, length, head_dim, device=device, dtype=dtype)
    key, value = (normal(1, 1, length, head_dim, device=device, dtype=dtype) for _ in range(2))
    expanded = [tensor.expand(1, 8, length, head_dim) for tensor in (key, value)]
    output, _ = check_forward(query, *expanded, causal="upper_left")
    copies = [tensor.contiguous() for tensor in expanded]
    assert torch.equal(output, drop_in(query, *copies, is_causal=True))
    assert torch.equal(output, drop_in(query, key, value, is_causal=True, enable_gqa=True))


@devices
def test_row_02_nothing_is_remembered_between_calls(device: str) -> None:
    """flashinfer-ai/flashinfer#4014: same shapes; scale, strides, dtype, address and flags change."""
    shape = (2, 8, 128, 128)
    query, key, value = (normal(*shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    buffer = normal(2, 128, 2, 8, 128, device=device, dtype=torch.bfloat16)
    viewed = [buffer[:, :, index].transpose(1, 2) for index in range(2)]
    halves = [tensor.half() for tensor in (query, key, value)]
    moved = key.clone()
    steps: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([query, key, value], {}),
        ([query, key, value], {"scale": 3 / math.sqrt(128)}),
        ([query, *viewed], {}),
        (halves, {}),
        ([query, moved, value], {}),
        ([query, key, value], {"causal": "upper_left"}),
        ([query, key, value], {}),
    ]
    outputs = [check_forward(*tensors, **keywords)[0] for tensors, keywords in steps]
    assert torch.equal(outputs[0], outputs[-1]) and torch.equal(outputs[0], outputs[4])
    # In another order nothing changes either.
    for (tensors, keywords), expected in reversed(list(zip(steps, outputs, strict=True))):
        assert torch.equal(kittens_torch.attention(*tensors, **keywords), expected)


@places(torch.float16, torch.bfloat16)
@pytest.mark.parametrize("length", [1, 37, 130])
def test_row_03_logits_below_any_sentinel(device: str, dtype: torch.dtype, length: int) -> None:
    """flashinfer-ai/flashinfer#4267: scaled logits of -65536."""
    query = torch.full((1, 1, 4, 64), -64.0, device=device, dtype=dtype)
    key = torch.full((1, 1, length, 64), 128.0, device=device, dtype=dtype)
    value = torch.ones_like(key)
    hidden_value = value.clone()
    hidden_value[:, :, length // 2 :] = 100  # hidden by the window below

    def check(output: Tensor, logsumexp: Tensor, visible: Tensor) -> None:
        assert ((output - 1).abs() < 1e-2).all()
        exact = -65536 + visible.double().log()
        assert ((logsumexp[0, 0].double() - exact).abs() < 0.02).all()

    everything = torch.full((4,), length, device=device)
    check(*kittens_torch.attention(query, key, value, return_lse=True), everything)
    causal = torch.arange(1, 5, device=device).clamp(max=length)
    check(*kittens_torch.attention(query, key, value, causal="upper_left", return_lse=True), causal)
    if length > 8:
        # Row i of a square problem sees the keys up to i + reach, the last of which lies before the hidden half.
        reach = length // 2 - 4
        visible = torch.arange(4, device=device) + reach + 1
        square = torch.cat([query, query.new_zeros(1, 1, length - 4, 64)], dim=2)
        output, logsumexp = kittens_torch.attention(square, key, hidden_value, window=(None, reach), return_lse=True)
        check(output[:, :, :4], logsumexp[:, :, :4], visible)


@usual_place
@pytest.mark.parametrize("causal", [None, "upper_left"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 191, 192, 193, 384, 1000, 1024])
def test_row_04_many_query_tiles_and_one_tensor(
    device: str, dtype: torch.dtype, length: int, causal: str | None
) -> None:
    """HazyResearch/ThunderKittens#164: q = k = v, odd lengths, several query tiles."""
    large = device == "cuda"
    shapes = [(2, 8, length, 64), (1, 32, length, 128)] if large else [(1, 2, length, 64), (1, 1, length, 128)]
    for shape in shapes:
        x = normal(*shape, device=device, dtype=dtype).requires_grad_()
        output, _ = check_forward(x, x, x, causal=causal)
        assert output.any(dim=-1).all(), "a row is zero"
        grad_output = normal(*shape, device=device, dtype=dtype)
        (together,) = torch.autograd.grad(output, x, grad_output)
        parts = leaves(x, x, x)
        apart = torch.autograd.grad(kittens_torch.attention(*parts, causal=causal), parts, grad_output)
        check_gradients(apart, *parts, grad_output, causal=causal)
        assert torch.allclose(together.float(), sum(part.float() for part in apart), atol=2e-2, rtol=2e-2)


@usual_place
@pytest.mark.parametrize(("length_q", "length_k"), [(2, 5), (5, 2), (1, 8), (3, 128), (130, 64)])
def test_row_06_corner_of_causal(device: str, dtype: torch.dtype, length_q: int, length_k: int) -> None:
    """pytorch/pytorch#103082: one-hot values make the visible keys readable."""
    query = torch.zeros(1, 1, length_q, 128, device=device, dtype=dtype)
    key = normal(1, 1, length_k, 128, device=device, dtype=dtype)
    value = torch.eye(length_k, 128, device=device, dtype=dtype)[None, None]
    row = torch.arange(length_q, device=device).unsqueeze(1)
    column = torch.arange(128, device=device)
    for output, offset in (
        (drop_in(query, key, value, is_causal=True), 0),
        (kittens_torch.attention(query, key, value, causal="upper_left"), 0),
        (kittens_torch.attention(query, key, value, causal="lower_right"), length_k - length_q),
    ):
        visible = (column <= row + offset) & (column < length_k)
        assert torch.equal(output[0, 0] != 0, visible)
        count = visible.sum(-1, keepdim=True).clamp(min=1)
        assert torch.allclose(output[0, 0].float(), visible.float() / count, rtol=1e-2)
    _, logsumexp = kittens_torch.attention(query, key, value, causal="lower_right", return_lse=True)
    seen = (row.flatten() + length_k - length_q + 1).clamp(0, length_k)
    assert torch.allclose(logsumexp[0, 0].double().exp(), seen.double(), rtol=1e-5)
    with pytest.raises(RuntimeError, match="is_causal"):
        drop_in(query, key, value, torch.ones(length_q, length_k, dtype=torch.bool, device=device), is_causal=True)


@devices
@pytest.mark.parametrize("length", [5, 130])
def test_row_14_half_precision_dot_products(device: str, length: int) -> None:
    """ultralytics/ultralytics#24990: raw dot products of 102400 in float16."""
    query, key = (torch.full((1, 1, length, 64), 40.0, device=device, dtype=torch.float16) for _ in range(2))
    value = normal(1, 1, length, 64, device=device, dtype=torch.float16)
    mean = value.double().mean(dim=2, keepdim=True)
    for keywords in ({}, {"scale": 1.0}):
        operands = leaves(query, key, value)
        output = drop_in(*operands, **keywords)
        assert (output.double() - mean).abs().max() < 2e-3
        output.float().sum().backward()
        assert all(torch.isfinite(operand.grad).all() for operand in operands)
    alternating = key.clone()
    alternating[:, :, 1::2] = -40.0
    half = value[:, :, ::2].double().mean(dim=2, keepdim=True)
    output = drop_in(query, alternating, value)
    assert (output.double() - half).abs().max() < 2e-3


def _spot_check(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> None:
    batch, heads, _, _ = shape
    query, key, value = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    output = drop_in(query, key, value)
    output.backward(torch.ones_like(output))
    entries = [(b, h) for b in (0, 65534, 65535, batch - 1) for h in (0, heads - 1) if b < batch]
    entries += [(0, h) for h in (65534, 65535) if h < heads]
    for entry, head in entries:
        parts = [t.detach()[entry : entry + 1, head : head + 1] for t in (query, key, value)]
        single = [part.double().requires_grad_() for part in parts]
        exact, _ = kittens_torch.reference.attention(*single)
        exact.backward(torch.ones_like(exact))
        assert (output[entry, head].double() - exact[0, 0]).abs().max() < 4e-3
        for operand, expected in zip((query, key, value), single, strict=True):
            assert (operand.grad[entry, head].double() - expected.grad[0, 0]).abs().max() < 1e-2


@pytest.mark.parametrize("shape", [(65537, 1, 2, 8), (1, 65537, 2, 8)])
def test_row_16_more_than_65535_batches_or_heads(shape: tuple[int, int, int, int]) -> None:
    """pytorch/pytorch#146704."""
    _spot_check(shape, "cpu", torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(65535, 8, 4, 64), (65536, 8, 4, 64), (65537, 8, 4, 64), (1, 65536, 4, 64), (100000, 10, 1, 16)]
)
def test_row_16_more_than_65535_in_a_grid(shape: tuple[int, int, int, int]) -> None:
    _spot_check(shape, "cuda", torch.float16)


@usual_place
def test_row_21_expanded_gradient_of_a_compiled_call(device: str, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#355; test_gradients has the other layouts."""
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=1, length_q=32, head_dim=128)
    grads = []
    for function in (torch.compile(kittens_torch.attention, fullgraph=True, backend="aot_eager"), drop_in):
        operands = leaves(*tensors)
        (function(*operands) if function is not drop_in else function(*operands, enable_gqa=True)).sum().backward()
        grads.append([operand.grad for operand in operands])
    ones = torch.ones(2, 4, 32, 128, device=device, dtype=dtype)
    operands = leaves(*tensors)
    grads.append(torch.autograd.grad(kittens_torch.attention(*operands), operands, ones))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads, strict=True))


@usual_place
def test_row_22_gradient_of_sliced_keys(device: str, dtype: torch.dtype) -> None:
    """pytorch/pytorch#146377"""
    length = 4096 if device == "cuda" else 400
    query, *wide = leaves(*inputs(device, dtype, heads=2, length_q=length, head_dim=64))
    kittens_torch.attention(query, *wide).float().square().mean().backward()
    copies = leaves(query, *(tensor[:, :, :-128] for tensor in wide))
    kittens_torch.attention(*copies, deterministic=True).float().square().mean().backward()
    for _ in range(10):
        for tensor in wide:
            tensor.grad = None
        output = kittens_torch.attention(query, *(tensor[:, :, :-128] for tensor in wide), deterministic=True)
        output.float().square().mean().backward()
        for tensor, copy in zip(wide, copies[1:], strict=True):
            assert not tensor.grad[:, :, -128:].any() and torch.equal(tensor.grad[:, :, :-128], copy.grad)


@usual_place
@pytest.mark.parametrize("length", [65, 100, 127, 1000])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_row_24_gradients_of_every_head(device: str, dtype: torch.dtype, length: int, heads_k: int) -> None:
    """FlagGems#898: each head within the tolerance, and its first tokens apart."""
    for causal in (None, "upper_left"):
        tensors = inputs(device, dtype, heads=4, heads_k=heads_k, length_q=length, head_dim=64)
        grad_output = normal(*tensors[0].shape, device=device, dtype=dtype)
        operands = leaves(*tensors)
        output = kittens_torch.attention(*operands, causal=causal)
        grads = torch.autograd.grad(output, operands, grad_output)
        check_gradients(grads, *tensors, grad_output, causal=causal)
        exact = leaves(*(tensor.double() for tensor in tensors))
        kittens_torch.reference.attention(*exact, causal=causal)[0].backward(grad_output.double())
        for mine, reference in zip(grads, exact, strict=True):
            error = (mine.double() - reference.grad).abs()
            heads = torch.stack([error.amax((0, 2, 3)), error[:, :, :64].amax((0, 2, 3))])
            assert bool((heads <= 3 * heads[0, 0] + 1e-5).all())


@places(torch.float32, torch.bfloat16, torch.float16)
@pytest.mark.parametrize("head_dim", [1, 65, 72, 80, 88, 96, 100, 127, 129, 160, 192])
@pytest.mark.parametrize("packed", [False, True])
def test_row_26_head_dims(device: str, dtype: torch.dtype, head_dim: int, packed: bool) -> None:
    """pytorch/pytorch#90413: forward and backward, plain and as views of a packed tensor; inputs stay as they were."""
    length, heads = (130, 4) if device == "cuda" else (66, 2)
    if packed:
        whole = normal(2, length, 3, heads, head_dim, device=device, dtype=dtype)
        tensors = [whole[:, :, index].transpose(1, 2) for index in range(3)]
    else:
        tensors = list(inputs(device, dtype, batch=2, heads=heads, length_q=length, head_dim=head_dim))
    before = [tensor.clone() for tensor in tensors]
    check_forward(*tensors)
    operands = leaves(*tensors)
    grad_output = normal(2, heads, length, head_dim, device=device, dtype=dtype)
    grads = torch.autograd.grad(drop_in(*operands), operands, grad_output)
    check_gradients(grads, *operands, grad_output)
    assert all(torch.equal(tensor, saved) for tensor, saved in zip(tensors, before, strict=True))


@devices
def test_row_27_layout_of_the_output(device: str) -> None:
    """pytorch/pytorch#138340: eager, with autograd, fake and compiled."""
    qkv = normal(4, 128, 3 * 512, device=device, dtype=torch.bfloat16)
    query, key, value = (part.view(4, 128, 8, 64).transpose(1, 2) for part in qkv.split(512, 2))
    compiled = torch.compile(drop_in, fullgraph=True, backend="aot_eager")
    contiguous = drop_in(*(t.contiguous() for t in (query, key, value)))
    assert contiguous.is_contiguous()
    for function in (drop_in, compiled):
        for operands in ((query, key, value), [t.detach().requires_grad_() for t in (query, key, value)]):
            output = function(*operands)
            assert output.stride() == (65536, 64, 512, 1) and torch.equal(output, contiguous)
            assert output.transpose(1, 2).reshape(4, 128, 512).data_ptr() == output.data_ptr()


@usual_place
def test_row_28_unaligned_inputs(device: str, dtype: torch.dtype) -> None:
    """facebookresearch/xformers#813: 2-byte aligned addresses, last-dim stride 2, saved tensors moved."""
    shape = (2, 16, 43, 64)
    flat = normal(math.prod(shape) + 1, device=device, dtype=dtype)
    query = flat[1:].view(shape)
    key = normal(2, 16, 43, 128, device=device, dtype=dtype)[..., ::2]
    value = normal(*shape, device=device, dtype=dtype)
    check_forward(query, key, value)
    grad_output = normal(*shape, device=device, dtype=dtype)
    for saved in (False, True):
        operands = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        with torch.autograd.graph.save_on_cpu() if saved else torch.enable_grad():
            output = drop_in(*operands)
            grads = torch.autograd.grad(output, operands, grad_output)
        check_gradients(grads, query, key, value, grad_output)


@devices
def test_row_42_fake_strides(device: str) -> None:
    """Comfy-Org/ComfyUI#15044: compiled and eager agree on every stride (test_compile has every layout)."""
    for make in (
        lambda: normal(2, 3, 5, 64),
        lambda: normal(2, 5, 3, 64).transpose(1, 2),
        lambda: normal(2, 5, 3, 3, 64)[:, :, 0].transpose(1, 2),
        lambda: normal(2, 1, 3, 64).transpose(1, 2),
    ):
        torch._dynamo.reset()
        query = make().to(device, torch.bfloat16)
        operands = [query.detach().requires_grad_() for _ in range(3)]
        compiled = torch.compile(
            lambda *t: kittens_torch.attention(*t, causal="upper_left", return_lse=True),
            fullgraph=True,
            backend="aot_eager",
        )
        results = compiled(*operands)
        expected = kittens_torch.attention(*operands, causal="upper_left", return_lse=True)
        assert [t.stride() for t in results] == [t.stride() for t in expected]
        grads = torch.autograd.grad(results[0].sum(), operands)
        plain = torch.autograd.grad(expected[0].sum(), operands)
        assert [grad.stride() for grad in grads] == [grad.stride() for grad in plain]
        assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))


@pytest.mark.gpu
def test_row_47_launches_on_the_current_stream() -> None:
    """NVIDIA/cudnn-frontend#483."""
    x = torch.zeros(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16)
    kittens_torch.attention(x, x, x)
    side = torch.cuda.Stream()
    for index in range(50):
        new = torch.randn_like(x)
        expected = kittens_torch.attention(new, new, new, causal="upper_left") * 2
        torch.cuda.synchronize()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000 if index < 5 else 2_000_000)
            x.copy_(new)
            doubled = kittens_torch.attention(x, x, x, causal="upper_left") * 2
        side.synchronize()
        assert torch.equal(doubled, expected)
    # The reverse: a busy default stream does not hold up the call.
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(200_000_000)
    with torch.cuda.stream(side):
        kittens_torch.attention(x, x, x, causal="upper_left")
        done.record(side)
    done.synchronize()
    assert not torch.cuda.default_stream().query(), "the default stream should still be asleep"


@pytest.mark.gpu
def test_row_47_backward_on_the_current_stream() -> None:
    x = torch.zeros(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    for _ in range(10):
        new = torch.randn_like(x)
        plain = new.clone().requires_grad_()
        kittens_torch.attention(plain, plain, plain).float().square().sum().backward()
        torch.cuda.synchronize()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
            x.copy_(new)
            operand = x.detach().requires_grad_()
            kittens_torch.attention(operand, operand, operand).float().square().sum().backward()
        side.synchronize()
        assert torch.equal(operand.grad, plain.grad)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_row_48_mixed_dtypes(device: str) -> None:
    """bghira/SimpleTuner#3002."""
    query, key, value = inputs(device, torch.float32, heads=4, length_q=65, head_dim=64)
    mixed = leaves(query, key, value.to(torch.bfloat16))
    with torch.autocast(device, torch.bfloat16):  # (a)
        output = drop_in(*mixed)
    assert output.dtype == torch.bfloat16
    explicit = leaves(*(tensor.detach().to(torch.bfloat16) for tensor in mixed))
    expected = drop_in(*explicit)
    assert torch.equal(output, expected)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    expected.backward(grad_output)
    for operand, cast in zip(mixed, explicit, strict=True):
        assert operand.grad.dtype == operand.dtype and torch.equal(operand.grad, cast.grad.to(operand.dtype))
    with pytest.raises(RuntimeError, match=r"float32.*bfloat16"):  # (b)
        drop_in(*mixed)
    before = kittens_torch.set_fallback("silent")
    try:
        exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
        assert (drop_in(query, key, value).double() - exact).abs().max() < 1e-4  # (c)
        doubles = [tensor.double() for tensor in (query, key, value)]
        assert torch.allclose(drop_in(*doubles), exact, atol=1e-12)  # (e)
    finally:
        kittens_torch.set_fallback(before)
    if device == "cuda":  # (d)
        with torch.autocast("cuda", torch.float16):
            sixteen = drop_in(*(tensor.to(torch.bfloat16) for tensor in (query, key, value)))
            torchs = F.scaled_dot_product_attention(*(tensor.to(torch.bfloat16) for tensor in (query, key, value)))
        assert sixteen.dtype == torchs.dtype == torch.float16


MASK = torch.arange(64).remainder(2).bool().expand(10, 64)
ARGUMENTS: list[dict[str, Any]] = [
    {"attn_mask": MASK[:, :10]},
    {"is_causal": True},
    {"scale": 0.3},
    {"dropout_p": 0.5},
    {"enable_gqa": True},
    {"attn_mask": MASK[:, :10], "scale": 0.3},
    {"attn_mask": MASK[:, :10], "dropout_p": 0.5},
    {"is_causal": True, "scale": 0.3},
    {"is_causal": True, "dropout_p": 0.5},
    {"is_causal": True, "enable_gqa": True},
    {"scale": 0.3, "enable_gqa": True},
]


@devices
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: "+".join(arguments))
def test_row_49_every_argument_counts(device: str, arguments: dict[str, Any]) -> None:
    """huggingface/diffusers#12605: no argument is accepted and ignored; positions and keywords mean the same."""
    heads_k = 2 if "enable_gqa" in arguments else 8
    tensors = inputs(device, torch.bfloat16, heads=8, heads_k=heads_k, length_q=10, head_dim=64)
    arguments = {name: a.to(device) if isinstance(a, Tensor) else a for name, a in arguments.items()}
    before = kittens_torch.set_fallback("silent")
    try:
        torch.manual_seed(5)
        output = drop_in(*tensors, **arguments)
        positional = [arguments.get("attn_mask"), arguments.get("dropout_p", 0.0), arguments.get("is_causal", False)]
        keywords = {name: arguments[name] for name in ("scale", "enable_gqa") if name in arguments}
        torch.manual_seed(5)
        assert torch.equal(drop_in(*tensors, *positional, **keywords), output)
        torch.manual_seed(5)
        exact = F.scaled_dot_product_attention(*tensors, **arguments)
        if "dropout_p" not in arguments:  # the generators are used in other ways
            assert (output.float() - exact.float()).abs().max() < 2e-2
        for name in arguments:  # leaving one out gives something else
            fewer = {other: a for other, a in arguments.items() if other != name}
            if name == "enable_gqa":
                with pytest.raises(RuntimeError, match="enable_gqa"):
                    drop_in(*tensors, **fewer)
            else:
                assert (drop_in(*tensors, **fewer).float() - output.float()).abs().max() > 5e-2
    finally:
        kittens_torch.set_fallback(before)


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_row_54_forked_workers() -> None:
    """A worker forked from a process that has used the library computes the same."""
    result = _python(
        """
        import torch, kittens_torch, multiprocessing
        def work(index):
            torch.manual_seed(index)
            q = torch.randn(1, 2, 70, 16)
            return kittens_torch.attention(q, q, q).sum().item()
        if __name__ == "__main__":
            torch.set_num_threads(1)  # torch's own OpenMP pool does not survive a fork
            mine = [work(index) for index in range(4)]
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(work, range(4)) == mine
            print("done")
        """
    )
    assert result.returncode == 0 and result.stdout.strip() == "done", result.stderr


def test_row_54_ops_on_a_device_without_kernels() -> None:
    """One clear sentence when an op meets a device it has no kernel for."""
    query = torch.zeros(1, 1, 2, 4)
    sparse: Callable[..., Any] = ops.forward
    with pytest.raises((RuntimeError, NotImplementedError), match="kittens_torch::forward"):
        sparse(*(tensor.to_sparse() for tensor in (query, query, query)), 1.0, 0, -1, -1)
