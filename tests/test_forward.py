"""The forward kernel through `attention`, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from helpers import CORNERS, LENGTHS, RATIOS, check_forward, every_place, inputs, normal, places, usual_place
from torch import Tensor

import kittens_torch

corners = pytest.mark.parametrize("causal", CORNERS)


@usual_place
@corners
@pytest.mark.parametrize("length", LENGTHS)
def test_square_lengths(device: str, dtype: torch.dtype, length: int, causal: str | None) -> None:
    check_forward(*inputs(device, dtype, length_q=length), causal=causal)


@usual_place
@corners
@pytest.mark.parametrize(
    ("length_q", "length_k"),
    [(1, 2), (1, 333), (2, 5), (5, 2), (333, 1), (64, 65), (65, 64), (79, 131), (127, 257), (193, 80), (131, 331)],
)
def test_lengths_that_differ(device: str, dtype: torch.dtype, length_q: int, length_k: int, causal: str | None) -> None:
    check_forward(*inputs(device, dtype, length_q=length_q, length_k=length_k), causal=causal)


@every_place
@corners
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_dtypes(device: str, dtype: torch.dtype, head_dim: int, causal: str | None) -> None:
    check_forward(*inputs(device, dtype, batch=2, length_q=150, length_k=170, head_dim=head_dim), causal=causal)


@usual_place
@pytest.mark.parametrize("head_dim", [1, 2, 8, 65, 72, 80, 88, 96, 100, 127, 129, 160, 192, 255])
def test_head_dims(device: str, dtype: torch.dtype, head_dim: int) -> None:
    check_forward(*inputs(device, dtype, length_q=130, head_dim=head_dim), causal="upper_left")


@usual_place
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(64, 128), (128, 64), (192, 128), (72, 40), (1, 256), (256, 1), (33, 257 - 33)]
)
def test_value_dims(device: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    check_forward(*inputs(device, dtype, length_q=130, head_dim=head_dim, value_dim=value_dim))


@usual_place
@corners
@pytest.mark.parametrize("ratio", RATIOS)
def test_grouped_heads(device: str, dtype: torch.dtype, ratio: int, causal: str | None) -> None:
    heads_k = 1 if ratio == 71 else 2
    check_forward(
        *inputs(device, dtype, batch=2, heads=ratio * heads_k, heads_k=heads_k, length_q=66, head_dim=32), causal=causal
    )


@usual_place
@corners
@pytest.mark.parametrize("window", [(0, 0), (0, None), (None, 0), (3, 5), (64, 0), (100, 70), (4096, 4096), None])
@pytest.mark.parametrize(("length_q", "length_k"), [(200, 200), (70, 200), (200, 70)])
def test_windows(
    device: str,
    dtype: torch.dtype,
    length_q: int,
    length_k: int,
    window: tuple[int | None, int | None] | None,
    causal: str | None,
) -> None:
    query, key, value = inputs(device, dtype, heads=1, length_q=length_q, length_k=length_k, head_dim=16)
    check_forward(query, key, value, causal=causal, window=window)


@usual_place
@pytest.mark.parametrize("scale", [1e-30, 0.01, 1.0, 3, 20.0, -0.3, 0, 0.0, -1e-45])
def test_scales(device: str, dtype: torch.dtype, scale: float) -> None:
    query, key, value = inputs(device, dtype, length_q=70, length_k=90, head_dim=32)
    before = query.clone()
    # Logits of a few hundred need a unit in the last place of float32 that the tolerance of the logsumexp still covers.
    check_forward(query, key, value, scale=scale)
    assert torch.equal(query, before)


@every_place
@pytest.mark.parametrize(("batch", "length_q", "length_k"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)])
@corners
def test_empty(device: str, dtype: torch.dtype, batch: int, length_q: int, length_k: int, causal: str | None) -> None:
    query, key, value = inputs(
        device, dtype, batch=batch, length_q=length_q, length_k=length_k, head_dim=8, value_dim=4
    )
    output, logsumexp = kittens_torch.attention(query, key, value, causal=causal, return_lse=True)
    assert output.shape == (batch, 2, length_q, 4) and not output.any()
    assert logsumexp.shape == (batch, 2, length_q) and (logsumexp == float("-inf")).all()


def _in_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same numbers in another memory layout."""
    batch, heads, length, width = tensor.shape
    if layout == "length before heads":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        packed = tensor.new_full((batch, length, 3, heads, width), float("nan"))
        packed[:, :, 1] = tensor.transpose(1, 2)
        return packed[:, :, 1].transpose(1, 2)
    if layout == "batch inside":
        return tensor.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    if layout == "last stride 2":
        wide = tensor.new_full((batch, heads, length, width, 2), float("nan"))
        wide[..., 0] = tensor
        return wide[..., 0]
    if layout == "columns first":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "misaligned":
        flat = tensor.new_full((tensor.numel() + 1,), float("nan"))
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    if layout == "odd rows":
        wide = tensor.new_full((batch, heads, length, width + 3), float("nan"))
        wide[..., 2:-1] = tensor
        return wide[..., 2:-1]
    assert layout == "inside a larger buffer"
    wide = tensor.new_full((batch + 1, heads + 1, length + 28, width), float("nan"))
    wide[1:, 1:, :length] = tensor
    return wide[1:, 1:, :length]


LAYOUTS = (
    "length before heads",
    "packed",
    "batch inside",
    "last stride 2",
    "columns first",
    "misaligned",
    "odd rows",
    "inside a larger buffer",
)


@usual_place
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_layouts_change_nothing(device: str, dtype: torch.dtype, layout: str, head_dim: int) -> None:
    tensors = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=100, length_k=70, head_dim=head_dim)
    expected, expected_logsumexp = check_forward(*tensors, causal="lower_right")
    moved = [_in_layout(tensor, layout) for tensor in tensors]
    assert all(torch.equal(a, b) for a, b in zip(moved, tensors, strict=True))
    output, logsumexp = kittens_torch.attention(*moved, causal="lower_right", return_lse=True)
    assert torch.equal(output, expected) and torch.equal(logsumexp, expected_logsumexp)
    for index in range(3):  # one at a time: the layouts are independent of each other
        mixed = [moved[i] if i == index else tensor for i, tensor in enumerate(tensors)]
        assert torch.equal(kittens_torch.attention(*mixed, causal="lower_right"), expected)


@usual_place
def test_expanded_inputs(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, batch=1, heads=1, length_q=65, head_dim=64)
    expanded = [tensor.expand(3, 4, -1, -1) for tensor in (query, key, value)]
    output, logsumexp = check_forward(*expanded, causal="upper_left")
    copies, copied_logsumexp = kittens_torch.attention(
        *(tensor.contiguous() for tensor in expanded), causal="upper_left", return_lse=True
    )
    assert torch.equal(output, copies) and torch.equal(logsumexp, copied_logsumexp)
    rows = normal(1, 1, 1, 64, device=device, dtype=dtype).expand(1, 2, 65, 64)  # one key, one value, repeated
    check_forward(normal(1, 2, 65, 64, device=device, dtype=dtype), rows, rows)


@usual_place
@pytest.mark.parametrize("length_k", [1, 37, 100, 128, 130])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_memory_beyond_the_keys_is_never_used(device: str, dtype: torch.dtype, length_k: int, poison: float) -> None:
    query = normal(1, 2, 70, 64, device=device, dtype=dtype)
    buffers = [normal(1, 2, 256, 64, device=device, dtype=dtype) for _ in range(2)]
    clean = kittens_torch.attention(query, *(buffer[:, :, :length_k].clone() for buffer in buffers))
    for buffer in buffers:
        buffer[:, :, length_k:] = poison
    assert torch.equal(kittens_torch.attention(query, *(buffer[:, :, :length_k] for buffer in buffers)), clean)


@usual_place
@pytest.mark.parametrize(
    ("length_q", "length_k", "causal", "window", "hidden"),
    [
        (70, 200, "upper_left", None, slice(70, None)),  # right of every row
        (70, 200, "lower_right", (20, None), slice(0, 110)),  # left of every row
        (70, 200, None, (20, 0), slice(0, 110)),
        (64, 300, None, (30, None), slice(0, 206)),
    ],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_that_no_row_sees_are_never_used(
    device: str,
    dtype: torch.dtype,
    length_q: int,
    length_k: int,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
    hidden: slice,
    poison: float,
) -> None:
    query, key, value = inputs(device, dtype, length_q=length_q, length_k=length_k)
    clean, _ = check_forward(query, key, value, causal=causal, window=window)
    key[:, :, hidden] = poison
    value[:, :, hidden] = poison
    assert torch.equal(kittens_torch.attention(query, key, value, causal=causal, window=window), clean)


@usual_place
def test_nan_that_is_visible_propagates(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=130, length_k=140)
    query[0, 0, 77, 3] = float("nan")
    output, logsumexp = kittens_torch.attention(query, key, value, return_lse=True)
    bad = torch.zeros(1, 2, 130, dtype=torch.bool, device=device)
    bad[0, 0, 77] = True
    assert torch.equal(output.isnan().all(-1), bad) and torch.equal(output.isnan().any(-1), bad)
    assert torch.equal(logsumexp.isnan(), bad)
    key[0, 1, 139, 0] = float("nan")
    assert kittens_torch.attention(query, key, value)[0, 1].isnan().all()


@places(torch.float32, torch.bfloat16)
def test_large_logits(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=100, length_k=300, head_dim=64)
    output = kittens_torch.attention(query * 30, key * 30, value)
    exact, _ = kittens_torch.reference.attention((query * 30).double(), (key * 30).double(), value.double())
    assert (output.double() - exact).abs().mean() < 2e-2  # near one-hot rows; ties round differently
    for position in (0, 150, 299):  # one huge key anywhere
        spike = key.clone()
        spike[:, :, position] = query[:, :, :1].squeeze(2) * 100
        check = kittens_torch.attention(query, spike, value)
        assert torch.isfinite(check).all()
        assert torch.allclose(check[:, :, 0], value[:, :, position], atol=1e-2)


@pytest.mark.parametrize("device", ["cpu"])
def test_bitwise_repeats(device: str) -> None:
    tensors = inputs(device, torch.float32, batch=2, heads=4, length_q=300, head_dim=64)
    first = kittens_torch.attention(*tensors, causal="upper_left", return_lse=True)
    for _ in range(20):
        again = kittens_torch.attention(*tensors, causal="upper_left", return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", CORNERS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_thousand_bitwise_repeats(causal: str | None, head_dim: int) -> None:
    tensors = inputs("cuda", torch.bfloat16, batch=2, heads=16, heads_k=4, length_q=1999, head_dim=head_dim)
    output, logsumexp = kittens_torch.attention(*tensors, causal=causal, return_lse=True)
    for _ in range(1000):
        again, again_logsumexp = kittens_torch.attention(*tensors, causal=causal, return_lse=True)
        assert torch.equal(again, output) and torch.equal(again_logsumexp, logsumexp)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_to_the_31_elements() -> None:
    batch, heads, length, head_dim = 9, 32, 65536, 128  # 2.4e9 elements each, 4.5 GiB
    shape = (batch, heads, length, head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    # A narrow window keeps the work small; every element is still addressed.
    output, logsumexp = kittens_torch.attention(query, key, value, window=(64, 0), return_lse=True)
    for entry, head in ((0, 0), (7, 31), (8, 0), (8, 31)):
        single = [tensor[entry : entry + 1, head : head + 1] for tensor in (query, key, value)]
        alone, alone_logsumexp = kittens_torch.attention(
            *(tensor.clone() for tensor in single), window=(64, 0), return_lse=True
        )
        assert torch.equal(output[entry, head], alone[0, 0])
        assert torch.equal(logsumexp[entry, head], alone_logsumexp[0, 0])
        tail = [tensor[:, :, -512:] for tensor in single]
        exact, _ = kittens_torch.reference.attention(*(tensor.double() for tensor in tail), window=(64, 0))
        assert (output[entry, head, -256:].double() - exact[0, 0, -256:]).abs().max() < 2e-2


@pytest.mark.gpu
def test_cuda_graph() -> None:
    tensors = inputs("cuda", torch.float16, batch=2, heads=12, length_q=512, head_dim=64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kittens_torch.attention(*tensors, causal="upper_left")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, logsumexp = kittens_torch.attention(*tensors, causal="upper_left", return_lse=True)
    for _ in range(3):
        for tensor in tensors:
            tensor.normal_()
        graph.replay()
        eager, eager_logsumexp = kittens_torch.attention(*tensors, causal="upper_left", return_lse=True)
        assert torch.equal(output, eager) and torch.equal(logsumexp, eager_logsumexp)
    allocated = torch.cuda.memory_allocated()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated


@pytest.mark.gpu
def test_no_synchronisation() -> None:
    tensors = inputs("cuda", torch.bfloat16, length_q=300)
    kittens_torch.attention(*tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kittens_torch.attention(*tensors, causal="lower_right")
    finally:
        torch.cuda.set_sync_debug_mode("default")
