"""Dropout: the generator and its layout (dropout.h), the weights that are dropped, and what comes of them."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from dropout_rule import kept, philox, share_dropped
from helpers import assert_accurate, doubles, inputs, places, usual_place
from torch import Tensor

import kittens_torch
from kittens_torch import attention, ops, reference

ROOT = Path(__file__).resolve().parent.parent
CXX = shlex.split(os.environ.get("CXX", "g++"))


def test_the_generator_of_the_tests_is_philox() -> None:
    """The known answers that its authors publish, for seven rounds and for ten."""
    digits_of_pi = (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    for key, counter, rounds, answer in (
        (0, (0, 0, 0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (2**64 - 1, (2**32 - 1,) * 4, 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (*digits_of_pi, 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
        (0, (0, 0, 0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (2**32 - 1,) * 4, 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (*digits_of_pi, 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        found = philox(key, *(numpy.uint64(part) for part in counter), rounds=rounds)
        assert tuple(int(word) for word in found) == answer


HOST = """
#include "attention/dropout.h"
using namespace kittens_torch;
extern "C" void kept(uint64_t seed, uint32_t offset, uint32_t threshold, int planes, int rows, int columns,
                     unsigned char* out) {
  for (int plane = 0; plane < planes; plane++)
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < columns; column++)
        *out++ = dropout_rule(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), offset,
                              static_cast<uint32_t>(plane), threshold).kept(row, column);
}
extern "C" uint32_t threshold_of(double p) { return dropout_threshold(p); }
extern "C" double scale_of(uint32_t threshold) { return dropout_keep_scale(threshold); }
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which(CXX[0]) is None:
        pytest.skip(f"no C++ compiler: {CXX[0]} is not found")
    folder = tmp_path_factory.mktemp("dropout")
    (folder / "host.cpp").write_text(HOST)
    command = [*CXX, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}", str(folder / "host.cpp")]
    subprocess.run([*command, "-o", str(folder / "host.so")], check=True)
    library = ctypes.CDLL(str(folder / "host.so"))
    library.threshold_of.argtypes, library.threshold_of.restype = [ctypes.c_double], ctypes.c_uint32
    library.scale_of.restype = ctypes.c_double
    return library


@pytest.mark.parametrize("state", [(0, 0), (1, 2), (-5, 2**40 + 3), (2**62 + 12345, -1)], ids=str)
@pytest.mark.parametrize("p", [0.0, 1e-5, 0.1, 0.5, 0.999999])
def test_the_rule_exhaustively(host: ctypes.CDLL, state: tuple[int, int], p: float) -> None:
    planes, rows, columns = 3, 70, 140
    out = torch.zeros(planes, rows, columns, dtype=torch.uint8)
    seed, offset = ctypes.c_uint64(state[0] & (2**64 - 1)), ctypes.c_uint32(state[1] & 0xFFFFFFFF)
    host.kept(seed, offset, host.threshold_of(p), planes, rows, columns, ctypes.c_void_p(out.data_ptr()))
    assert torch.equal(out.bool(), kept(torch.tensor(state), p, 1, planes, rows, columns)[0])


def test_threshold_and_scale(host: ctypes.CDLL) -> None:
    for p in (0.0, 1e-9, 0.1, 0.25, 0.5, 0.9, 0.99999, 1 - 1e-12):
        threshold = host.threshold_of(p)
        assert threshold == min(int(p * 32768 + 0.5), 32767)
        assert host.scale_of(threshold) == 32768 / (32768 - threshold)


# The kernels


def recovered(query: Tensor, key: Tensor, state: Tensor, p: float, run: object = None) -> Tensor:
    """Which weights a kernel keeps: weights are uniform, and values tell 64 keys at a time apart."""
    batch, heads, length_k = query.shape[0], query.shape[1], key.shape[2]
    parts = []
    for first in range(0, length_k, 64):
        value = torch.zeros(batch, key.shape[1], length_k, 64, dtype=query.dtype, device=query.device)
        for column in range(first, min(first + 64, length_k)):
            value[:, :, column, column - first] = 1
        settings = (1.0, 0, -1, -1, None, None, None, None, None, state, p, 0.0)
        output, _ = (run or ops.forward_modified)(query * 0, key, value, *settings)  # type: ignore[operator]
        assert output.shape[:2] == (batch, heads)
        parts.append(output != 0)
    return torch.cat(parts, -1)[..., :length_k]


@places(torch.float32, torch.bfloat16, torch.float64)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kernels_drop_what_the_rule_says(device: str, dtype: torch.dtype, p: float) -> None:
    state = torch.tensor([123456789012345678, 987654321], device=device)
    query, key, _ = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=150, length_k=333)
    mine = recovered(query, key, state, p)
    assert torch.equal(mine.cpu(), kept(state.cpu(), p, 2, 4, 150, 333))
    # The rate, and its independence of the place: heads, rows and columns each have it.
    assert abs(mine.double().mean().item() - (1 - p)) < 0.005
    for dim in (0, 1, 2, 3):
        others = [d for d in range(4) if d != dim]
        assert (mine.double().mean(others) - (1 - p)).abs().max() < (0.06 if dim > 1 else 0.02)
    pairs = mine.double() - mine.double().mean()
    of_keys = [(pairs[..., step:], pairs[..., :-step]) for step in (1, 8)]
    for a, b in ((pairs[0], pairs[1]), (pairs[:, 0], pairs[:, 1]), *of_keys):
        assert abs((a * b).mean() / (p * (1 - p))) < 0.02


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_the_same_weights_from_every_configuration(head_dim: int) -> None:
    state = torch.tensor([7, 8])
    query, key, _ = inputs("cpu", torch.bfloat16, heads=2, length_q=140, length_k=200, head_dim=head_dim)
    expected = kept(state, 0.3, 1, 2, 140, 200)
    ran = 0
    for configuration in range(4):
        runs = (
            lambda *operands, c=configuration: ops.forward_modified(*operands, c),
            lambda *operands, c=configuration: ops.checked_forward_modified(*operands, c, 5),
        )
        for run in runs:
            try:
                mine = recovered(query, key, state, 0.3, run)
            except RuntimeError as error:
                assert "smaller head dim" in str(error) or "no such row" in str(error)
                continue
            ran += 1
            assert torch.equal(mine, expected)
    assert ran >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_same_weights_on_the_gpu(head_dim: int) -> None:
    state = torch.tensor([7, 8], device="cuda")
    query, key, _ = inputs("cuda", torch.bfloat16, heads=2, length_q=140, length_k=200, head_dim=head_dim)
    assert torch.equal(recovered(query, key, state, 0.3).cpu(), kept(state.cpu(), 0.3, 1, 2, 140, 200))


@usual_place
@pytest.mark.parametrize("p", [0.05, 0.5])
def test_output_is_that_of_the_kept_weights(device: str, dtype: torch.dtype, p: float) -> None:
    query, key, value = inputs(device, dtype, batch=2, heads=4, heads_k=2, length_q=150, length_k=260)
    mask = torch.rand(2, 1, 150, 260, device=device) > 0.3
    sinks = torch.randn(4, device=device)
    torch.manual_seed(11)
    output, logsumexp = attention(query, key, value, mask=mask, sinks=sinks, dropout_p=p, return_lse=True)
    torch.manual_seed(11)
    state = torch.randint(2**63 - 1, (2,), device=device)
    which = kept(state.cpu(), p, 2, 4, 150, 260).to(device)
    keywords = {"mask": mask, "sinks": sinks, "kept": which, "dropout_p": share_dropped(p)}
    exact, exact_logsumexp = reference.attention(*doubles(query, key, value), **keywords)
    same_formula, _ = reference.attention(query, key, value, **keywords)
    assert_accurate("output", output, exact, same_formula, 2)
    torch.testing.assert_close(logsumexp.double(), exact_logsumexp, atol=1e-3, rtol=0)
    _, without = attention(query, key, value, mask=mask, sinks=sinks, return_lse=True)
    assert torch.equal(logsumexp, without), "the logsumexp knows nothing of dropout"


@usual_place
def test_calls_differ_and_repeat_after_manual_seed(device: str, dtype: torch.dtype, only_ours: None) -> None:
    tensors = inputs(device, dtype, heads=2, length_q=70)
    drop_in = kittens_torch.scaled_dot_product_attention
    for run in (lambda: attention(*tensors, dropout_p=0.5), lambda: drop_in(*tensors, dropout_p=0.5)):
        torch.manual_seed(1)
        first, second = run(), run()
        torch.manual_seed(1)
        assert torch.equal(run(), first) and torch.equal(run(), second)
        assert not torch.equal(first, second)
        heads = first[0, 0] == first[0, 1]
        assert not heads.all()


@usual_place
def test_the_mean_over_calls_is_the_output_without(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, heads=1, length_q=64, length_k=128, head_dim=32)
    total = torch.zeros(query.shape, dtype=torch.float64, device=device)
    calls = 400
    for _ in range(calls):
        total += attention(query, key, value, dropout_p=0.2).double()
    plain = attention(query, key, value).double()
    weights = torch.softmax(query.double() @ key.double().transpose(-1, -2) * 32**-0.5, -1)
    deviation = ((weights**2 @ value.double() ** 2) * 0.2 / 0.8 / calls).sqrt()
    assert ((total / calls - plain) / deviation).abs().max() < 6


@usual_place
def test_p_of_one_and_zero(device: str, dtype: torch.dtype) -> None:
    query, key, value = inputs(device, dtype, length_q=70)
    output, logsumexp = attention(query, key, value, dropout_p=1.0, return_lse=True)
    plain, of_rows = attention(query, key, value, return_lse=True)
    assert not output.any() and output.dtype == dtype and output.stride() == plain.stride()
    torch.testing.assert_close(logsumexp, of_rows, atol=1e-4, rtol=1e-4)
    assert torch.equal(attention(query, key, value, dropout_p=0.0), plain)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="dropout_p"):
            attention(query, key, value, dropout_p=p)


@pytest.mark.gpu
def test_a_captured_call_draws_anew_at_each_replay() -> None:
    tensors = inputs("cuda", torch.bfloat16, length_q=200)
    attention(*tensors, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention(*tensors, dropout_p=0.5)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(output.clone())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
