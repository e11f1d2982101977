"""The compiled operators: finds and loads the library, describes their outputs to fake tensors, picks the flavour.

Loading starts no CUDA context and needs no driver.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import checks
from .vmap import batch_over, batch_over_modified

LIBRARY = Path(__file__).with_name("_C.abi3.so")
OLDEST_TORCH = (2, 11)


def _built_for() -> str:
    try:
        from . import _plan
    except ImportError:
        return "unknown"
    return str(_plan.build().get("torch_headers", "unknown"))


def _load() -> None:
    """Loads the op library, or says what is missing and what to do."""
    found = torch.__version__
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        raise ImportError(
            f"kittens_torch needs torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, found torch {found}: upgrade torch."
        )
    if hasattr(torch.ops.kittens_torch, "forward"):
        return  # Loaded before in this process; registering twice is an error.
    if not LIBRARY.exists():
        raise ImportError(
            f"kittens_torch is not built here: {LIBRARY} does not exist. If it is installed (`pip install .`), Python "
            "found the source tree first: start from another folder, or run `pip install -e .` in the source tree to "
            f"use it from there. If it is not, run one of the two, with the environment's torch {found}."
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"kittens_torch's library {LIBRARY} does not load: {error}. It was built against the headers of torch "
            f"{_built_for()} for torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}; found torch {found}. Reinstall it in "
            "this environment: `pip install --force-reinstall --no-deps .` in its source tree."
        ) from error


_load()
forward = torch.ops.kittens_torch.forward.default
# The same for eager calls, without the Python function around it.
eager_forward = forward._op


def _find_direct() -> tuple[Callable[..., Tensor | None], Callable[..., Tensor | None]]:
    """(direct_forward, direct_drop_in): the forward op without torch's dispatcher, at half its host time.

    direct_forward(query, key, value, scale or None, corner) is the output of `forward`, for operands whose gradient is
    not wanted; corner 0 or `UPPER_LEFT`. None, with nothing done, where the op must be taken: because somebody must see
    it (a mode of torch's dispatch or function protocol, torch.func, torch.jit.trace, a profiler), because it has to
    copy or to refuse, because an operand is no plain tensor, or where this build or this torch lacks what the short way
    needs.

    direct_drop_in takes the eight arguments of torch's scaled_dot_product_attention by position, and looks itself
    whether the call is the plain one on a GPU: no mask, dropout, autocast, gradient. Dual levels are the caller's look.
    """
    try:
        from . import _direct

        _direct.prepare(
            str(LIBRARY),
            Tensor,
            torch.nn.Parameter,
            torch.empty_like,
            (
                torch._C._len_torch_dispatch_stack,
                torch._C._len_torch_function_stack,
                torch._C._functorch.maybe_current_level,
                torch._C._is_tracing,
                torch._C._autograd._profiler_enabled,
            ),
            torch.is_grad_enabled,
            torch.is_autocast_enabled,
        )
    except (ImportError, AttributeError):
        return (lambda *operands: None,) * 2
    return _direct.forward, _direct.drop_in


direct_forward, direct_drop_in = _find_direct()
checked_forward = torch.ops.kittens_torch.checked_forward.default
# With what modifies scores beyond a scale and a key interval, after the settings of `forward`: mask (bool) and bias
# (float32 or the query's dtype; float64 with float64), both of 4 dims, each 1 or that of (batch, heads, Lq, Lk);
# key_lengths (batch), int32; alibi_slopes (heads) or (batch, heads) and sinks (heads), float32 (float64 with float64);
# dropout_state (2), int64: seed and offset; dropout_p in [0, 1); softcap, 0 for none.
forward_modified = torch.ops.kittens_torch.forward_modified.default
checked_forward_modified = torch.ops.kittens_torch.checked_forward_modified.default
classify_mask = torch.ops.kittens_torch.classify_mask.default


def _is_known(condition: Any) -> bool:
    """Whether a condition on sizes or strides holds; a symbolic one that is not known to, does not."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # only where there are symbols: it takes seconds

    return guard_or_false(condition)


def empty_in_layout_of(like: Tensor, sizes: Sequence[int], ordered: int) -> Tensor:
    """A dense tensor of `sizes` that keeps its first `ordered` dims in the memory order they have in `like`.

    The remaining dims are innermost. A dim of size 1 or stride 0 says nothing about an order: where the others are in
    natural order (equal strides are) the result is contiguous, else the silent dims go outermost. The forward op does
    the same for its output, with the batch, head and row of the query.
    """
    strides = like.stride()
    silent = [dim for dim in range(ordered) if _is_known(like.shape[dim] == 1) or _is_known(strides[dim] == 0)]
    ranked: list[int] = []
    for dim in range(ordered):
        if dim in silent:
            continue
        place = len(ranked)
        while place > 0 and _is_known(strides[dim] > strides[ranked[place - 1]]):
            place -= 1
        ranked.insert(place, dim)
    if ranked == sorted(ranked):
        return like.new_empty(sizes)
    order = [*silent, *ranked, *range(ordered, len(sizes))]
    dense = like.new_empty([sizes[dim] for dim in order])
    return dense.permute(*(order.index(dim) for dim in range(len(sizes))))


def _fake_outputs(query: Tensor, key: Tensor, value: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    if not query.device == key.device == value.device:
        raise RuntimeError("kittens_torch: query, key and value must be on the same device")
    logsumexp_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    logsumexp = query.new_empty(query.shape[:3], dtype=logsumexp_dtype)
    return empty_in_layout_of(query, (*query.shape[:3], value.shape[3]), 3), logsumexp


for _name in ("forward", "checked_forward", "forward_modified", "checked_forward_modified"):
    torch.library.register_fake(f"kittens_torch::{_name}", _fake_outputs)
batch_over(forward)
batch_over(checked_forward)
batch_over_modified(forward_modified)
batch_over_modified(checked_forward_modified)


def _fake_classes(mask: Tensor, query: Tensor, key: Tensor, *interval: Any) -> tuple[Tensor, Tensor, Tensor]:
    def of_mask(dim: int) -> Any:
        return 1 if _is_known(mask.stride(dim) == 0) else mask.shape[dim]

    planes, rows, keys = of_mask(0) * of_mask(1), of_mask(2), key.shape[2]
    strips = planes * ((rows + 63) // 64)
    padded_rows, padded_keys = (((tokens + 63) // 64) // 8 * 8 + 16 for tokens in (rows, keys))
    tiles = mask.new_empty(planes * 2 * padded_rows * padded_keys, dtype=torch.uint8)
    ranges = mask.new_empty(strips * 2, dtype=torch.int32)
    return tiles, ranges, mask.new_empty(0 if _is_known(rows == 1) else planes * keys, dtype=torch.uint8)


torch.library.register_fake("kittens_torch::classify_mask", _fake_classes)

_checked: tuple[int, int] | None = None


@contextmanager
def checked_machine(seed: int = 0, configuration: int = -1) -> Iterator[None]:
    """Runs the CPU calls of this process on the checking flavour of the cpu machine while the context lasts.

    Copies and products complete only where the kernel waits for them, in an order drawn from `seed`; a tile read too
    early, a stage overwritten too early, wrong transaction bytes, a wrong barrier count or phase and a deadlock raise
    RuntimeError naming the tile and the barrier. `configuration` forces a row of the machine's configuration table
    (-1: the plan decides). Slow; for tests and for debugging kernels. CUDA calls are not affected.
    """
    global _checked
    checks.number("seed", seed, 0, 2**32 - 1)
    checks.number("configuration", configuration, -1, 2**31 - 1)
    before = _checked
    _checked = (configuration, seed)
    try:
        yield
    finally:
        _checked = before


def checking() -> bool:
    """Whether a `checked_machine` context is active."""
    return _checked is not None


def checked_configuration() -> int | None:
    """The configuration that the active `checked_machine` context forces (-1: the plan decides); None without one."""
    return None if _checked is None else _checked[0]


def checked_seed() -> int | None:
    """The seed of the active `checked_machine` context; None without one."""
    return None if _checked is None else _checked[1]


def without_defaults(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """scale, corner, window_left, window_right, as far as they are not the ops' defaults: conversions take time."""
    return settings[:2] if settings[2] == settings[3] == -1 else settings


def run_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, corner: int, window_left: int, window_right: int
) -> tuple[Tensor, Tensor]:
    """The forward op on the flavour in force: (output, logsumexp)."""
    if _checked is not None and query.device.type == "cpu":
        return checked_forward(query, key, value, scale, corner, window_left, window_right, *_checked)
    op = forward if torch.compiler.is_dynamo_compiling() else eager_forward
    return op(query, key, value, *without_defaults((scale, corner, window_left, window_right)))
