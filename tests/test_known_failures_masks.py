"""As test_known_failures: the rows on masks, biases, sinks, soft cap and dropout, and their gradients."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropout_rule import kept, share_dropped
from helpers import assert_accurate, check_forward, inputs, leaves, normal, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import attention, reference
from kittens_torch import scaled_dot_product_attention as drop_in

pytestmark = pytest.mark.usefixtures("only_ours")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
INF = float("inf")
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


def exact_gradients(
    operands: dict[str, Tensor], grad_output: Tensor, grad_logsumexp: Tensor | None, dtype: torch.dtype, **keywords: Any
) -> dict[str, Tensor]:
    """Gradients of the reference in one dtype; logsumexps of rows without a score are constants."""
    given = {name: operand.detach().to(dtype).requires_grad_() for name, operand in operands.items()}
    tensors = [given.pop(name) for name in ("query", "key", "value")]
    output, logsumexp = reference.attention(*tensors, **given, **keywords)
    targets, sources = [output], [grad_output.to(dtype)]
    if grad_logsumexp is not None:
        targets.append(logsumexp.masked_fill(logsumexp == -INF, 0.0))
        sources.append(grad_logsumexp.to(dtype))
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True)) | given
    grads = torch.autograd.grad(targets, list(leaves.values()), sources, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), grads, strict=True)
    }


def check_all_gradients(
    operands: dict[str, Tensor], *, with_logsumexp: bool = False, dropout_p: float = 0.0, **keywords: Any
) -> dict[str, Tensor]:
    """Runs `attention` forward and backward and holds each gradient against the reference."""
    leaves = {name: operand.detach().clone().requires_grad_() for name, operand in operands.items()}
    tensors = [leaves[name] for name in ("query", "key", "value")]
    more = {name: leaf for name, leaf in leaves.items() if name not in ("query", "key", "value")}
    torch.manual_seed(3)
    output, logsumexp = attention(*tensors, return_lse=True, dropout_p=dropout_p, **more, **keywords)
    if dropout_p > 0.0:
        torch.manual_seed(3)
        state = torch.randint(2**63 - 1, (2,), device=output.device)
        which = kept(state.cpu(), dropout_p, *output.shape[:3], tensors[1].shape[2]).to(output.device)
        keywords |= {"kept": which, "dropout_p": share_dropped(dropout_p)}
    grad_output = normal(*output.shape, device=str(output.device), dtype=output.dtype)
    grad_logsumexp = normal(*logsumexp.shape, device=str(output.device)).to(logsumexp.dtype) if with_logsumexp else None
    targets = [output] if grad_logsumexp is None else [output, logsumexp]
    sources = [grad_output] if grad_logsumexp is None else [grad_output, grad_logsumexp]
    mine = dict(zip(leaves, torch.autograd.grad(targets, list(leaves.values()), sources), strict=True))
    exact = exact_gradients(operands, grad_output, grad_logsumexp, torch.float64, **keywords)
    same_formula = exact_gradients(operands, grad_output, grad_logsumexp, output.dtype, **keywords)
    for name, gradient in mine.items():
        assert gradient.dtype == operands[name].dtype and gradient.shape == operands[name].shape, name
        assert_accurate(f"grad_{name}", gradient, exact[name], same_formula[name], 3)
    return mine


def with_bias_and_sinks(device: str, dtype: torch.dtype, **sizes: Any) -> dict[str, Tensor]:
    query, key, value = inputs(device, dtype, **{"batch": 2, "heads": 4, "heads_k": 2, **sizes})
    bias = normal(2, 1, query.shape[2], key.shape[2], device=device)
    return {"query": query, "key": key, "value": value, "bias": bias, "sinks": normal(4, device=device)}


@usual_place
def test_every_option_and_its_gradients(device: str, dtype: torch.dtype) -> None:
    operands = with_bias_and_sinks(device, dtype, length_q=90, length_k=150)
    mask = torch.rand(2, 4, 90, 150, device=device) > 0.3
    lengths, slopes = torch.tensor([60, 150], device=device), torch.rand(4, device=device) / 10
    everything = {"mask": mask, "key_lengths": lengths, "alibi_slopes": slopes, "softcap": 3.0}
    check_all_gradients(operands, with_logsumexp=True, causal="lower_right", **everything)
    check_all_gradients(operands, dropout_p=0.3, window=(70, 20), **everything)


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(attention(x, x, x, softcap=2.0).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


def test_checkpoint_and_vmap() -> None:
    operands = with_bias_and_sinks("cpu", torch.float64, length_q=10, length_k=12, head_dim=8)
    operands = {name: operand.double() for name, operand in operands.items()}
    query, key, value, bias, sinks = operands.values()

    def run(q: Tensor, k: Tensor, v: Tensor, b: Tensor, s: Tensor, p: float = 0.4) -> Tensor:
        output = attention(q, k, v, bias=b, sinks=s, dropout_p=p)
        assert isinstance(output, Tensor)
        return output

    gradients = []
    for call in (run, lambda *x: torch.utils.checkpoint.checkpoint(run, *x, use_reentrant=False)):
        leaves = [operand.clone().requires_grad_() for operand in (query, key, value, bias, sinks)]
        torch.manual_seed(4)
        gradients.append(torch.autograd.grad(call(*leaves).square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True)), "checkpoint: another mask in the backward"

    stacked = [torch.stack([x, x * 0.5, -x]) for x in (query, key, value, bias, sinks)]
    for dims in ((0, 0, 0, 0, None), (0, 0, 0, None, None), (0, None, None, 0, None), (None, None, None, None, 0)):
        given = [x if dim == 0 else x[0] for x, dim in zip(stacked, dims, strict=True)]
        expected = [
            run(*(x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True)), p=0.0) for i in range(3)
        ]
        mapped = torch.func.vmap(lambda *x: run(*x, p=0.0), in_dims=dims)(*given)
        torch.testing.assert_close(mapped, torch.stack(expected), atol=1e-12, rtol=1e-12)

        def loss(*x: Tensor) -> Tensor:
            return run(*x, p=0.0).square().sum()

        of_each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3, 4)), in_dims=dims)(*given)
        for index in range(3):
            leaves = [
                (x[index] if dim == 0 else x).clone().requires_grad_() for x, dim in zip(given, dims, strict=True)
            ]
            right = torch.autograd.grad(loss(*leaves), leaves)
            for ours, exact in zip(of_each, right, strict=True):
                torch.testing.assert_close(ours[index], exact, atol=1e-10, rtol=1e-10)


@usual_place
def test_row_07_window_of_the_right_width(device: str, dtype: torch.dtype) -> None:
    """huggingface/transformers#39408: (left, 0) shows a row itself and `left` keys before, also in decoding."""
    query, key, value = inputs(device, dtype, heads=1, length_q=12)
    uniform = attention(query * 0, key, torch.eye(12, 64, device=device, dtype=dtype)[None, None], window=(3, 0))
    for row in range(12):
        seen = uniform[0, 0, row].nonzero().flatten().tolist()
        assert seen == list(range(max(0, row - 3), row + 1))
    whole, _ = check_forward(query, key, value, window=(3, 0), softcap=9.0)
    step, _ = check_forward(query[:, :, -1:], key, value, window=(3, 0), softcap=9.0)
    torch.testing.assert_close(step, whole[:, :, -1:], atol=1e-2, rtol=1e-2)


@usual_place
@pytest.mark.parametrize("length", [8, 100, 256])
def test_row_08_window_as_long_as_the_context(device: str, dtype: torch.dtype, length: int) -> None:
    """tlc-pack/libflash_attn#11: it stays causal."""
    query, key, value = inputs(device, dtype, heads=4, length_q=length)
    for more in ({}, {"sinks": torch.zeros(4, device=device)}):
        causal = attention(query, key, value, causal="lower_right", **more)
        for left in (length - 1, length, 4096):
            for keywords in ({"window": (left, 0)}, {"causal": "lower_right", "window": (left, 0)}):
                # Not bit for bit: other blocks count as masked.
                output = attention(query, key, value, **keywords, **more)
                torch.testing.assert_close(output, causal, atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
        if not more:
            torch.testing.assert_close(causal[:, :, 0], value[:, :, 0], atol=1e-6, rtol=1e-6)


@usual_place
def test_row_09_masks_that_broadcast(device: str, dtype: torch.dtype) -> None:
    """pytorch/pytorch#120810."""
    query, key, value = inputs(device, dtype, batch=3, heads=2, length_q=7, length_k=5)

    def made(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) > 0.3

    masks = [made(*shape) for shape in ((7, 5), (1, 5), (1, 1, 5), (3, 1, 1, 5), (1, 2, 7, 5), (3, 2, 7, 5))]
    masks += [made(3, 1, 1, 5).expand(3, 2, 7, 5), made(7, 1).expand(7, 5)]
    for mask in masks:
        additive = torch.zeros(mask.shape, device=device, dtype=dtype).masked_fill(~mask, -1.5)
        for given in (mask, additive, additive.float(), additive[..., :1].expand(additive.shape)):
            whole = given.expand(3, 2, 7, 5)
            keywords = {"mask": whole} if given.dtype == torch.bool else {"bias": whole}
            exact, _ = reference.attention(query.double(), key.double(), value.double(), **keywords)
            same_formula, _ = reference.attention(query, key, value, **keywords)
            assert_accurate("output", drop_in(query, key, value, given), exact, same_formula, 2)
    for wrong in (made(7, 6), made(2, 1, 7, 5), torch.ones(7, 5, device=device, dtype=torch.int64)):
        with pytest.raises(RuntimeError) as torchs:
            F.scaled_dot_product_attention(query, key, value, wrong)
        with pytest.raises(torchs.type, match="attn_mask"):
            drop_in(query, key, value, wrong)


@usual_place
@pytest.mark.parametrize("additive", [False, True])
def test_row_11_rows_with_every_key_masked(device: str, dtype: torch.dtype, additive: bool) -> None:
    """pytorch/pytorch#103963."""
    query, key, value = inputs(device, dtype, batch=2, heads=2, length_q=8)
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool, device=device)
    mask[0, :, :4, :4] = True
    keywords = {"bias": torch.zeros(mask.shape, device=device).masked_fill(~mask, -INF)} if additive else {"mask": mask}
    output, logsumexp = check_forward(query, key, value, **keywords)
    empty = ~mask.any(-1).expand(2, 2, 8)
    assert not output[empty].any() and (logsumexp[empty] == -INF).all()
    grads = check_all_gradients({"query": query, "key": key, "value": value}, with_logsumexp=False, **keywords)
    assert not grads["query"][empty].any()
    assert not grads["key"][0, :, 4:].any() and not grads["key"][1].any() and not grads["value"][1].any()


@usual_place
def test_row_12_masks_of_the_most_negative_number(device: str, dtype: torch.dtype) -> None:
    """pytorch/pytorch#110213."""
    least = torch.finfo(torch.float32).min
    query, key, value = inputs(device, dtype, heads=1, length_q=3)
    bias = torch.ones(1, 1, 3, 3, device=device)
    bias[..., 0, :] = least
    output, logsumexp = attention(query, key, value, bias=bias, return_lse=True)
    assert torch.isfinite(logsumexp).all()
    check_forward(query[:, :, 1:], key, value, bias=bias[:, :, 1:])
    torch.testing.assert_close(output[:, :, 0].double(), value.double().mean(2), atol=1e-2, rtol=1e-2)
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=441)
    bias = torch.zeros(2, 1, 441, 441, device=device)
    bias[..., :128] = least
    output, _ = check_forward(query, key, value, bias=bias)
    later = attention(query, key[:, :, 128:], value[:, :, 128:])
    torch.testing.assert_close(output, later, atol=1e-2, rtol=1e-2)
    grads = check_all_gradients({"query": query, "key": key, "value": value}, bias=bias)
    assert not grads["key"][:, :, :128].any() and not grads["value"][:, :, :128].any()


@pytest.mark.parametrize(
    ("device", "shape"),
    [
        ("cpu", (65537, 1, 2, 8)),
        pytest.param("cuda", (65537, 8, 4, 64), marks=pytest.mark.gpu),
        pytest.param("cuda", (100000, 10, 1, 16), marks=pytest.mark.gpu),
    ],
)
def test_row_16_masks_of_more_than_65535_batches(device: str, shape: tuple[int, int, int, int]) -> None:
    """pytorch/pytorch#146704: a mask for each batch, and the gradient of an additive one."""
    batch, _, length, _ = shape
    dtype = torch.float32 if device == "cpu" else torch.float16
    query, key, value, grad_output = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    bias = torch.randn(batch, 1, 1, length, device=device, dtype=dtype)
    mask = torch.rand(batch, 1, 1, length, device=device) > 0.3
    mask[..., 0] = True
    operands = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    output = attention(query, key, value, mask=mask, bias=bias)
    assert isinstance(output, Tensor)
    grads = torch.autograd.grad(output, operands, grad_output)
    assert grads[3].shape == bias.shape and grads[3].dtype == dtype
    for part in (slice(entry, entry + 1) for entry in (0, 65534, 65535, batch - 1)):
        single = [tensor.detach()[part].double().requires_grad_() for tensor in operands]
        exact, _ = reference.attention(*single[:3], mask=mask[part], bias=single[3])
        expected = torch.autograd.grad(exact, single, grad_output[part].double())
        assert (output[part].double() - exact).abs().max() < 4e-3
        for grad, exact_grad in zip(grads, expected, strict=True):
            assert (grad[part].double() - exact_grad).abs().max() < 3e-2


@pytest.mark.gpu
@pytest.mark.large
def test_row_17_a_mask_of_more_than_2_31_elements() -> None:
    """pytorch/pytorch#150054."""
    length = 49999
    query, key, value = (
        normal(1, 8, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    masked = torch.autograd.grad(drop_in(query, key, value, mask).sum(), (query, key, value))
    assert torch.cuda.max_memory_allocated() - before < 4 << 30
    plain = torch.autograd.grad(drop_in(query, key, value).sum(), (query, key, value))
    for mine, right in zip(masked, plain, strict=True):
        torch.testing.assert_close(mine[:, :, -256:], right[:, :, -256:], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["rows of a mask", "rows of a bias", "keys of a bias"])
def test_row_17_elements_more_than_2_31_apart(kind: str) -> None:
    """The kin of pytorch/pytorch#150054: few elements, far apart. Of the memory between them nothing is touched."""
    dtype = torch.bool if kind.endswith("mask") else torch.bfloat16
    apart = (1 << 31) + 64 if dtype == torch.bool else (1 << 30) + 64
    steps = (0, 1, apart) if kind.startswith("keys") else (0, apart, 1)
    far = torch.empty(2 * apart, dtype=dtype).as_strided((1, 2, 2), steps)
    far.copy_(torch.tensor([[True, False], [True, True]]) if dtype == torch.bool else normal(2, 2))
    operands = leaves(*inputs("cpu", torch.bfloat16, heads=3, length_q=2))
    grad_output = normal(1, 3, 2, 64, dtype=torch.bfloat16)

    def results(near_or_far: Tensor) -> list[Tensor]:
        added = near_or_far.detach().expand(3, 2, 2)
        if dtype != torch.bool:
            added.requires_grad_()
        output = attention(*operands, **{"mask" if dtype == torch.bool else "bias": added})
        assert isinstance(output, Tensor)
        wanted = operands if dtype == torch.bool else [*operands, added]
        return [output.detach(), *torch.autograd.grad(output, wanted, grad_output)]

    for mine, right in zip(results(far), results(far.contiguous()), strict=True):
        assert torch.equal(mine, right)


@usual_place
@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (2, 4, 64, 64), (1, 1, 1, 64), (2, 1, 64, 64)], ids=str)
def test_row_23_any_inputs_may_want_a_gradient(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """pytorch/pytorch#148476: every subset, the mask alone included."""
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=64)
    mask = normal(*shape, device=device, dtype=dtype)
    operands = {"query": query, "key": key, "value": value, "bias": mask}
    grad_output = normal(*query.shape, device=device, dtype=dtype)
    exact = exact_gradients(operands, grad_output, None, torch.float64)
    same_formula = exact_gradients(operands, grad_output, None, dtype)
    for count in (1, 2, 3, 4):
        for wanted in combinations(operands, count):
            leaves = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in operands.items()}
            drop_in(*leaves.values()).backward(grad_output)
            for name, leaf in leaves.items():
                if name not in wanted:
                    assert leaf.grad is None
                    continue
                assert leaf.grad is not None and leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype
                assert_accurate(name, leaf.grad, exact[name], same_formula[name], 3)


@usual_place
@pytest.mark.parametrize("layout", ["odd rows", "offset", "padded"])
def test_row_28_unaligned_masks(device: str, dtype: torch.dtype, layout: str) -> None:
    """facebookresearch/xformers#813: any row stride and address, also where saved tensors come back with others."""
    tensors = inputs(device, dtype, batch=2, heads=16, length_q=43, head_dim=64)
    columns, first = {"odd rows": (43, 0), "offset": (44, 1), "padded": (48, 0)}[layout]
    wide = normal(2, 16, 43, columns, device=device, dtype=dtype)
    grad_output = normal(2, 16, 43, 64, device=device, dtype=dtype)

    def results(dense: bool, saved: bool = False) -> list[Tensor]:
        bias = wide[..., first : first + 43].detach()
        operands = [(t.clone() if dense else t).detach().requires_grad_() for t in (*tensors, bias)]
        assert dense or operands[3].stride(2) == columns
        with torch.autograd.graph.save_on_cpu() if saved else torch.enable_grad():
            output = drop_in(*operands[:3], operands[3])
            shown = drop_in(*operands[:3], operands[3] > -1.0)
            grads = torch.autograd.grad((output, shown), operands, (grad_output, grad_output))
        return [output.detach(), shown.detach(), *grads]

    expected = results(dense=True)
    exact = F.scaled_dot_product_attention(*(t.double() for t in (*tensors, wide[..., first : first + 43])))
    assert (expected[0].double() - exact).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2)
    for saved in (False, True):
        for mine, dense in zip(results(dense=False, saved=saved), expected, strict=True):
            torch.testing.assert_close(mine, dense, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


@usual_place
def test_row_29_logsumexp_of_rows_without_keys_and_merging(device: str, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#978."""
    query, key, value = inputs(device, dtype, length_q=5, length_k=130)
    _, none = attention(query, key[:, :, :0], value[:, :, :0], softcap=3.0, return_lse=True)
    assert none.shape == (1, 2, 5) and none.dtype == torch.float32 and (none == -INF).all()
    _, corner = attention(query, key[:, :, :2], value[:, :, :2], causal="lower_right", softcap=3.0, return_lse=True)
    assert (corner[:, :, :3] == -INF).all() and torch.isfinite(corner[:, :, 3:]).all()
    whole, of_whole = attention(query, key, value, softcap=3.0, return_lse=True)
    for split in (0, 1, 64, 129, 130):
        parts = [
            attention(query, key[:, :, s], value[:, :, s], softcap=3.0, return_lse=True)
            for s in (slice(0, split), slice(split, 130))
        ]
        of_both = torch.logaddexp(parts[0][1], parts[1][1])
        merged = sum(output.float() * torch.exp(lse - of_both)[..., None] for output, lse in parts)
        torch.testing.assert_close(merged, whole.float(), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(of_both, of_whole, atol=1e-3, rtol=0)


@usual_place
def test_row_31_sink_and_its_gradient(device: str, dtype: torch.dtype) -> None:
    """pytorch/torchtitan#4796."""
    unit = torch.zeros(1, 1, 1, 64, device=device, dtype=dtype)
    unit[..., 0] = 1
    query, key, value = (x.clone().requires_grad_() for x in (unit, unit, 2 * unit))
    sink = torch.zeros(1, device=device, requires_grad=True)
    output = attention(query, key, value, sinks=sink, scale=1.0)
    output[0, 0, 0, 0].backward()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for mine, right in (
        (output[0, 0, 0, 0], 1.46212),
        (query.grad[0, 0, 0, 0], 0.39322),
        (key.grad[0, 0, 0, 0], 0.39322),
        (value.grad[0, 0, 0, 0], 0.73106),
        (sink.grad[0], -0.39322),
    ):
        assert abs(float(mine.detach()) - right) < tolerance
    operands = with_bias_and_sinks(device, dtype, length_q=33)
    del operands["bias"]
    check_all_gradients(operands, causal="lower_right", window=(8, 0))
    check_all_gradients(operands, with_logsumexp=True, causal="lower_right", window=(8, 0))


@usual_place
def test_row_32_soft_cap(device: str, dtype: torch.dtype) -> None:
    """Dao-AILab/flash-attention#2402: one process, caps in any order."""
    query, key, value = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=65)
    query = query * 8
    mask = torch.rand(65, 65, device=device) > 0.3
    outputs = []
    for cap in (0.0, 15.0, 50.0, 15.0, 0.0):
        output, _ = check_forward(query, key, value, softcap=cap, causal="lower_right")
        check_forward(query, key, value, softcap=cap, mask=mask)
        check_all_gradients({"query": query, "key": key, "value": value}, softcap=cap, causal="lower_right")
        outputs.append(output)
    assert torch.equal(outputs[0], outputs[4]) and torch.equal(outputs[1], outputs[3])
    assert (outputs[1] - outputs[0]).abs().max() > 0.1


@devices
def test_row_38_dropout_state_moves_on(device: str) -> None:
    """Dao-AILab/flash-attention#315."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    zeros = torch.zeros(4, 8, 64, 64, device=device, dtype=dtype)
    value = torch.eye(64, device=device, dtype=dtype).expand(4, 8, 64, 64).clone().requires_grad_()
    other = torch.Generator(device).manual_seed(9)
    before = other.get_state()

    def draw(p: float = 0.2) -> Tensor:
        return drop_in(zeros, zeros, value, dropout_p=p)

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and torch.equal(draw(), second) and not torch.equal(first, second)
    assert torch.equal(other.get_state(), before)
    rows = (first != 0).flatten(0, 2)
    assert len({tuple(row.tolist()) for row in rows}) == rows.shape[0], "two rows have the same mask"
    assert abs(rows.double().mean().item() - 0.8) < 0.005
    torch.testing.assert_close(
        first[first != 0].double(), torch.full_like(first[first != 0], 1 / 64 / 0.8).double(), rtol=1e-2, atol=0
    )
    (grad,) = torch.autograd.grad(first.sum(), value)
    counts = (first != 0).sum(2)
    torch.testing.assert_close(grad[..., 0].double(), counts.double() / 64 / 0.8, rtol=1e-2, atol=1e-4)
    torch.manual_seed(1)
    state = torch.rand(4, device=device)
    torch.manual_seed(1)
    draw(0.0)
    assert torch.equal(torch.rand(4, device=device), state)
    assert not draw(1.0).any()


@pytest.mark.gpu
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_row_39_cuda_graphs(p: float) -> None:
    """Dao-AILab/flash-attention#165: forward and backward captured, with inputs that change in place."""
    query, key, value = (normal(2, 12, 1024, 64, device="cuda", dtype=torch.float16).requires_grad_() for _ in range(3))
    mask = torch.rand(1, 1, 1024, 1024, device="cuda") > 0.2

    def run() -> tuple[Tensor, ...]:
        output = drop_in(query, key, value, mask, p)
        return (output, *torch.autograd.grad(output.sum(), (query, key, value)))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    replays = []
    for _ in range(3):
        with torch.no_grad():
            query.copy_(torch.randn_like(query))
            mask.copy_(torch.rand_like(mask, dtype=torch.float32) > 0.2)
        graph.replay()
        replays.append([x.clone() for x in captured])
        if p == 0.0:
            assert all(torch.equal(a, b) for a, b in zip(replays[-1][:1], run()[:1], strict=True))
    if p > 0.0:
        graph.replay()
        assert not torch.equal(captured[0], replays[-1][0]), "the same inputs, the same mask"


def test_the_checks_can_fail() -> None:
    operands = {"query": torch.randn(1, 2, 5, 8), "key": torch.randn(1, 2, 6, 8), "value": torch.randn(1, 2, 6, 8)}
    right = reference.attention

    def wrong(*tensors: Tensor, softcap: float = 0.0, **keywords: Any) -> Any:
        return right(*tensors, softcap=softcap * 1.2, **keywords)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="grad_"):
        patch.setattr(reference, "attention", wrong)
        check_all_gradients(operands, softcap=0.7)
    assert kittens_torch.attention is attention
