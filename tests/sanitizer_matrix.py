"""A small matrix of every GPU configuration, to be run under NVIDIA's compute-sanitizer.

    make sanitize                     memcheck, then racecheck
    compute-sanitizer --tool memcheck python tests/sanitizer_matrix.py

Results are checked against float64 as well. Exit status 1: a wrong number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

import kittens_torch
from kittens_torch import reference

# (head_dim, value_dim, configurations of the sm90 table that take them)
CLASSES = ((64, 64, (0,)), (96, 96, (1,)), (128, 128, (2, 3)), (192, 128, (4,)), (192, 192, (5,)), (256, 256, (6, 7)))
LENGTHS = ((130, 130), (64, 200), (257, 97))
MASKS = ((0, -1, -1), (2, -1, -1), (0, 40, 10))  # corner, window left, window right


def visible(length_q: int, length_k: int, corner: int, left: int, right: int) -> torch.Tensor:
    offset = length_k - length_q
    distance = torch.arange(length_k, device="cuda") - torch.arange(length_q, device="cuda").unsqueeze(1) - offset
    seen = torch.ones_like(distance, dtype=torch.bool)
    if corner:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def wrong_calls() -> Iterator[str]:
    forward = torch.ops.kittens_torch.forward.default
    for head_dim, value_dim, configurations in CLASSES:
        for length_q, length_k in LENGTHS:
            query = torch.randn(1, 2, length_q, head_dim, device="cuda", dtype=torch.bfloat16)
            key = torch.randn(1, 1, length_k, head_dim, device="cuda", dtype=torch.bfloat16)
            value = torch.randn(1, 1, length_k, value_dim, device="cuda", dtype=torch.bfloat16)
            for mask in MASKS:
                scores = query.double() @ key.double().mT * head_dim**-0.5
                scores.masked_fill_(~visible(length_q, length_k, *mask), float("-inf"))
                exact = scores.softmax(-1).nan_to_num() @ value.double()
                for configuration in configurations:
                    output, _ = forward(query, key, value, head_dim**-0.5, *mask, configuration)
                    error = (output - exact).abs().max().item()
                    if not error < 3e-2:
                        shape = f"{length_q} x {length_k}, head dims {head_dim} and {value_dim}"
                        yield f"{shape}, mask {mask}, configuration {configuration}: off by {error}"


def wrong_modified_calls() -> Iterator[str]:
    """Masks and biases of every kind of alignment, at the edges of their memory."""
    for head_dim in (64, 128, 256):
        for length_q, length_k in LENGTHS:
            query, key, value = (
                torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
                for heads, length in ((2, length_q), (1, length_k), (1, length_k))
            )
            mask = torch.rand(1, 2, length_q, length_k, device="cuda") > 0.3
            bias = torch.randn(1, 2, length_q, length_k, device="cuda")
            for given in (
                {"mask": mask, "bias": bias.bfloat16()},
                {"mask": mask.mT.contiguous().mT, "bias": bias.mT.contiguous().mT, "causal": "lower_right"},
                {"mask": mask[:, :, :1], "softcap": 5.0, "sinks": torch.randn(2, device="cuda")},
                {
                    "key_lengths": torch.tensor([length_k // 2], device="cuda"),
                    "alibi_slopes": torch.rand(2, device="cuda"),
                },
            ):
                exact, _ = reference.attention(query.double(), key.double(), value.double(), **given)
                error = (kittens_torch.attention(query, key, value, **given) - exact).abs().max().item()
                if not error < 3e-2:
                    yield f"{length_q} x {length_k}, head dim {head_dim}, {', '.join(given)}: off by {error}"
            dropped = kittens_torch.attention(query, key, value, mask=mask, dropout_p=0.5)
            if not torch.isfinite(dropped).all():
                yield f"{length_q} x {length_k}, head dim {head_dim}, dropout: not finite"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("sanitizer_matrix: needs a GPU of compute capability 9.0")
    torch.manual_seed(0)
    wrong = [*wrong_calls(), *wrong_modified_calls()]
    for text in wrong:
        print("wrong:", text)
    print(f"{kittens_torch.__name__}: {len(wrong)} wrong results")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
