"""The entry points: torch's drop-in and our own signature."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as _forward_ad
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import call, dispatch, modified, ops
from .autograd import Attention, EagerAttention, ModifiedAttention, eager_apply

_torch_attention = torch.nn.functional.scaled_dot_product_attention
_is_grad_enabled = torch.is_grad_enabled
_is_cuda_autocast = torch.is_autocast_enabled  # without an argument: CUDA's, at half the time
_is_tracing = torch.compiler.is_dynamo_compiling
_functorch_level = torch._C._functorch.maybe_current_level
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_eager_attention = eager_apply[EagerAttention]
_direct_drop_in = ops.direct_drop_in
_USUAL_INTERVALS = ((0, -1, -1), (call.UPPER_LEFT, -1, -1))  # corner and window
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_LARGEST_SCALE = torch.finfo(torch.float32).max
# The reports that are open (`report`). The drop-in's calls reach them through their torch function mode.
watchers: list[Any] = []


def _is_differentiated(query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Whether a gradient may be asked for. A tensor under torch.func.vmap does not tell: an outer level may ask."""
    return _is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or any(other is not None and other.requires_grad for other in others)
        or (not _is_tracing() and _functorch_level() is not None)
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale q k^T + mask) v with the signature and the meaning of torch's `scaled_dot_product_attention`.

    query (..., Hq, Lq, E), key (..., Hk, Lk, E), value (..., Hk, Lk, Ev) of one floating dtype on one device; leading
    dims broadcast, and with `enable_gqa` Hq may be a multiple of Hk. Returns (..., Hq, Lq, Ev) in the dtype and the
    memory layout of the query. `is_causal` hides the keys j > i (upper-left corner) and excludes `attn_mask`; `scale`
    is any finite number, 1/sqrt(E) by default. `attn_mask` (bool: True = visible; or additive) broadcasts to
    (..., Hq, Lq, Lk), is read where it is, and may require a gradient; of a bool one that comes again, see `attention`.
    `dropout_p` of the weights are dropped, whatever the module's mode. Under autocast the inputs are cast as torch
    casts them. Differentiable once.

    Kernels: float16 and bfloat16 on compute capability 9.0, these with float32 and float64 on the CPU, head dims 1 to
    256. Every other valid call goes to torch, with one warning per reason (`set_fallback`); a call that torch runs
    faster, or that was not measured on the CPU, goes there too, which `explain` tells: on the GPU an additive mask
    without a gradient of its own, and dropout in a call whose gradient is wanted. Raises TypeError, ValueError or
    RuntimeError naming the argument, its value and what is allowed, with the class torch uses.

    Source of the formula: torch's math backend, `_scaled_dot_product_attention_math`.
    """
    # The usual call with as few looks at its tensors as decide it: they are most of the host time outside the op. What
    # the op then refuses (sizes that broadcast, a dtype mix) takes the general way, which also words the errors.
    tracing = _is_tracing()
    if not tracing and not watchers and _forward_ad._current_level < 0:
        output = _direct_drop_in(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if output is not None:
            return output
    if (
        attn_mask is None
        and not tracing
        and not watchers
        and type(dropout_p) in (float, int)  # an array has no truth value
        and dropout_p == 0.0
        and type(query) is Tensor
        and type(key) is Tensor
        and type(value) is Tensor
        and query.is_cuda
        and query.dtype in _SIXTEEN_BIT
        and (is_causal is False or is_causal is True)
        and _forward_ad._current_level < 0
        and not _is_cuda_autocast()
        and dispatch.every_gpu_runs()
        and (enable_gqa is True or enable_gqa is False)
        and (scale is None or (type(scale) is float and call.SMALLEST_FLOAT32 <= scale <= _LARGEST_SCALE))
    ):
        try:
            shape, key_shape = query.shape, key.shape  # raises for nested tensors
            if len(shape) == len(key_shape) == 4 and (
                enable_gqa or shape[1] == (heads_k := key_shape[1]) or heads_k == 1
            ):
                return _usual_call(query, key, value, is_causal, scale)
        except (RuntimeError, ZeroDivisionError):
            pass
    return _any_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _usual_call(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    if not _is_grad_enabled() or not (
        query.requires_grad or key.requires_grad or value.requires_grad or _functorch_level() is not None
    ):
        # Each argument that is the op's default, and not given, saves its conversion.
        settings = (scale, call.UPPER_LEFT) if is_causal else () if scale is None else (scale,)
        return ops.eager_forward(query, key, value, *settings)[0]
    factor = query.shape[3] ** -0.5 if scale is None else scale
    corner = call.UPPER_LEFT if is_causal else 0
    if _functorch_level() is None:
        operands = (_unwrap_if_dead(query), _unwrap_if_dead(key), _unwrap_if_dead(value))
        return _eager_attention(*operands, factor, corner)
    return Attention.apply(query, key, value, factor, corner, -1, -1, False, False)[0]


def _any_call(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> Tensor:
    # Before their own dispatch, which would come back here with torch's function switched off.
    if any(isinstance(operand, Tensor) and operand.is_nested for operand in (query, key, value)):
        dispatch.fell_back("nested tensors have no kernel")
        return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if has_torch_function_variadic(query, key, value):
        return handle_torch_function(
            scaled_dot_product_attention,
            (query, key, value),
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    operands = call.of_drop_in(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(operands, call.Fallback):
        dispatch.fell_back(operands.reason)
    elif not call.torch_is_faster(operands):
        return operands.restore(_run(operands, wants_logsumexp=False)[0])
    return _torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    double_backward: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softcap(scale q k^T) + bias - ALiBi) v over the visible keys, always on our own machine.

    query (B, Hq, Lq, D), key (B, Hk, Lk, D), value (B, Hk, Lk, Dv): float16 or bfloat16 on compute capability 9.0,
    these, float32 or float64 on the CPU; D and Dv from 1 to 256, Hq a multiple of Hk, any strides.

    causal: None, "upper_left" (key j visible iff j <= i) or "lower_right" (j <= i + Lk - Lq).
    window: (left, right) keys before and after the diagonal that stay visible, None for an open side; the diagonal is
        the lower-right one unless causal is "upper_left".
    scale: any finite number, 1/sqrt(D) by default. Scores are floats in the kernels: beyond 1e8 in size (1e16 for
        float64) neighbouring ones are so far apart that weights, and the output with them, may be NaN.
    return_lse: also return the natural-log logsumexp of the scaled logits, (B, Hq, Lq), float32 (float64 for float64),
        differentiable as well.
    deterministic: True asks for gradients that are the same bit for bit at every run, as
        torch.use_deterministic_algorithms(True) does; the output always is.
    double_backward: True allows second and higher derivatives, with every option and the same dropout; without it a
        second one raises RuntimeError. Where autograd records the backward (create_graph=True, torch.func.grad), it is
        then made of torch operations, which hold several tensors of (B, Hq, Lq, Lk) in float32 (float64 for float64)
        in memory. Elsewhere the kernels run as without it. Compiled graphs have no second derivative.
    mask: bool, True = visible; bias: float32 or the query's dtype, added to the scores, differentiable. Both of any
        shape that broadcasts to (B, Hq, Lq, Lk) and any strides: they are read where they are. A finite bias of -1e8 or
        less (-1e18 for float64), such as the most negative number, hides a key from rows that see others; in a row of
        nothing else all such keys count alike, as in torch, and its logsumexp is near -11356. A bool mask that comes
        again is known by its memory and torch's count of writes to it: after a write that torch does not count
        (`mask.data`, numpy, a kernel of another library, a replayed CUDA graph) say `mask.bitwise_or_(False)`.
    key_lengths: (B), int32 or int64: keys from this one on are hidden.
    softcap: scores become softcap * tanh(scores / softcap) before anything is added; 0 for none.
    alibi_slopes: (Hq) or (B, Hq), float32 or the query's dtype: slope * |i + Lk - Lq - j| is subtracted.
    sinks: (Hq), float32 or the query's dtype, differentiable: one more score of every row, which takes weight and has
        no value, and counts in the logsumexp.
    dropout_p: from 0 to 1, the share of the normalised weights that is dropped; the others are scaled by 1 / (1 - p).
        The state is drawn from torch's generator of the device, once a call. The logsumexp does not know of it.

    A key is visible where causal, window, mask and key_lengths all admit it.

    Returns the output (B, Hq, Lq, Dv) in the dtype and layout of the query; a row without a visible key is 0 with
    logsumexp -inf (with a sink: the sink). Under autocast the inputs are cast as for torch's attention. Raises
    TypeError, ValueError, RuntimeError or NotImplementedError naming the argument, its value and what is allowed.

    Source of the formula: Vaswani et al., Attention Is All You Need, section 3.2.1.
    """
    operands = call.of_attention(
        query,
        key,
        value,
        causal=causal,
        window=window,
        mask=mask,
        bias=bias,
        key_lengths=key_lengths,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        scale=scale,
        return_lse=return_lse,
        deterministic=deterministic,
        double_backward=double_backward,
    )
    if not _is_tracing() and watchers:
        for watcher in watchers:
            watcher.attention_runs(query, key, value, scale, operands)
    output, logsumexp = _run(operands, deterministic is True, double_backward, return_lse)
    return output if logsumexp is None or not return_lse else (output, logsumexp)


def _distinct(arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments, a tensor that comes again as a view: compilers trace no autograd function with one twice."""
    distinct: list[Any] = []
    for argument in arguments:
        again = isinstance(argument, Tensor) and any(argument is other for other in distinct)
        distinct.append(argument.view_as(argument) if again else argument)
    return distinct


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply(*arguments), with less around it where neither a compiler nor torch.func looks on."""
    if _is_tracing():
        return function.apply(*_distinct(arguments))
    if _functorch_level() is not None:
        try:
            return function.apply(*arguments)
        except NotImplementedError as error:
            if "jvp" not in str(error):
                raise
            # A tangent below another transform, as under hessian, which the checks do not see.
            raise NotImplementedError(call.NO_FORWARD_MODE) from error
    return eager_apply[function](*(_unwrap_if_dead(a) if isinstance(a, Tensor) else a for a in arguments))


def _run(
    operands: call.Operands, deterministic: bool = False, twice: bool = False, wants_logsumexp: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(output, logsumexp); the logsumexp may be None where it is not wanted."""
    query, key, value = operands.query, operands.key, operands.value
    settings = (operands.scale, operands.corner, operands.window_left, operands.window_right)
    if operands.modifiers is not None:
        return _run_modified(query, key, value, settings, operands.modifiers, deterministic, twice)
    if _is_differentiated(query, key, value):
        return _apply(Attention, query, key, value, *settings, deterministic, twice)
    if not wants_logsumexp and settings[1:] in _USUAL_INTERVALS and not _is_tracing() and not ops.checking():
        output = ops.direct_forward(query, key, value, settings[0], settings[1])
        if output is not None:
            return output, None
    return ops.run_forward(query, key, value, *settings)


def _run_modified(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    settings: tuple[float, int, int, int],
    modifiers: call.Modifiers,
    deterministic: bool,
    twice: bool,
) -> tuple[Tensor, Tensor]:
    mask, bias, key_lengths, alibi_slopes, sinks, dropout_p, softcap = modifiers
    drops_all, state = dropout_p == 1.0, None
    if drops_all:
        dropout_p = 0.0
    elif dropout_p > 0.0:
        # Seed and offset from the generator of the device: fresh for each call, the same after torch.manual_seed, and
        # part of a CUDA graph that is captured.
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=query.device)
    tensors = (mask, bias, key_lengths, alibi_slopes, sinks, state)
    if _is_differentiated(query, key, value, bias, sinks):
        numbers = (dropout_p, softcap, deterministic, twice)
        result = _apply(ModifiedAttention, query, key, value, *settings, *tensors, *numbers)
    else:
        result = modified.run_forward(query, key, value, *settings, *tensors, dropout_p, softcap)
    output, logsumexp = result
    if drops_all:
        output = output.masked_fill(output.new_ones((), dtype=torch.bool), 0.0)
    return output, logsumexp
