"""Lists the attention calls of a piece of code, with what each ran on and why: the answer to "why is it slow"."""

# mypy: allow-untyped-calls, allow-untyped-decorators, no-warn-return-any
# (as torch leaves them)

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import call, functional
from .enable import Outcome, is_enabled
from .enable import watchers as override_watchers
from .explain import Plan, explain, of_operands

_torch_attention = torch.nn.functional.scaled_dot_product_attention
_TORCHS = "torch.nn.functional.scaled_dot_product_attention"
_NOT_ENABLED = "the model calls torch's own function; kittens_torch.enable() turns that over to us"
_NOT_REPLACED = "torch chose its math or its memory-efficient kernel, which enable() leaves alone"
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
# Files of other libraries that hand a model's attention on.
_DISPATCHERS = (os.sep + "sdpa_attention.py", os.sep + "attention_dispatch.py")
_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


class Call(NamedTuple):
    """One attention call.

    function: what was called. where: "file:line" of the first caller outside of torch and of this package. query, key,
    value: their sizes. plan: what ran and why; its machine is "torch" where torch's kernel ran.
    """

    function: str
    where: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    plan: Plan


class Report:
    """The attention calls that `report` saw, in their order; `print` groups those that are alike."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._thread = threading.get_ident()
        # What the integrations say of a call of torch's function before they make it.
        self._announced = ""
        # What became of the call of torch's function that is running, or None where none is.
        self._outcomes: list[Outcome] | None = None

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the one that opened the report: the package tells of the calls of all."""
        return threading.get_ident() != self._thread

    def add(self, function: str, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> None:
        if self._is_elsewhere():
            return
        of_query, of_key, of_value = (tuple(operand.shape) for operand in (query, key, value))
        self.calls.append(Call(function, _caller(), of_query, of_key, of_value, query.dtype, query.device, plan))

    # What the rest of the package tells.

    def attention_runs(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, operands: call.Operands
    ) -> None:
        if self._is_elsewhere():
            return
        arguments = {"query": query, "key": key, "value": value, "scale": scale}
        self.add("attention", query, key, value, of_operands("attention", arguments, operands))

    def goes_to_torch(self, reason: str) -> None:
        """The next call of torch's function is made because of `reason`."""
        if not self._is_elsewhere():
            self._announced = reason

    def override_ran(self, outcome: Outcome) -> None:
        if self._is_elsewhere():
            return
        if self._outcomes is None:  # in a compiled graph, or by a caller of torch's operators
            self.add(_TORCHS, outcome.query, outcome.operands.key, outcome.operands.value, _plan_of(outcome))
        else:
            self._outcomes.append(outcome)

    # Calls that go through torch's function modes.

    def run_torchs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        reason, self._announced = self._announced, ""
        self._outcomes = []
        try:
            result = _torch_attention(*args, **kwargs)
            outcomes = self._outcomes
        finally:
            self._outcomes = None
        query, key, value = _operands(args, kwargs)
        if outcomes and not reason:
            plan = _plan_of(outcomes[0])
        else:
            plan = Plan(_TORCHS, "torch", reason or (_NOT_REPLACED if is_enabled() else _NOT_ENABLED))
        self.add(_TORCHS, query, key, value, plan)
        return result

    def run_drop_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        self._outcomes = []  # of the call that the drop-in itself may make
        try:
            result = functional.scaled_dot_product_attention(*args, **kwargs)
        finally:
            self._outcomes = None
        query, key, value = _operands(args, kwargs)
        self.add("scaled_dot_product_attention", query, key, value, explain(*args, **kwargs))
        return result

    def __str__(self) -> str:
        machines = Counter(entry.plan.machine for entry in self.calls)
        told = ", ".join(f"{count} on {machine}" for machine, count in machines.most_common())
        lines = [f"{len(self.calls)} attention calls" + (f": {told}" if told else "")]
        for entry, count in Counter(self.calls).items():
            lines.append(f"{count} x {entry.function} at {entry.where}")
            lines.append(
                f"  query {entry.query}, key {entry.key}, value {entry.value}, "
                f"{str(entry.dtype).removeprefix('torch.')} on {entry.device}"
            )
            plan = entry.plan
            kernel = f", kernel {plan.kernel}, configuration {plan.configuration}" if plan.kernel is not None else ""
            lines.append(f"  {plan.machine}{kernel}: {plan.reason}")
            lines.extend(f"  copy: {copy}" for copy in plan.copies)
        return "\n".join(lines)


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = [*args, *(kwargs[name] for name in ("query", "key", "value")[len(args) :])][:3]
    return query, key, value


def _plan_of(outcome: Outcome) -> Plan:
    if outcome.reason:
        return Plan(_TORCHS, "torch", outcome.reason)
    _, key, value = outcome.operands[:3]
    arguments = {"query": outcome.query, "key": key, "value": value, "scale": outcome.scale}
    return of_operands(_TORCHS, arguments, outcome.operands)


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = os.path.abspath(frame.f_code.co_filename)
        if not file.startswith((_OUR_FOLDER, _TORCH_FOLDER)) and not file.endswith(_DISPATCHERS):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class _Mode(TorchFunctionMode):
    def __init__(self, report: Report) -> None:
        self.report = report

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling():
            if func is _torch_attention:
                return self.report.run_torchs(args, kwargs)
            if func is functional.scaled_dot_product_attention:
                return self.report.run_drop_in(args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def report() -> Iterator[Report]:
    """Records the attention calls of this thread while the context lasts: `with report() as r: model(x)`, `print(r)`.

    It sees `attention` and `scaled_dot_product_attention` of this package, torch's function (with or without
    `enable`), and what the integrations make of a model's attention. Calls inside a compiled graph show only where
    `enable` routes them: look at the model before it is compiled. Each call costs some microseconds more.
    """
    watching = Report()
    functional.watchers.append(watching)
    override_watchers.append(watching.override_ran)
    try:
        with _Mode(watching):
            yield watching
    finally:
        functional.watchers.remove(watching)
        override_watchers.remove(watching.override_ran)
