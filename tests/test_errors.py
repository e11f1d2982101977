"""Bad calls: an exception that names the argument, its value and what is allowed, and the next call works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import inputs
from torch import Tensor

import kittens_torch

pytestmark = pytest.mark.usefixtures("only_ours")

# name, how to spoil the call (a dict of arguments), exception class, what the message holds
Spoil = Callable[[Tensor, Tensor, Tensor], dict[str, Any]]
BOTH: list[tuple[str, Spoil, type[Exception], tuple[str, ...]]] = [
    ("query is a list", lambda q, k, v: {"query": [1.0]}, TypeError, ("query", "list", "torch.Tensor")),
    ("key is None", lambda q, k, v: {"key": None}, TypeError, ("key", "NoneType", "torch.Tensor")),
    ("value is a number", lambda q, k, v: {"value": 1.0}, TypeError, ("value", "float", "torch.Tensor")),
    ("dtypes differ", lambda q, k, v: {"key": k.to(torch.float64)}, RuntimeError, ("key", "float64", "same dtype")),
    ("value dtype", lambda q, k, v: {"value": v.to(torch.float64)}, RuntimeError, ("value", "float64", "same dtype")),
    ("devices differ", lambda q, k, v: {"value": v.to("meta")}, RuntimeError, ("value", "meta", "same device")),
    (
        "integers",
        lambda q, k, v: {"query": q.int(), "key": k.int(), "value": v.int()},
        RuntimeError,
        ("query", "int32", "torch.bfloat16"),
    ),
    (
        "bools",
        lambda q, k, v: {"query": q.bool(), "key": k.bool(), "value": v.bool()},
        RuntimeError,
        ("query", "bool", "torch.float16"),
    ),
    ("rank 1", lambda q, k, v: {"query": q[0, 0, 0]}, RuntimeError, ("rank of query", "is 1")),
    ("key rank 1", lambda q, k, v: {"key": k[0, 0, 0]}, RuntimeError, ("rank of key", "is 1")),
    ("head dims differ", lambda q, k, v: {"key": k[..., :4]}, RuntimeError, ("head dim of key", "is 4", "8")),
    ("lengths of k and v", lambda q, k, v: {"value": v[:, :, :5]}, RuntimeError, ("length of value", "is 5", "7")),
    ("batches differ", lambda q, k, v: {"key": torch.cat([k, k[:1]])}, RuntimeError, ("key", "is 3", "2")),
    ("scale NaN", lambda q, k, v: {"scale": float("nan")}, ValueError, ("scale", "nan", "finite")),
    ("scale inf", lambda q, k, v: {"scale": float("inf")}, ValueError, ("scale", "inf", "finite")),
    ("scale -inf", lambda q, k, v: {"scale": float("-inf")}, ValueError, ("scale", "-inf", "finite")),
    ("scale text", lambda q, k, v: {"scale": "1"}, TypeError, ("scale", "'1'", "number")),
]
DROP_IN: list[tuple[str, Spoil, type[Exception], tuple[str, ...]]] = [
    *BOTH,
    ("heads do not divide", lambda q, k, v: {"key": k[:, :3], "value": v[:, :3]}, RuntimeError, ("key", "3", "4")),
    (
        "heads need enable_gqa",
        lambda q, k, v: {"key": k[:, :2], "value": v[:, :2]},
        RuntimeError,
        ("key", "2", "4", "enable_gqa"),
    ),
    (
        "gqa heads do not divide",
        lambda q, k, v: {"key": k[:, :3], "value": v[:, :3], "enable_gqa": True},
        RuntimeError,
        ("heads of key", "is 3", "divisor of 4"),
    ),
    (
        "gqa with more key heads",
        lambda q, k, v: {"query": q[:, :2], "enable_gqa": True},
        RuntimeError,
        ("heads of key", "is 4", "divisor of 2"),
    ),
    (
        "gqa without heads",
        lambda q, k, v: {"query": q[0, 0], "key": k[0, 0], "value": v[0, 0], "enable_gqa": True},
        RuntimeError,
        ("enable_gqa", "True", "rank 2"),
    ),
    ("is_causal number", lambda q, k, v: {"is_causal": 1}, TypeError, ("is_causal", "1", "True or False")),
    ("enable_gqa number", lambda q, k, v: {"enable_gqa": 1}, TypeError, ("enable_gqa", "1", "True or False")),
    (
        "causal with mask",
        lambda q, k, v: {"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True},
        RuntimeError,
        ("Explicit attn_mask should not be set when is_causal=True",),
    ),
    ("mask is a list", lambda q, k, v: {"attn_mask": [1]}, TypeError, ("attn_mask", "list", "torch.Tensor")),
    ("mask shape", lambda q, k, v: {"attn_mask": torch.ones(5, 6)}, RuntimeError, ("attn_mask", "(5, 6)", "5, 7")),
    (
        "mask enlarges the batch",
        lambda q, k, v: {"attn_mask": torch.ones(3, 1, 5, 7)},
        RuntimeError,
        ("attn_mask", "(3, 1, 5, 7)", "(2, 4, 5, 7)"),
    ),
    (
        "mask rank",
        lambda q, k, v: {"attn_mask": torch.ones(1, 2, 4, 5, 7)},
        RuntimeError,
        ("attn_mask", "(1, 2, 4, 5, 7)", "(2, 4, 5, 7)"),
    ),
    (
        "mask dtype",
        lambda q, k, v: {"attn_mask": torch.ones(5, 7, dtype=torch.int64)},
        RuntimeError,
        ("attn_mask", "int64", "torch.bool"),
    ),
    (
        "mask device",
        lambda q, k, v: {"attn_mask": torch.ones(5, 7, device="meta")},
        RuntimeError,
        ("attn_mask", "meta"),
    ),
    ("dropout above 1", lambda q, k, v: {"dropout_p": 1.5}, RuntimeError, ("dropout_p", "1.5", "0 to 1")),
    ("dropout below 0", lambda q, k, v: {"dropout_p": -0.1}, RuntimeError, ("dropout_p", "-0.1", "0 to 1")),
    ("dropout NaN", lambda q, k, v: {"dropout_p": float("nan")}, RuntimeError, ("dropout_p", "nan", "0 to 1")),
    ("dropout text", lambda q, k, v: {"dropout_p": "no"}, TypeError, ("dropout_p", "'no'", "number")),
    ("two dropouts", lambda q, k, v: {"dropout_p": torch.zeros(2)}, TypeError, ("dropout_p", "tensor([0.", "number")),
]
WIDE = torch.zeros(2, 4, 5, 257)
ATTENTION: list[tuple[str, Spoil, type[Exception], tuple[str, ...]]] = [
    *BOTH,
    ("rank 3", lambda q, k, v: {"query": q[0]}, RuntimeError, ("rank of query", "is 3", "4")),
    ("value rank 5", lambda q, k, v: {"value": v[None]}, RuntimeError, ("rank of value", "is 5", "4")),
    (
        "heads do not divide",
        lambda q, k, v: {"key": k[:, :3], "value": v[:, :3]},
        RuntimeError,
        ("heads of key", "is 3", "divisor of 4"),
    ),
    ("heads of value", lambda q, k, v: {"value": v[:, :2]}, RuntimeError, ("heads of value", "is 2", "4")),
    (
        "no key heads",
        lambda q, k, v: {"key": k[:, :0], "value": v[:, :0]},
        RuntimeError,
        ("heads of key", "is 0", "divisor of 4"),
    ),
    ("value batch", lambda q, k, v: {"value": v[:1]}, RuntimeError, ("batch of value", "is 1", "2")),
    (
        "head dim 0",
        lambda q, k, v: {"query": q[..., :0], "key": k[..., :0]},
        RuntimeError,
        ("head dim of query", "is 0", "1 to 256"),
    ),
    (
        "value head dim 0",
        lambda q, k, v: {"value": v[..., :0]},
        RuntimeError,
        ("head dim of value", "is 0", "1 to 256"),
    ),
    (
        "head dim 257",
        lambda q, k, v: {"query": WIDE, "key": WIDE, "value": WIDE},
        RuntimeError,
        ("head dim of query", "is 257", "1 to 256"),
    ),
    ("causal True", lambda q, k, v: {"causal": True}, ValueError, ("causal", "True", "'upper_left'", "'lower_right'")),
    ("causal text", lambda q, k, v: {"causal": "left"}, ValueError, ("causal", "'left'", "'upper_left'")),
    ("window number", lambda q, k, v: {"window": 3}, TypeError, ("window", "3", "(left, right)")),
    ("window of three", lambda q, k, v: {"window": (1, 2, 3)}, TypeError, ("window", "(1, 2, 3)", "(left, right)")),
    ("window -1", lambda q, k, v: {"window": (-1, 0)}, ValueError, ("window left", "-1", "None")),
    ("window right -5", lambda q, k, v: {"window": (0, -5)}, ValueError, ("window right", "-5", "None")),
    ("window float", lambda q, k, v: {"window": (1.5, 0)}, TypeError, ("window left", "1.5", "None")),
    ("window bool", lambda q, k, v: {"window": (True, 0)}, TypeError, ("window left", "True", "None")),
    ("return_lse", lambda q, k, v: {"return_lse": 1}, TypeError, ("return_lse", "1", "True or False")),
    ("deterministic", lambda q, k, v: {"deterministic": "yes"}, TypeError, ("deterministic", "'yes'")),
    ("mask list", lambda q, k, v: {"mask": [True]}, TypeError, ("mask", "list", "torch.Tensor")),
    (
        "mask float",
        lambda q, k, v: {"mask": torch.ones(5, 7)},
        RuntimeError,
        ("dtype of mask", "torch.float32", "torch.bool", "bias"),
    ),
    (
        "mask shape",
        lambda q, k, v: {"mask": torch.ones(4, 7, dtype=torch.bool)},
        RuntimeError,
        ("shape of mask", "(4, 7)", "(2, 4, 5, 7)"),
    ),
    (
        "mask rank",
        lambda q, k, v: {"mask": torch.ones(1, 1, 1, 5, 7, dtype=torch.bool)},
        RuntimeError,
        ("shape of mask", "(1, 1, 1, 5, 7)", "(2, 4, 5, 7)"),
    ),
    (
        "bias dtype",
        lambda q, k, v: {"bias": torch.ones(5, 7, dtype=torch.float64)},
        RuntimeError,
        ("dtype of bias", "torch.float64", "torch.float32"),
    ),
    (
        "bias bool",
        lambda q, k, v: {"bias": torch.ones(5, 7, dtype=torch.bool)},
        RuntimeError,
        ("dtype of bias", "torch.bool", "`mask`"),
    ),
    ("bias shape", lambda q, k, v: {"bias": torch.ones(3)}, RuntimeError, ("shape of bias", "(3,)", "(2, 4, 5, 7)")),
    (
        "key_lengths dtype",
        lambda q, k, v: {"key_lengths": torch.ones(2)},
        RuntimeError,
        ("dtype of key_lengths", "torch.float32", "torch.int32"),
    ),
    (
        "key_lengths shape",
        lambda q, k, v: {"key_lengths": torch.tensor([1])},
        RuntimeError,
        ("shape of key_lengths", "(1,)", "(2,)"),
    ),
    (
        "key_lengths layout",
        lambda q, k, v: {"key_lengths": torch.tensor([1, 2]).to_sparse()},
        RuntimeError,
        ("layout of key_lengths", "torch.sparse_coo", "torch.strided"),
    ),
    (
        "sinks layout",
        lambda q, k, v: {"sinks": torch.ones(4).to_sparse()},
        RuntimeError,
        ("layout of sinks", "torch.sparse_coo", "torch.strided"),
    ),
    ("softcap beyond floats", lambda q, k, v: {"softcap": 10**400}, ValueError, ("softcap", "positive finite")),
    ("scale beyond floats", lambda q, k, v: {"scale": -(10**400)}, ValueError, ("scale", "any finite number")),
    ("softcap -1", lambda q, k, v: {"softcap": -1.0}, ValueError, ("softcap", "-1.0", "positive")),
    ("softcap inf", lambda q, k, v: {"softcap": float("inf")}, ValueError, ("softcap", "inf", "positive")),
    ("softcap None", lambda q, k, v: {"softcap": None}, TypeError, ("softcap", "None", "positive")),
    (
        "alibi_slopes shape",
        lambda q, k, v: {"alibi_slopes": torch.ones(3)},
        RuntimeError,
        ("shape of alibi_slopes", "(3,)", "(4,)", "(2, 4)"),
    ),
    (
        "alibi_slopes gradient",
        lambda q, k, v: {"alibi_slopes": torch.ones(4, device=q.device, requires_grad=True)},
        RuntimeError,
        ("alibi_slopes", "gradient"),
    ),
    (
        "sinks shape",
        lambda q, k, v: {"sinks": torch.ones(2, 4)},
        RuntimeError,
        ("shape of sinks", "(2, 4)", "(4,)"),
    ),
    (
        "sinks dtype",
        lambda q, k, v: {"sinks": torch.ones(4, dtype=torch.int64)},
        RuntimeError,
        ("dtype of sinks", "torch.int64", "torch.float32"),
    ),
    ("dropout_p 1.5", lambda q, k, v: {"dropout_p": 1.5}, ValueError, ("dropout_p", "1.5", "0 to 1")),
    ("dropout_p text", lambda q, k, v: {"dropout_p": "a"}, TypeError, ("dropout_p", "'a'", "0 to 1")),
    ("two causals", lambda q, k, v: {"causal": np.zeros(2)}, ValueError, ("causal", "array([0.", "'lower_right'")),
]


def _normal_call(function: Callable[..., Tensor], device: str) -> None:
    tensors = inputs(device, torch.bfloat16, batch=2, heads=4, length_q=5, length_k=7, head_dim=8)
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors))
    assert (function(*tensors).double() - exact).abs().max() < 2e-2


def _refused(
    function: Callable[..., Tensor], device: str, spoil: Spoil, error: type[Exception], words: tuple[str, ...]
) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value = inputs(device, dtype, batch=2, heads=4, length_q=5, length_k=7, head_dim=8)
    arguments = {"query": query, "key": key, "value": value, **spoil(query, key, value)}
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) and argument.device.type == "cpu" and device != "cpu":
            arguments[name] = argument.to(device)
    with pytest.raises(error) as raised:
        function(**arguments)
    assert raised.type is error, f"{raised.type.__name__} instead of {error.__name__}"
    for word in words:
        assert word in str(raised.value), f"{word!r} is missing in: {raised.value}"
    _normal_call(function, device)
    with pytest.raises(error):
        kittens_torch.explain(function=function, **arguments)


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize(("spoil", "error", "words"), [row[1:] for row in DROP_IN], ids=[row[0] for row in DROP_IN])
def test_drop_in(device: str, spoil: Spoil, error: type[Exception], words: tuple[str, ...]) -> None:
    _refused(kittens_torch.scaled_dot_product_attention, device, spoil, error, words)


@devices
@pytest.mark.parametrize(("spoil", "error", "words"), [row[1:] for row in ATTENTION], ids=[row[0] for row in ATTENTION])
def test_attention(device: str, spoil: Spoil, error: type[Exception], words: tuple[str, ...]) -> None:
    _refused(kittens_torch.attention, device, spoil, error, words)


@pytest.mark.parametrize("name", [row[0] for row in DROP_IN])
def test_class_is_torchs(name: str) -> None:
    """Where torch raises, the drop-in raises the same class (torch has IndexError where it indexes a missing dim)."""
    spoil, error = next(row[1:3] for row in DROP_IN if row[0] == name)
    query, key, value = inputs("cpu", torch.float32, batch=2, heads=4, length_q=5, length_k=7, head_dim=8)
    arguments = {"query": query, "key": key, "value": value, **spoil(query, key, value)}
    try:
        F.scaled_dot_product_attention(**arguments)
    except IndexError:
        assert error is RuntimeError
    except Exception as torchs:
        assert issubclass(error, type(torchs)) or issubclass(type(torchs), error), repr(torchs)


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("query", torch.zeros(2, 3, 4), "4 dimensions"),
        ("key", torch.zeros(2, 3, 7, 8), "heads"),
        ("key", torch.zeros(2, 4, 7, 9), "head_dim"),
        ("key", torch.zeros(3, 4, 7, 8), "batch"),
        ("value", torch.zeros(2, 4, 6, 8), "value"),
        ("value", torch.zeros(2, 4, 7, 8, dtype=torch.float64), "same dtype"),
        ("scale", 0.0, "scale"),
        ("scale", -1.0, "scale"),
        ("scale", float("nan"), "scale"),
        ("scale", float("inf"), "scale"),
        ("corner", 3, "corner"),
        ("corner", -1, "corner"),
        ("window_left", -2, "window"),
        ("window_right", -2, "window"),
        ("configuration", 1000, "configuration 1000"),
    ],
    ids=lambda value: str(tuple(value.shape)) if isinstance(value, Tensor) else str(value),
)
def test_the_op_itself_refuses(name: str, bad: Any, words: str) -> None:
    query, key, value = inputs("cpu", torch.float32, batch=2, heads=4, length_q=5, length_k=7, head_dim=8)
    arguments = {"query": query, "key": key, "value": value, "scale": 1.0, "corner": 0}
    arguments |= {"window_left": -1, "window_right": -1, name: bad}
    with pytest.raises(RuntimeError, match=words):
        kittens_torch.ops.forward(**arguments)
    _normal_call(kittens_torch.attention, "cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"seed": "a"}, TypeError, "seed is 'a'; allowed: a whole number from 0"),
        ({"seed": 1.5}, TypeError, "seed is 1.5"),
        ({"seed": 2**70}, ValueError, "seed is 1180591620717411303424"),
        ({"configuration": -2}, ValueError, "configuration is -2; allowed: a whole number from -1"),
    ],
)
def test_checked_machine_refuses_before_it_begins(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said), kittens_torch.checked_machine(**arguments):
        pass


def test_attention_takes_strided_tensors_alone() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match=r"layout of key is torch.sparse_coo; allowed: torch.strided"):
        kittens_torch.attention(x, x.to_sparse(), x)


def test_a_scale_that_wants_a_gradient() -> None:
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="scale is a tensor that requires a gradient"):
        kittens_torch.attention(x, x, x, scale=torch.tensor(0.5, requires_grad=True))
