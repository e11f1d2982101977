"""Says what a call would do, without doing it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from . import call, checks, dispatch, functional, ops

ALIGNMENT = 16  # bytes: what TMA asks of base addresses and strides


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one call does.

    machine: "sm90" or "cpu" (ours), "checked" (the H200's configurations under `checked_machine`), "torch" (the call
        goes to torch), or "meta" (shapes only, nothing runs).
    kernel, configuration, tile (query rows, keys), stages, consumers, shared_bytes (bytes), grid: what the plan chose;
        None where nothing of ours runs or the plan module is missing.
    heads_as_rows: whether a tile's rows are the query heads of one key head, which have one row each.
    splits: the ranges that each tile's keys are divided into, each for a block of its own; a second kernel puts the
        ranges together. 0 where a block sees all keys of its tile.
    copies: the copies made of tensors, each with its reason.
    reason: why this machine and this kernel.
    """

    function: str
    machine: str
    reason: str
    kernel: str | None = None
    configuration: int | None = None
    tile: tuple[int, int] | None = None
    stages: int | None = None
    consumers: int | None = None
    shared_bytes: int | None = None
    grid: int | None = None
    heads_as_rows: bool | None = None
    splits: int | None = None
    copies: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.function} on {self.machine}: {self.reason}"]
        if self.kernel is not None and self.tile is not None:
            lines.append(f"  kernel         {self.kernel}, configuration {self.configuration}")
            lines.append(f"  tile           {self.tile[0]} query rows x {self.tile[1]} keys")
            lines.append(f"  pipeline       {self.stages} stages, {self.consumers} consumer warpgroups")
            lines.append(f"  shared memory  {self.shared_bytes} bytes per block")
            lines.append(f"  grid           {self.grid} blocks")
            if self.heads_as_rows:
                lines.append("  rows           the query heads of a key head, which have one row each")
            if self.splits:
                lines.append(f"  keys           in {self.splits} ranges, which a second kernel puts together")
        lines.extend(f"  copy           {copy}" for copy in self.copies)
        return "\n".join(lines)


TORCH_IS_FASTER = (
    "torch's own kernel is faster for this call on this device, or was not measured against ours; attention(...) runs "
    "ours"
)


def explain(*args: Any, function: Callable[..., Any] | None = None, **kwargs: Any) -> Plan:
    """The plan of `function(*args, **kwargs)`, by default of `scaled_dot_product_attention`; nothing is computed.

    function: `scaled_dot_product_attention` or `attention` of this package; ValueError for another. A call that would
    be refused raises here what it would raise there.
    """
    if function is None:
        function = functional.scaled_dot_product_attention
    name = getattr(function, "__name__", repr(function))
    if function is functional.attention:
        arguments = _arguments(function, args, kwargs)
        return of_operands(name, arguments, call.of_attention(**arguments))
    if function is not functional.scaled_dot_product_attention:
        module = getattr(function, "__module__", None)
        checks.refuse(
            "function",
            f"{module}.{name}" if module else name,
            "scaled_dot_product_attention or attention of kittens_torch",
            ValueError,
        )
    arguments = _arguments(function, args, kwargs)
    operands = call.of_drop_in(**arguments)
    if isinstance(operands, call.Fallback):
        return Plan(name, "torch", operands.reason)
    if call.torch_is_faster(operands):
        return Plan(name, "torch", TORCH_IS_FASTER)
    return of_operands(name, arguments, operands)


def _arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _plan_of(operands: call.Operands) -> Any:
    return dispatch.plan(
        operands.query,
        operands.key,
        operands.value,
        operands.corner,
        operands.window_left,
        operands.window_right,
        ops.checked_configuration() if operands.query.device.type == "cpu" else None,
        operands.modifiers is not None and operands.modifiers.is_more_than_sinks,
        operands.modifiers is not None,
        operands.modifiers is not None and operands.modifiers.softcap != 0.0,
    )


def of_operands(function: str, arguments: dict[str, Any], operands: call.Operands) -> Plan:
    """The plan of a call of `function` that our kernels take. arguments: its query, key, value and scale."""
    device = operands.query.device.type
    if device == "meta":
        return Plan(function, "meta", "meta tensors have no data; only shapes and strides are computed")
    copies = tuple(_copies(arguments, operands))
    machine = "sm90" if device == "cuda" else "checked" if ops.checking() else "cpu"
    if not dispatch.has_plan():
        return Plan(function, machine, "the plan module is not built; the op's own plan decides", copies=copies)
    plan = _plan_of(operands)
    return Plan(
        function,
        machine,
        plan.reason,
        plan.kernel,
        plan.configuration,
        (plan.block_m, plan.block_n),
        plan.stages,
        plan.consumers,
        plan.shared_bytes,
        plan.grid,
        plan.heads_as_rows,
        plan.splits,
        copies,
    )


def _copies(arguments: dict[str, Any], operands: call.Operands) -> Iterator[str]:
    for name in ("query", "key", "value"):
        given, operand = arguments[name], getattr(operands, name)
        scale = arguments["scale"]
        if operand.dtype != given.dtype:
            yield f"{name} is cast to {operand.dtype} by autocast"
        elif operand.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
            if name == "query" and scale is not None and operands.scale != scale:
                yield "query is copied: the kernels take positive scales, so the sign or zero of scale moves into it"
            else:
                yield f"{name} is copied: its batch dims do not flatten to one"
        reason = _misfit(operand)
        if reason:
            yield f"{name} is copied: {reason}"
    # The output's own address is the allocator's, which is aligned.
    if operands.query.is_cuda and operands.value.shape[3] * operands.value.element_size() % ALIGNMENT != 0:
        yield f"output is copied: its rows are not a multiple of {ALIGNMENT} bytes"


def _misfit(operand: Tensor) -> str:
    """Why TMA cannot read this operand in place, or the empty string. The cpu machine reads everything in place."""
    if operand.numel() == 0 or not operand.is_cuda:
        return ""
    sizes, strides = operand.shape, operand.stride()
    if sizes[3] > 1 and strides[3] != 1:
        return f"its last dim has stride {strides[3]}"
    for size, stride in zip(sizes[:3], strides[:3], strict=True):
        if size > 1 and stride * operand.element_size() % ALIGNMENT != 0:
            return f"a stride of {stride * operand.element_size()} bytes is not a multiple of {ALIGNMENT}"
    if operand.data_ptr() % ALIGNMENT != 0:
        return f"its address is not a multiple of {ALIGNMENT} bytes"
    return ""
