"""From the arguments of a call to the operands of the forward op, or to the reason why the call goes to torch.

`functional` runs the result, `explain` describes it: both see the same decision.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import checks, dispatch, ops

UPPER_LEFT, LOWER_RIGHT = 1, 2
SMALLEST_FLOAT32 = 2.0**-126


# Caps between which softcap and scale / softcap are at home in the kernels' float32, or float64. One below the first
# leaves no difference between scores, as the first does; one above the second caps nothing.
SOFTCAPS = {torch.float32: (1e-9, 1e20), torch.float64: (1e-18, 1e150)}


class Modifiers(NamedTuple):
    """What changes scores beyond a scale and a key interval, as the modified ops take it; mask and bias of 4 dims."""

    mask: Tensor | None = None
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    softcap: float = 0.0

    @property
    def is_more_than_sinks(self) -> bool:
        """Whether the kernels of the modified class are needed; every class has sinks."""
        return any(tensor is not None for tensor in self[:4]) or self.dropout_p > 0.0 or self.softcap > 0.0


class Operands(NamedTuple):
    """What the forward op gets, and how its output becomes the call's."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    corner: int
    window_left: int
    window_right: int
    # Leading dims of the call's output, where they are not the (batch, heads) of the op.
    leading: tuple[int, ...] | None = None
    # Whether torch has a fused kernel for the call too.
    plain: bool = False
    # None: the kernels without any.
    modifiers: Modifiers | None = None

    def restore(self, output: Tensor) -> Tensor:
        """The op's (B, H, L, Dv) output in the shape of the call."""
        if self.leading is None:
            return output
        return output.view(*self.leading, *output.shape[2:])


class Fallback(NamedTuple):
    """The call is valid and goes to torch."""

    reason: str


def autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Casts as torch's autocast does for its own attention: floating tensors of the device, float64 excepted."""
    device_type = operands[0].device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        operand.to(dtype)
        if operand.is_floating_point() and operand.dtype != torch.float64 and operand.device.type == device_type
        else operand
        for operand in operands
    )


def fold_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The op takes positive scales: a sign or a zero moves into a copy of the query."""
    if query.dtype != torch.float64 and -SMALLEST_FLOAT32 < scale < SMALLEST_FLOAT32:
        scale = 0.0  # It would be zero or denormal in the kernel's float32, where -inf * 0 is NaN.
    if scale > 0:
        return query, scale
    if scale < 0:
        return -query, -scale
    return query * 0, 1.0


def has_tangent(*operands: Tensor | None) -> bool:
    """Whether forward-mode AD differentiates one of the operands."""
    if torch.autograd.forward_ad._current_level < 0:
        return False
    unpack = torch.autograd.forward_ad.unpack_dual
    return any(operand is not None and unpack(operand).tangent is not None for operand in operands)


def of_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: Any,
    window: Any,
    mask: Any,
    bias: Any,
    key_lengths: Any,
    softcap: Any,
    alibi_slopes: Any,
    sinks: Any,
    dropout_p: Any,
    scale: Any,
    return_lse: Any,
    deterministic: Any,
    double_backward: Any,
) -> Operands:
    """Operands of `attention(...)`, which never goes to torch: what it cannot run, it refuses."""
    checks.flag("return_lse", return_lse)
    checks.flag("double_backward", double_backward)
    if deterministic is not None:
        checks.flag("deterministic", deterministic)
    for argument, operand in (("query", query), ("key", key), ("value", value)):
        checks.tensor(argument, operand)
        checks.strided(argument, operand)
    corner = checks.causal(causal)
    window_left, window_right = checks.window(window)
    factor = None if scale is None else checks.scale(scale)
    cap, dropout = checks.softcap(softcap), checks.dropout(dropout_p, ValueError)
    query, key, value = autocast(query, key, value)
    checks.same_dtype_and_device(query, key, value)
    shapes = query_shape, _, value_shape = query.shape, key.shape, value.shape
    checks.rank_four(*shapes)
    checks.lengths_and_head_dims(*shapes)
    checks.head_dims_of_kernels(query_shape, value_shape)
    checks.batch_and_heads(*shapes)
    missing = dispatch.machine_missing(query.device, query.dtype)
    if missing:
        raise NotImplementedError(
            f"attention cannot run {query.dtype} on {query.device}: {missing}. Convert the inputs, or call "
            "kittens_torch.scaled_dot_product_attention, which goes to torch"
        )
    modifiers = None
    if dropout or cap or any(tensor is not None for tensor in (mask, bias, key_lengths, alibi_slopes, sinks)):
        modifiers = _modifiers(query, key, mask, bias, key_lengths, alibi_slopes, sinks, dropout, cap)
    if has_tangent(query, key, value, bias, sinks):
        raise NotImplementedError(
            "attention has no forward-mode derivative; torch's math backend has (torch.nn.attention.sdpa_kernel)"
        )
    if factor is None:
        factor = query_shape[-1] ** -0.5
    if not SMALLEST_FLOAT32 <= factor < math.inf:
        query, factor = fold_scale(query, factor)
    return Operands(query, key, value, factor, corner, window_left, window_right, None, False, modifiers)


def _modifiers(
    query: Tensor,
    key: Tensor,
    mask: Any,
    bias: Any,
    key_lengths: Any,
    alibi_slopes: Any,
    sinks: Any,
    dropout_p: float,
    softcap: float,
) -> Modifiers | None:
    """The modifiers of `attention(...)`, checked; None where they change nothing, as a soft cap of 1e30."""
    batch, heads, length_q = query.shape[:3]
    logits, device, dtype = (batch, heads, length_q, key.shape[2]), query.device, query.dtype
    real = torch.float64 if dtype == torch.float64 else torch.float32
    if mask is not None:
        checks.bool_mask(mask, device, logits)
        mask = _of_four_dims(mask)
    if bias is not None:
        checks.additive(bias, dtype, device, logits)
        bias = _of_four_dims(bias.to(real) if dtype == torch.float64 else bias)
    if key_lengths is not None:
        checks.key_lengths(key_lengths, device, batch)
        if key_lengths.dtype == torch.int64:
            key_lengths = key_lengths.clamp(0, key.shape[2]).int()
        key_lengths = key_lengths.contiguous()
    if alibi_slopes is not None:
        checks.of_heads("alibi_slopes", alibi_slopes, device, dtype, ((heads,), (batch, heads)))
        if alibi_slopes.requires_grad:
            checks.refuse("alibi_slopes", "a tensor that requires a gradient", "a tensor that requires none")
        alibi_slopes = alibi_slopes.to(real)
    if sinks is not None:
        checks.of_heads("sinks", sinks, device, dtype, ((heads,),))
        sinks = sinks.to(real)
    if softcap > 0.0:
        least, largest = SOFTCAPS[real]
        softcap = max(softcap, least) if softcap <= largest else 0.0
    modifiers = Modifiers(mask, bias, key_lengths, alibi_slopes, sinks, dropout_p, softcap)
    return modifiers if any(isinstance(value, Tensor) or value for value in modifiers) else None


def _of_four_dims(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor


def of_drop_in(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Operands | Fallback:
    """Operands of `scaled_dot_product_attention(...)`, or why it goes to torch."""
    for argument, operand in (("query", query), ("key", key), ("value", value)):
        checks.tensor(argument, operand)
    if attn_mask is not None:
        checks.tensor("attn_mask", attn_mask)
    checks.flag("is_causal", is_causal)
    checks.flag("enable_gqa", enable_gqa)
    dropout = checks.dropout(dropout_p)
    factor = None if scale is None else checks.scale(scale)

    corner = UPPER_LEFT if is_causal else 0
    # Known by its name: the import of torch.nn.attention.bias takes seconds.
    if type(attn_mask).__name__ == "CausalBias":
        if is_causal:
            checks.refuse("is_causal", True, "False with a CausalBias as attn_mask", ValueError)
        corner = UPPER_LEFT if attn_mask.variant.name == "UPPER_LEFT" else LOWER_RIGHT
        bias, attn_mask = attn_mask, None
    else:
        bias = None
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")

    for argument, operand in (("query", query), ("key", key), ("value", value)):
        if operand.is_nested or is_traceable_wrapper_subclass(operand):
            kind = "a nested tensor" if operand.is_nested else f"a {type(operand).__name__}"
            return Fallback(f"{argument} is {kind}")
        if operand.layout != torch.strided:
            return Fallback(f"{argument} has layout {operand.layout}")
    query, key, value = autocast(query, key, value)
    checks.same_dtype_and_device(query, key, value)
    shapes = query.shape, key.shape, value.shape
    checks.rank_at_least_two(*shapes)
    checks.lengths_and_head_dims(*shapes)
    length_q, length_k = query.shape[-2], key.shape[-2]
    if bias is not None and (bias.seq_len_q, bias.seq_len_kv) != (length_q, length_k):
        checks.refuse("lengths of attn_mask", (bias.seq_len_q, bias.seq_len_kv), f"{(length_q, length_k)}, as q and k")

    head_dim, value_dim = query.shape[-1], value.shape[-1]
    operands = _four_dims(query, key, value, enable_gqa)
    masked = None
    if attn_mask is not None:
        (masked,) = autocast(attn_mask)
        leading = query.shape[:-2] if isinstance(operands, Fallback) else operands[3]
        checks.mask(masked, query.dtype, query.device, (*leading, length_q, length_k))
        if masked.is_nested or is_traceable_wrapper_subclass(masked) or masked.layout != torch.strided:
            return Fallback(f"attn_mask is a {type(attn_mask).__name__} of layout {attn_mask.layout}")
    missing = dispatch.machine_missing(query.device, query.dtype)
    if missing:
        return Fallback(missing)
    if not (1 <= head_dim <= checks.MAX_HEAD_DIM and 1 <= value_dim <= checks.MAX_HEAD_DIM):
        return Fallback(f"head dims ({head_dim}, {value_dim}); the kernels take 1 to {checks.MAX_HEAD_DIM}")
    if has_tangent(query, key, value, *([] if masked is None else [masked])):
        return Fallback("forward-mode AD has no kernel")
    if isinstance(operands, Fallback):
        return operands
    modifiers = _modifiers_of_drop_in(masked, operands, query.dtype, dropout)
    if factor is None:
        factor = head_dim**-0.5
    plain = (
        corner != LOWER_RIGHT
        and all(operand is given for operand, given in zip(operands, (query, key, value), strict=False))
        and (enable_gqa or query.shape[1] == key.shape[1])
        and factor > 0  # with another one torch's CPU kernel gives NaN for a causal call
    )
    query, key, value, leading = operands
    query, factor = fold_scale(query, factor)
    leading_dims = None if len(leading) == 2 else leading
    return Operands(query, key, value, factor, corner, -1, -1, leading_dims, plain, modifiers)


def _modifiers_of_drop_in(
    mask: Tensor | None, operands: tuple[Tensor, Tensor, Tensor, tuple[int, ...]], dtype: torch.dtype, dropout_p: float
) -> Modifiers | None:
    if mask is None:
        return Modifiers(dropout_p=dropout_p) if dropout_p > 0.0 else None
    leading = operands[3]
    if len(leading) > 2 and any(size != 1 for size in mask.shape[:-3]):
        # Batch dims become one, as those of the query; a view unless the mask broadcasts along some of them.
        mask = mask.expand(*leading[:-1], *mask.shape[-3:]).flatten(0, len(leading) - 2)
    elif mask.dim() > 4:
        mask = mask.flatten(0, mask.dim() - 4)
    mask = _of_four_dims(mask)
    if mask.dtype == torch.bool:
        return Modifiers(mask=mask, dropout_p=dropout_p)
    return Modifiers(bias=mask.double() if dtype == torch.float64 else mask, dropout_p=dropout_p)


def _four_dims(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]] | Fallback:
    """Operands of rank 4 with one batch and fitting heads, and the leading dims of the output.

    Everything is a view except where batch dims cannot be flattened without one copy.
    """
    output_rank = max(query.dim(), key.dim(), value.dim())
    rank = max(output_rank, 4)
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) < 3:
        checks.refuse("enable_gqa", True, "False for inputs without a heads dimension (rank 2)")
    shapes = [(1,) * (rank - operand.dim()) + tuple(operand.shape[:-2]) for operand in (query, key, value)]
    heads, heads_k, heads_v = (shape[-1] for shape in shapes)
    batch = tuple(_broadcast(dim - rank, *(shape[dim] for shape in shapes)) for dim in range(rank - 3))

    if heads_k == heads_v and (heads_k == heads or heads_k == 1):
        wanted = (heads, heads_k, heads_k)
    elif enable_gqa:
        for argument, count in (("key", heads_k), ("value", heads_v)):
            if count == 0 or heads % count != 0:
                checks.refuse(f"heads of {argument}", count, f"a divisor of {heads}, the heads of query")
        if heads_k != heads_v and not (heads_k in (1, heads) and heads_v in (1, heads)):
            return Fallback("key and value have different numbers of heads")
        wanted = (heads, heads_k, heads_k) if heads_k == heads_v else (heads, heads, heads)
    else:
        common = _broadcast(-3, heads, heads_k, heads_v)
        wanted = (common, common, common)

    flattened = []
    for operand, count in zip((query, key, value), wanted, strict=True):
        if operand.dim() != rank or tuple(operand.shape[:-2]) != (*batch, count):
            operand = operand.expand(*batch, count, *operand.shape[-2:])
        flattened.append(operand.flatten(0, rank - 4) if rank > 4 else operand)
    return flattened[0], flattened[1], flattened[2], (*batch, wanted[0])[rank - output_rank :]


def _broadcast(dim: int, *sizes: int) -> int:
    """The size that query, key and value broadcast to in one dim."""
    result = sizes[0]
    for argument, size in zip(("key", "value"), sizes[1:], strict=True):
        if size == 1 or size == result:
            continue
        if result != 1:
            hint = " (or its divisor with enable_gqa=True)" if dim == -3 else ""
            checks.refuse(f"size of {argument} in dim {dim}", size, f"1 or {result}, the size of query{hint}")
        result = size
    return result


def torch_is_faster(operands: Operands) -> bool:
    """Whether this call of the drop-in goes to torch because torch runs it faster.

    On the CPU never while tracing or under `checked_machine`: a graph holds our op whatever its lengths turn out to be.
    """
    if not operands.plain:
        return False
    if operands.query.device.type == "cuda" and operands.modifiers is not None:
        mask = operands.modifiers.mask if operands.modifiers.bias is None else operands.modifiers.bias
        tensors = (operands.query, operands.key, operands.value)
        return dispatch.gpu_prefers_torch(*tensors, mask, operands.modifiers.dropout_p)
    if operands.query.device.type != "cpu" or torch.compiler.is_compiling() or ops.checking():
        return False
    modified = (True,) if operands.modifiers is not None else ()
    return dispatch.cpu_prefers_torch(operands.query, operands.key, operands.value, operands.corner, *modified)


def fused_has_no_kernel(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, corner: int, scale: float) -> str:
    """Why our kernels cannot take a call of one of torch's fused operators, which torch has checked already, or ""."""
    if dropout_p > 0.0:
        return "dropout_p: torch's backward has to drop the weights that torch's forward dropped"
    missing = dispatch.machine_missing(query.device, query.dtype)
    if missing:
        return missing
    if not (1 <= query.shape[3] <= checks.MAX_HEAD_DIM and 1 <= value.shape[3] <= checks.MAX_HEAD_DIM):
        return f"head dims ({query.shape[3]}, {value.shape[3]}); the kernels take 1 to {checks.MAX_HEAD_DIM}"
    if corner == LOWER_RIGHT and query.shape[2] > key.shape[2]:
        return "rows without keys, of which torch's backward wants another logsumexp"
    if key.shape[1] != value.shape[1]:
        return "key and value have different numbers of heads"
    if not math.isfinite(scale):
        return f"scale is {scale}"
    return ""
