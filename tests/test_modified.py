"""What modifies scores beyond a scale and a key interval: masks, biases, key lengths, soft cap, ALiBi, sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_forward, check_result, every_place, inputs, masks_classified, normal, places, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import attention, dispatch, modified, ops, reference

INF = float("inf")


def options(device: str, dtype: torch.dtype, batch: int, heads: int, length_q: int, length_k: int) -> dict[str, Any]:
    """One value of each option, by its name."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "mask": torch.rand(batch, heads, length_q, length_k, device=device) > 0.4,
        "bias": normal(batch, heads, length_q, length_k, device=device, dtype=real),
        "key_lengths": torch.randint(0, length_k + 2, (batch,), device=device, dtype=torch.int32),
        "softcap": 1.5,
        "alibi_slopes": torch.rand(heads, device=device).to(real) / 10,
        "sinks": normal(heads, device=device, dtype=real),
    }


OPTIONS = tuple(options("cpu", torch.float32, 1, 1, 1, 1))
# A mask of attention's own arguments beside them.
INTERVALS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": "lower_right"},
    {"window": (40, 5)},
    {"causal": "upper_left", "window": (100, None)},
)


@every_place
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (130, 193), (200, 77), (1, 300)], ids=str)
def test_each_option_alone(device: str, dtype: torch.dtype, name: str, lengths: tuple[int, int]) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=lengths[0], length_k=lengths[1])
    check_forward(query, key, value, **{name: options(device, dtype, 2, 4, *lengths)[name]})


@every_place
@pytest.mark.parametrize("interval", INTERVALS, ids=str)
@pytest.mark.parametrize("lengths", [(130, 193), (193, 130)], ids=str)
def test_all_options_together(
    device: str, dtype: torch.dtype, interval: dict[str, Any], lengths: tuple[int, int]
) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=6, heads_k=2, length_q=lengths[0], length_k=lengths[1])
    check_forward(query, key, value, **options(device, dtype, 2, 6, *lengths), **interval)


@usual_place
@pytest.mark.parametrize("dims", [(8, 8), (64, 80), (100, 128), (136, 40), (256, 256)], ids=str)
def test_head_dims(device: str, dtype: torch.dtype, dims: tuple[int, int]) -> None:
    query, key, value = inputs(device, dtype, heads=2, length_q=150, length_k=200, head_dim=dims[0], value_dim=dims[1])
    given = options(device, dtype, 1, 2, 150, 200)
    check_forward(query, key, value, causal="lower_right", **given)
    check_forward(query, key, value, mask=given["mask"])


BROADCASTS = [
    (length, height, width, depth) for length in (1, 2) for height in (1, 4) for width in (1, 130) for depth in (1, 193)
]


@places(torch.float32)
@pytest.mark.parametrize("shape", [*BROADCASTS, (4, 1, 1), (130, 193), (1, 193), (193,), ()], ids=str)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_shapes_that_broadcast(device: str, dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=130, length_k=193)
    given = torch.rand(shape, device=device) > 0.3 if name == "mask" else normal(*shape, device=device)
    check_forward(query, key, value, **{name: given})


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another place and order."""
    if layout == "transposed":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "reversed dims":
        return tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "sliced":
        wide = tensor.new_zeros(*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3] * 2 + 5)
        view = wide[:, :, 1 : 1 + tensor.shape[2], 3 : 3 + 2 * tensor.shape[3] : 2]
        return view.copy_(tensor)
    odd = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)[1:].view(tensor.shape)
    return odd.copy_(tensor)


@usual_place
@pytest.mark.parametrize("layout", ["transposed", "reversed dims", "sliced", "misaligned"])
@pytest.mark.parametrize("length_k", [192, 193])
def test_strides_and_alignment(device: str, dtype: torch.dtype, layout: str, length_k: int) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=2, length_q=100, length_k=length_k)
    mask = torch.rand(2, 2, 100, length_k, device=device) > 0.4
    for bias in (normal(2, 2, 100, length_k, device=device), normal(2, 2, 100, length_k, device=device, dtype=dtype)):
        expected = attention(query, key, value, mask=mask, bias=bias)
        moved = {"mask": laid_out(mask, layout), "bias": laid_out(bias, layout)}
        assert torch.equal(attention(query, key, value, **moved), expected)
    check_forward(query, key, value, mask=laid_out(mask, layout), bias=laid_out(bias, layout))


@usual_place
def test_expanded_modifiers_are_as_their_copies(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=70, length_k=90)
    mask, bias = torch.rand(2, 1, 1, 90, device=device) > 0.4, normal(1, 4, 70, 1, device=device)
    slopes = torch.rand(4, device=device)
    whole = attention(
        query,
        key,
        value,
        mask=mask.expand(2, 4, 70, 90).contiguous(),
        bias=bias.expand(2, 4, 70, 90).contiguous(),
        alibi_slopes=slopes.expand(2, 4).contiguous(),
    )
    expanded = {"mask": mask.expand(2, 4, 70, 90), "bias": bias.expand(2, 4, 70, 90)}
    assert torch.equal(attention(query, key, value, **expanded, alibi_slopes=slopes.expand(2, 4)), whole)
    assert torch.equal(attention(query, key, value, mask=mask, bias=bias, alibi_slopes=slopes), whole)
    strided = torch.stack([slopes, slopes], 1)[:, 0]
    assert torch.equal(attention(query, key, value, mask=mask, bias=bias, alibi_slopes=strided), whole)


# Rows that see nothing, numbers at the ends of their range


@every_place
def test_rows_without_a_visible_key(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=2, length_q=130, length_k=150)
    mask = torch.rand(2, 2, 130, 150, device=device) > 0.5
    mask[0, :, 3:70] = False
    mask[1, 1] = False
    check_forward(query, key, value, mask=mask)
    check_forward(query, key, value, bias=torch.zeros(mask.shape, device=device, dtype=dtype).masked_fill(~mask, -INF))
    lengths = torch.tensor([0, 150], device=device)
    _, logsumexp = check_forward(query, key, value, key_lengths=lengths)
    assert (logsumexp[0] == -INF).all()
    sinks = normal(2, device=device).to(torch.float64 if dtype == torch.float64 else torch.float32)
    output, logsumexp = check_forward(query, key, value, key_lengths=lengths, sinks=sinks)
    assert not output[0].any()
    torch.testing.assert_close(logsumexp[0], sinks[:, None].expand(2, 130))


@every_place
def test_the_most_negative_number_does_not_hide(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=70, length_k=200)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    for of_bias in {dtype, real}:
        least = torch.finfo(of_bias).min
        bias = torch.zeros(1, 1, 70, 200, device=device, dtype=of_bias)
        bias[..., 3:40, :] = least  # every key of the row: a uniform average
        bias[..., 50:, 100:] = least
        output = attention(query, key, value, bias=bias)
        if of_bias != torch.float16:  # whose least number leaves the scores some weight
            mean = value.double().mean(2, keepdim=True).expand(-1, -1, 37, -1)
            torch.testing.assert_close(output[:, :, 3:40].double(), mean, atol=1e-2, rtol=1e-2)
        check_forward(query[:, :, 50:], key, value, bias=bias[:, :, 50:])
        assert torch.isfinite(output).all()


@every_place
def test_infinite_and_invalid_bias(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, heads=1, length_q=80, length_k=200)
    for wrong in (float("nan"), INF):
        bias = torch.zeros(1, 1, 80, 200, device=device, dtype=dtype)
        bias[..., 7, 130] = wrong
        bias[..., 9, 11] = wrong
        output = attention(query, key, value, bias=bias)
        bad = torch.zeros(80, dtype=torch.bool, device=device)
        bad[[7, 9]] = True
        assert torch.isnan(output[0, 0, bad]).all() and torch.isfinite(output[0, 0, ~bad]).all()
        # Hidden, it is nothing.
        mask = bias[0, 0] == 0
        check_forward(query, key, value, mask=mask, bias=bias.masked_fill(~mask, 0.0))
        assert torch.equal(
            attention(query, key, value, mask=mask, bias=bias),
            attention(query, key, value, mask=mask, bias=bias.masked_fill(~mask, 0.0)),
        )


@every_place
@pytest.mark.parametrize("wrong", [float("nan"), INF])
def test_what_is_under_hidden_keys_never_reaches_a_result(device: str, dtype: torch.dtype, wrong: float) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=140, length_k=300)
    hidden = torch.zeros(2, 300, dtype=torch.bool, device=device)
    hidden[0, [0, 5, 64, 131, 299]] = True
    hidden[1, 130:] = True
    by_mask = torch.rand(2, 1, 140, 300, device=device) > 0.3
    ways: list[dict[str, Any]] = [
        {"mask": ~hidden[:, None, None]},
        {"mask": by_mask & ~hidden[:, None, None]},
        {"mask": ~hidden[:, None, None], "causal": "lower_right", "softcap": 2.0},
    ]
    for keywords in ways:
        expected = attention(query, key, value, **keywords)
        poisoned_key, poisoned_value = key.clone(), value.clone()
        poisoned_key.transpose(1, 2)[hidden] = wrong
        poisoned_value.transpose(1, 2)[hidden] = wrong
        assert torch.isfinite(expected).all()
        assert torch.equal(attention(query, poisoned_key, poisoned_value, **keywords), expected)
    lengths = torch.tensor([130, 7], device=device)
    poisoned_key, poisoned_value = key.clone(), value.clone()
    for batch, length in enumerate(lengths.tolist()):
        poisoned_key[batch, :, length:] = wrong
        poisoned_value[batch, :, length:] = wrong
    for more in ({}, {"causal": "lower_right"}, {"window": (30, 0)}):
        assert torch.equal(
            attention(query, poisoned_key, poisoned_value, key_lengths=lengths, **more),
            attention(query, key, value, key_lengths=lengths, **more),
        )
    # Keys before a window's first one, and between the two.
    late = query[:, :, :3]
    poisoned_value = value.clone()
    poisoned_value[:, :, :287] = wrong
    assert torch.isfinite(attention(late, key, poisoned_value, window=(10, 0), softcap=3.0)).all()


# Masks made of tiles


@usual_place
@pytest.mark.parametrize("heads_of_mask", [1, 2])
def test_masks_with_empty_and_full_tiles(device: str, dtype: torch.dtype, heads_of_mask: int) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=2, length_q=330, length_k=520)
    tiles = torch.randint(0, 3, (2, heads_of_mask, 6, 9), device=device)
    random = torch.rand(2, heads_of_mask, 330, 520, device=device) > 0.5
    large = tiles.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :330, :520]
    mask = (large == 2) | ((large == 1) & random)
    mask[0, :, 64:192] = False  # rows of tiles without any
    check_forward(query, key, value, mask=mask)
    check_forward(query, key, value, mask=mask, causal="lower_right", window=(200, None))
    check_forward(query, key, value, mask=mask, bias=normal(330, 520, device=device), softcap=5.0)


@usual_place
def test_documents_as_a_mask(device: str, dtype: torch.dtype) -> None:
    """Bool block-diagonal and causal: what a packed batch has."""
    document = torch.arange(700, device=device) // 190
    mask = document[:, None] == document
    query, key, value = inputs(device, dtype, length_q=700)
    output, _ = check_forward(query, key, value, mask=mask & torch.ones_like(mask).tril())
    pieces = [[t[:, :, start : start + 190] for t in (query, key, value)] for start in range(0, 700, 190)]
    apart = [attention(*piece, causal="upper_left") for piece in pieces]
    assert_close(output, torch.cat(apart, 2))
    output, _ = check_forward(query, key, value, mask=mask, causal="lower_right")
    assert_close(output, torch.cat(apart, 2))


def assert_close(ours: Tensor, expected: Tensor) -> None:
    tolerance = 2e-2 if ours.dtype in (torch.bfloat16, torch.float16) else 2e-5
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@usual_place
def test_every_key_interval_as_a_mask(device: str, dtype: torch.dtype) -> None:
    """The same keys by three ways: the interval of the arguments, a bool mask, an additive one."""
    for length_q, length_k in ((70, 130), (130, 70)):
        query, key, value = inputs(device, dtype, length_q=length_q, length_k=length_k)
        for interval in INTERVALS:
            expected = attention(query, key, value, **interval)
            mask = reference.visible_keys(length_q, length_k, **interval, device=device)
            assert_close(attention(query, key, value, mask=mask), expected)
            additive = torch.zeros(mask.shape, device=device).masked_fill(~mask, -INF)
            assert_close(attention(query, key, value, bias=additive), expected)


# One option against the others


@usual_place
def test_options_that_do_nothing(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=130, length_k=130)
    expected, of_rows = attention(query, key, value, causal="lower_right", return_lse=True)
    nothing: dict[str, Any] = {
        "mask": torch.ones((), dtype=torch.bool, device=device),
        "bias": torch.zeros(1, device=device),
        "key_lengths": torch.tensor([130], device=device),
        "softcap": 1e5,
        "alibi_slopes": torch.zeros(2, device=device),
        "sinks": torch.full((2,), -INF, device=device),
    }
    for names in (*([name] for name in nothing), list(nothing)):
        keywords = {name: nothing[name] for name in names}
        output, logsumexp = attention(query, key, value, causal="lower_right", return_lse=True, **keywords)
        assert_close(output, expected)
        torch.testing.assert_close(logsumexp, of_rows, atol=1e-4, rtol=1e-4)


@usual_place
def test_alibi_is_a_bias(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=90, length_k=150)
    slopes = torch.rand(2, 4, device=device)
    row, column = torch.arange(90, device=device)[:, None], torch.arange(150, device=device)
    bias = -slopes[:, :, None, None] * (row + 60 - column).abs()
    assert_close(
        attention(query, key, value, alibi_slopes=slopes, causal="lower_right"),
        attention(query, key, value, bias=bias, causal="lower_right"),
    )
    check_forward(query, key, value, alibi_slopes=slopes)


@every_place
@pytest.mark.parametrize("softcap", [0.3, 5.0, 50.0, 1e4])
@pytest.mark.parametrize("scale", [None, 0.0, -0.4, 3.0])
def test_soft_cap(device: str, dtype: torch.dtype, softcap: float, scale: float | None) -> None:
    query, key, value = inputs(device, dtype, length_q=70, length_k=140)
    check_forward(query, key, value, softcap=softcap, scale=scale, causal="lower_right")


@usual_place
def test_soft_caps_beyond_the_numbers_of_a_kernel(device: str, dtype: torch.dtype) -> None:
    """One that no score comes near caps nothing; one that every score is far beyond leaves the signs alone, of 0."""
    query, key, value = inputs(device, dtype, batch=1, length_q=9, length_k=70)
    for cap in (1e25, 1e300):
        assert torch.equal(attention(query, key, value, softcap=cap), attention(query, key, value))
    alike = value.float().mean(2, keepdim=True).to(dtype).expand(1, 2, 9, 64)
    for cap in (1e-12, 1e-60, 5e-324):
        torch.testing.assert_close(attention(query, key, value, softcap=cap), alike, atol=1e-2, rtol=1e-2)


@every_place
def test_sinks(device: str, dtype: torch.dtype) -> None:
    """The formula, small and large sinks, and the logsumexp that counts them."""
    query, key, value = inputs(device, dtype, heads=4, length_q=130, length_k=200)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    sinks = torch.tensor([-INF, -80.0, 3.0, 60.0], device=device, dtype=real)
    output, logsumexp = check_forward(query, key, value, sinks=sinks, causal="lower_right")
    plain, of_rows = attention(query, key, value, causal="lower_right", return_lse=True)
    torch.testing.assert_close(logsumexp, torch.logaddexp(of_rows, sinks[:, None].expand(4, 130)), atol=1e-4, rtol=1e-4)
    share = torch.exp(of_rows - logsumexp).unsqueeze(-1).to(dtype)
    assert_close(output, plain * share)


@usual_place
def test_no_keys_and_no_queries(device: str, dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0], device=device)
    for batch, length_q, length_k in ((2, 3, 0), (2, 0, 3), (0, 3, 3)):
        query, key, value = inputs(device, dtype, batch=batch, heads=2, length_q=length_q, length_k=length_k)
        mask = torch.ones(batch, 1, length_q, length_k, dtype=torch.bool, device=device)
        output, logsumexp = attention(query, key, value, mask=mask, sinks=sinks, return_lse=True)
        assert output.shape == query.shape and not output.any()
        expected = sinks.view(1, 2, 1).expand(batch, 2, length_q)
        assert torch.equal(logsumexp, expected if length_k == 0 else expected[:, :, :0] if length_q == 0 else expected)
        _, logsumexp = attention(query, key, value, mask=mask, return_lse=True)
        assert (logsumexp == -INF).all()


# Where it runs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 128, 200])
def test_checked_machine(seed: int, dtype: torch.dtype, head_dim: int) -> None:
    query, key, value = inputs("cpu", dtype, batch=2, heads=4, heads_k=2, length_q=150, length_k=260, head_dim=head_dim)
    given = options("cpu", dtype, 2, 4, 150, 260)
    hidden = torch.rand(2, 1, 1, 260) > 0.9
    with kittens_torch.checked_machine(seed=seed):
        check_forward(query, key, value, **given, causal="lower_right")
        check_forward(query, key, value, mask=~hidden, window=(70, 3))
        check_forward(query, key, value, key_lengths=torch.tensor([3, 200]), dropout_p=0.0)


@pytest.mark.parametrize("machine", ["cpu", "checked"])
def test_every_row_of_the_table(machine: str) -> None:
    query, key, value = inputs("cpu", torch.bfloat16, heads=2, length_q=140, length_k=330, head_dim=24)
    mask = torch.rand(1, 2, 140, 330) > 0.4
    rows, without = 0, []
    softcap = 4.0
    while rows < 100:
        settings = (24**-0.5, 2, -1, -1, mask, None, None, None, None, None, 0.0, softcap, rows)
        try:
            if machine == "cpu":
                output, logsumexp = ops.forward_modified(query, key, value, *settings)
            else:
                output, logsumexp = ops.checked_forward_modified(query, key, value, *settings, 1)
        except RuntimeError as error:
            if "no soft cap" in str(error) and softcap != 0.0:
                without.append(rows)
                softcap = 0.0
                continue
            assert "no such row" in str(error)
            break
        check_result(output, logsumexp, query, key, value, causal="lower_right", mask=mask, softcap=softcap)
        rows, softcap = rows + 1, 4.0
    assert (rows, without) == ((3, []) if machine == "cpu" else (4, [1]))
    if dispatch.has_plan():
        assert rows == len(dispatch._plan.configurations("cpu" if machine == "cpu" else "sm90", True))


@usual_place
def test_the_same_bits_at_every_run(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=300, length_k=400)
    given = options(device, dtype, 2, 4, 300, 400)
    first = attention(query, key, value, **given, return_lse=True)
    for _ in range(3):
        again = attention(query, key, value, **given, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@usual_place
def test_the_drop_in(device: str, dtype: torch.dtype, only_ours: None) -> None:
    """Bool and float masks of every rank that torch takes."""
    query, key, value = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=70, length_k=100)
    calls = [
        ((2, 4, 70, 100), (query, key, value)),
        ((70, 100), (query, key, value)),
        ((4, 70, 100), (query[0], key[0].repeat_interleave(2, 0), value[0].repeat_interleave(2, 0))),
        ((1, 100), (query[0, 0], key[0, 0], value[0, 0])),
        ((3, 1, 1, 1, 100), tuple(t.expand(3, *t.shape) for t in (query, key, value))),
        ((1, 1, 4, 70, 100), tuple(t.expand(3, *t.shape) for t in (query, key, value))),
    ]
    for shape, (q, k, v) in calls:
        grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
        for mask in (torch.rand(shape, device=device) > 0.4, normal(*shape, device=device, dtype=dtype)):
            ours = kittens_torch.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
            exact_mask = mask if mask.dtype == torch.bool else mask.double()
            exact = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), v.double(), exact_mask, enable_gqa=grouped
            )
            assert ours.shape == exact.shape
            assert_close(ours, exact.to(dtype))


def test_result_is_checked() -> None:
    """The check itself: a wrong result does not pass."""
    query, key, value = inputs("cpu", torch.float32)
    output, logsumexp = attention(query, key, value, softcap=2.0, return_lse=True)
    with pytest.raises(AssertionError):
        check_result(output, logsumexp, query, key, value, softcap=2.1)


# What is remembered of masks


@usual_place
def test_a_mask_that_comes_again_and_one_that_has_changed(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = inputs(device, dtype, length_q=300, length_k=400)
    calls = masks_classified(monkeypatch)
    masks = torch.rand(2, 300, 400, device=device) > 0.5

    def runs(mask: Tensor, times: int, **interval: Any) -> None:
        before = len(calls)
        check_forward(query, key, value, mask=mask, **interval)
        assert len(calls) - before == times

    runs(masks[0], 1)
    runs(masks[0], 0)  # another view of the same
    runs(masks[1], 1)
    runs(masks[0], 0)
    runs(masks[0], 1, causal="lower_right")  # other keys are unseen
    masks[0, :, :200] = False  # in place
    runs(masks[0], 1)
    runs(masks[0], 0)
    masks.data[0, :, 200:] = True  # which torch does not count, and then is told of
    masks.bitwise_or_(False)
    runs(masks[0], 1)
    runs(masks[0].clone(), 1)
    for _ in range(20):  # memory that is used again, and no more is remembered than so many
        runs(torch.rand(300, 400, device=device) > 0.3, 1)
    assert len(modified._known) == modified.REMEMBERED
    runs(masks[0], 1)
    small = torch.rand(1, 1, 1, 400, device=device) > 0.5
    runs(small, 0)
