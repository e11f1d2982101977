"""The operations of our ops for `torch.utils.flop_counter.FlopCounterMode`, counted as torch counts its own attention.

That is the products of all queries with all keys, hidden ones included: a causal call counts like a full one, so that
a model's count does not change with who computes its attention. The backward pass is five products, of which the scores
come anew; those of gradients that nobody asks for are left out.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .loading import when_loaded

_COUNTER = "torch.utils.flop_counter"
_NAMESPACE = "kittens_torch::"


def register_when_loaded() -> None:
    """Registers the formulas now if torch's counter is loaded, else when it is. Imports nothing."""
    when_loaded(_COUNTER, _register)


def _register() -> None:
    counter = importlib.import_module(_COUNTER)
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(_NAMESPACE):
            continue
        packet = getattr(torch.ops.kittens_torch, name.removeprefix(_NAMESPACE).partition(".")[0])
        arguments = [argument.name for argument in packet.default._schema.arguments]
        if "query" in arguments and packet not in counter.flop_registry:
            count = _of_backward if "need_query" in arguments else _of_forward
            counter.register_flop_formula(packet, get_raw=True)(_formula(arguments, count))


def _formula(names: list[str], count: Callable[[dict[str, Any]], int]) -> Callable[..., int]:
    """The formula of an op with arguments of these names, given as tensors and not as shapes."""

    def operations(*given: Any, out_val: Any = None, **more: Any) -> int:
        return count({**dict(zip(names, given, strict=False)), **more})

    return operations


def _products(arguments: dict[str, Any]) -> tuple[int, int]:
    """Operations of a product over the head dim of the keys, and over that of the values."""
    batch, heads, length_q, head_dim = arguments["query"].shape
    length_k, value_dim = arguments["value"].shape[2:]
    pairs = 2 * batch * heads * length_q * length_k
    return pairs * head_dim, pairs * value_dim


def _of_forward(arguments: dict[str, Any]) -> int:
    return sum(_products(arguments))


def _of_backward(arguments: dict[str, Any]) -> int:
    of_keys, of_values = _products(arguments)
    need_query, need_key, need_value = (bool(arguments.get(f"need_{name}", True)) for name in ("query", "key", "value"))
    # The gradient of the weights serves every gradient but that of the values.
    need_weights = need_query or need_key or bool(arguments.get("need_bias"))
    return of_keys * (1 + need_query + need_key) + of_values * (need_weights + need_value)
