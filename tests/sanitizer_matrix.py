"""A small matrix of every GPU configuration, to be run under NVIDIA's compute-sanitizer.

    make sanitize                                  every part under memcheck, then racecheck
    compute-sanitizer --tool racecheck python tests/sanitizer_matrix.py backward

Parts are named as the operators: forward, forward_modified, backward, backward_modified; without a name all run. Each
has some 60 launches, which racecheck takes minutes for. Operands and float64 results come from the CPU, so that the
kernels are almost all that runs on the GPU. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 memcheck sees the end of each tensor.
Exit status 1: a wrong number. `--device cpu` runs the same calls, with the CPU's configurations.

On an H200 memcheck finds nothing in any part, and racecheck nothing in forward. In the other three racecheck reports
places (5, 20 and 61) where threads read a vector or a note that travels with a tile, against the arrival of the next.
They have given that stage back: one lane arrives for its warp, behind a __syncwarp, which racecheck seems not to
follow, since what every thread gives back for itself, as the mailbox, is never reported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from dropout_rule import kept, share_dropped
from helpers import CORNERS, assert_accurate, inputs, normal
from torch import Tensor

from kittens_torch import dispatch, reference
from kittens_torch.backward import backward, backward_modified
from kittens_torch.ops import forward, forward_modified

DTYPE = torch.bfloat16
LENGTHS = ((130, 131), (64, 200), (257, 97))  # rows of masks and biases that begin at every alignment, but the second's
INTERVALS = ((0, -1, -1), (2, -1, -1), (0, 40, 10))  # corner, window left, window right


def machine(device: str) -> str:
    return "sm90" if device == "cuda" else "cpu"


def keywords_of(interval: tuple[int, int, int]) -> dict[str, Any]:
    """An interval as the reference takes it."""
    corner, *sides = interval
    return {"causal": CORNERS[corner], "window": tuple(None if side < 0 else side for side in sides)}


def grouped(lengths: tuple[int, int], head_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two heads of queries to one of keys."""
    length_q, length_k = lengths
    shape = {"heads": 2, "heads_k": 1, "length_q": length_q, "length_k": length_k}
    return inputs("cpu", DTYPE, **shape, head_dim=head_dim, value_dim=value_dim)


def on(device: str, *operands: Any) -> list[Any]:
    """The same there; a tensor keeps its strides and what alignment it lacks."""

    def moved(operand: Any) -> Any:
        if not isinstance(operand, Tensor):
            return operand
        storage = operand.new_empty(0).set_(operand.untyped_storage()).to(device)
        return storage.as_strided(operand.shape, operand.stride(), operand.storage_offset())

    return [moved(operand) for operand in operands]


def formula(
    tensors: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    sources: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    keywords: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Output, logsumexp and, with their gradients as `sources`, those of query, key, value and bias."""
    operands = [tensor.to(dtype) for tensor in tensors]
    bias = None if bias is None else bias.to(dtype)
    wanted = [*operands, *([] if bias is None else [bias])]
    if sources is not None:
        for operand in wanted:
            operand.requires_grad_()
    output, logsumexp = reference.attention(*operands, bias=bias, **keywords)
    if sources is None:
        return output, logsumexp
    finite = logsumexp.masked_fill(logsumexp == -float("inf"), 0.0)
    grads = torch.autograd.grad((output, finite), wanted, [source.to(dtype) for source in sources])
    return output.detach(), logsumexp.detach(), *grads


def errors(name: str, ours: tuple[Tensor, ...], exact: tuple[Tensor, ...], plain: tuple[Tensor, ...]) -> Iterator[str]:
    """One text for each result that is not accurate; None among ours was not asked for."""
    for index, (mine, right, same_formula) in enumerate(zip(ours, exact, plain, strict=True)):
        try:
            if mine is not None:
                assert_accurate(f"{name}, result {index}", mine.cpu(), right, same_formula, 3)
        except AssertionError as error:
            yield str(error)


# The kernels without modifiers


def wrong_forward(device: str) -> Iterator[str]:
    """Every configuration by every length, each of them with two of the three intervals."""
    for row, (head_dim, value_dim, *_) in enumerate(dispatch._plan.configurations(machine(device))):
        for index, lengths in enumerate(LENGTHS):
            tensors = grouped(lengths, head_dim, value_dim)
            for interval in (INTERVALS[(row + index) % 3], INTERVALS[(row + index + 1) % 3]):
                output, _ = forward(*on(device, *tensors), head_dim**-0.5, *interval, row)
                exact, plain = (
                    formula(tensors, None, None, dtype, keywords_of(interval))[:1] for dtype in (torch.float64, DTYPE)
                )
                name = f"forward, configuration {row}, {lengths}, {interval}"
                yield from errors(name, (output,), exact, plain)
    for head_dim in (64, 128, 256):  # the plan divides so many keys of so few rows among CTAs
        tensors = grouped((1, 6000), head_dim, head_dim)
        output, _ = forward(*on(device, *tensors), head_dim**-0.5, *INTERVALS[1])
        exact, plain = (formula(tensors, None, None, dtype, {})[:1] for dtype in (torch.float64, DTYPE))
        yield from errors(f"forward, one row, head_dim {head_dim}", (output,), exact, plain)


# Who makes dQ: the kernel that owns keys, where its configuration has sums, in any order or a fixed one, or the one
# that owns queries.
WAYS: tuple[tuple[str, tuple[bool, bool, bool], bool], ...] = (
    ("default", (True, True, True), False),
    ("deterministic", (True, True, True), True),
    ("only dK and dV", (False, True, True), False),
    ("only dQ", (True, False, False), False),
)


def wrong_backward(device: str) -> Iterator[str]:
    """Every configuration in every way, over lengths and intervals in turn."""
    for row, (head_dim, value_dim, *_) in enumerate(dispatch._plan.backward_configurations(machine(device))):
        for index, (way, needed, deterministic) in enumerate(WAYS):
            lengths, interval = LENGTHS[(row + index) % 3], INTERVALS[(row + 2 * index) % 3]
            tensors = grouped(lengths, head_dim, value_dim)
            sources = normal(1, 2, lengths[0], value_dim, dtype=DTYPE), normal(1, 2, lengths[0])
            results = [
                formula(tensors, None, sources, dtype, keywords_of(interval)) for dtype in (torch.float64, DTYPE)
            ]
            (output, logsumexp, *exact), (_, _, *plain) = results
            saved = output.to(DTYPE), logsumexp.float()
            operands = on(device, *sources, *tensors, *saved)
            grads = backward(*operands, head_dim**-0.5, *interval, *needed, deterministic, row)
            ours = tuple(grad if need else None for grad, need in zip(grads, needed, strict=True))
            name = f"backward, configuration {row}, {way}, {lengths}, {interval}"
            yield from errors(name, ours, tuple(exact), tuple(plain))


# Those with modifiers


def cases() -> Iterator[tuple[str, tuple[int, int], tuple[int, int, int], dict[str, Any]]]:
    """(name, lengths, interval, modifiers): masks and biases of every kind of alignment, at the ends of memory."""

    def displaced(tensor: Tensor) -> Tensor:
        return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    length_q, length_k = LENGTHS[2]
    mask, bias = torch.rand(1, 2, length_q, length_k) > 0.3, normal(1, 2, length_q, length_k)
    yield "odd rows", LENGTHS[2], INTERVALS[0], {"mask": displaced(mask), "bias": displaced(bias.to(DTYPE))}
    length_q, length_k = LENGTHS[0]
    mask, bias = torch.rand(1, 2, length_k, length_q) > 0.3, normal(1, 1, length_k, length_q)
    state = torch.tensor([2**40 + 1, 3])
    given = {"mask": mask.mT, "bias": bias.mT, "dropout_state": state, "dropout_p": 0.5}
    yield "transposed, dropout", LENGTHS[0], INTERVALS[1], given
    mask, bias = torch.rand(1, 1, 1, 200) > 0.3, normal(1, 1, 1, 200)
    given = {"mask": mask, "bias": bias, "softcap": 5.0, "sinks": normal(2)}
    yield "one row for all, soft cap, sinks", LENGTHS[1], INTERVALS[0], given
    mask, bias = torch.rand(1, 2, 64, 200) > 0.3, normal(1, 2, 64, 200)
    yield "a bias that copies read", LENGTHS[1], INTERVALS[1], {"mask": mask, "bias": bias.to(DTYPE)}
    given = {"key_lengths": torch.tensor([50], dtype=torch.int32), "alibi_slopes": torch.rand(2)}
    yield "key lengths, ALiBi", LENGTHS[2], INTERVALS[2], given


def modified_keywords(
    lengths: tuple[int, int], interval: tuple[int, int, int], given: dict[str, Any]
) -> dict[str, Any]:
    """The modifiers, but for the bias, as the reference takes them."""
    keywords = {**keywords_of(interval), **given}
    keywords.pop("bias", None)
    if "dropout_p" in given:
        keywords["kept"] = kept(keywords.pop("dropout_state"), given["dropout_p"], 1, 2, *lengths)
        keywords["dropout_p"] = share_dropped(given["dropout_p"])
    return keywords


def modifiers(device: str, given: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """As the ops take them: tensors by their names, the dropout's p and the soft cap."""
    return [*on(device, *(given.get(name) for name in names)), given.get("dropout_p", 0.0), given.get("softcap", 0.0)]


def wrong_forward_modified(device: str) -> Iterator[str]:
    for row, (head_dim, value_dim, *_, takes_softcap) in enumerate(
        dispatch._plan.configurations(machine(device), True)
    ):
        for case, lengths, interval, given in cases():
            if "softcap" in given and not takes_softcap:
                continue
            tensors = grouped(lengths, head_dim, value_dim)
            names = ("mask", "bias", "key_lengths", "alibi_slopes", "sinks", "dropout_state")
            options = modifiers(device, given, names)
            output, _ = forward_modified(*on(device, *tensors), head_dim**-0.5, *interval, *options, row)
            keywords = modified_keywords(lengths, interval, given)
            exact, plain = (
                formula(tensors, given.get("bias"), None, dtype, keywords)[:1] for dtype in (torch.float64, DTYPE)
            )
            yield from errors(f"forward_modified, configuration {row}, {case}", (output,), exact, plain)


def wrong_backward_modified(device: str) -> Iterator[str]:
    """With the bias's gradient wherever there is a bias."""
    for head_dim, value_dim in dict.fromkeys(row[:2] for row in dispatch._plan.configurations(machine(device), True)):
        for case, lengths, interval, given in cases():
            tensors, bias = grouped(lengths, head_dim, value_dim), given.get("bias")
            sources = normal(1, 2, lengths[0], value_dim, dtype=DTYPE), normal(1, 2, lengths[0])
            keywords = modified_keywords(lengths, interval, given)
            results = [formula(tensors, bias, sources, dtype, keywords) for dtype in (torch.float64, DTYPE)]
            (output, logsumexp, *exact), (_, _, *plain) = results
            operands = on(device, *sources, *tensors, output.to(DTYPE), logsumexp.float())
            options = modifiers(device, given, ("mask", "bias", "key_lengths", "alibi_slopes", "dropout_state"))
            needed = (True, True, True, bias is not None)
            grads = backward_modified(*operands, head_dim**-0.5, *interval, *options, *needed)
            name = f"backward_modified, head dim {head_dim}, {case}"
            yield from errors(name, grads[: len(exact)], tuple(exact), tuple(plain))


PARTS: dict[str, Callable[[str], Iterator[str]]] = {
    "forward": wrong_forward,
    "forward_modified": wrong_forward_modified,
    "backward": wrong_backward,
    "backward_modified": wrong_backward_modified,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Small calls of every configuration, checked against float64.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all without one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    for part in given.parts:
        if part not in PARTS:
            parser.error(f"part: {part!r} is none of {', '.join(PARTS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("sanitizer_matrix: needs a GPU of compute capability 9.0")
    if not dispatch.has_plan():
        sys.exit("sanitizer_matrix: needs the plan module, which lists the configurations")
    torch.manual_seed(0)
    wrong = 0
    for part in given.parts or PARTS:
        for text in PARTS[part](given.device):
            wrong += 1
            print("wrong:", text)
    print(f"{', '.join(given.parts or PARTS)}: {wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
