"""Every instruction set the cpu machine was compiled for: its numbers, and that its code keeps to itself.

The plan only ever takes the fastest one, so the others are reached through the objects that the build left behind.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_accurate, assert_logsumexp, leaves

from kittens_torch import reference

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = ROOT / "build/kittens_torch/objects/csrc"
NEWER = ("avx2", "avx512", "amx")
FLAVOURS = ("generic", *NEWER)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # in the order of element_type
CXX = shlex.split(os.environ.get("CXX", "g++"))

pytestmark = [
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="one instruction set only"),
    pytest.mark.skipif(not OBJECTS.is_dir(), reason="the package was not built in this folder: no objects to look at"),
]


def instance(flavour: str, operator: str = "forward") -> Path:
    return OBJECTS / f"attention/instances/{operator}_cpu_{flavour}.cpp.o"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not found")
@pytest.mark.parametrize("flavour", NEWER)
@pytest.mark.parametrize("operator", ["forward", "modified_forward", "backward", "modified_backward"])
def test_code_of_a_newer_instruction_set_cannot_replace_other_code(flavour: str, operator: str) -> None:
    """The linker keeps one copy of a weak function: all of them must carry the name of their machine."""
    told = subprocess.run(["nm", str(instance(flavour, operator))], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in told.splitlines()]
    functions = [name for *_, kind, name in symbols if kind in "TWi"]
    assert any(f"cpu_{flavour}" in name for name in functions), "the test no longer knows how symbols look"
    assert [name for name in functions if f"cpu_{flavour}" not in name] == []


@pytest.fixture(scope="module")
def flavours(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which(CXX[0]) is None:
        pytest.skip(f"no C++ compiler: {CXX[0]} is not found")
    runtime = [OBJECTS / f"kittens/cpu/{name}.cpp.o" for name in ("machine", "checker", "checker_barriers", "features")]
    runtime.append(OBJECTS / "attention/tile_classes_cpu.cpp.o")
    target = tmp_path_factory.mktemp("flavours") / "flavours.so"
    sources = [Path(__file__).resolve().parent / f"flavours/{operator}.cpp" for operator in ("forward", "backward")]
    operators = ("forward", "modified_forward", "backward", "modified_backward")
    objects = [instance(flavour, operator) for flavour in FLAVOURS for operator in operators]
    command = [*CXX, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}"]
    command += [str(path) for path in (*sources, *objects, *runtime)]
    subprocess.run([*command, "-o", str(target), "-lpthread"], check=True)
    library = ctypes.CDLL(str(target))
    library.flavour_runs.restype = ctypes.c_bool
    library.flavour_forward.restype = library.flavour_backward.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("configuration", "head_dim"), [(0, 64), (1, 128), (1, 72), (2, 256)])
@pytest.mark.parametrize("modified", [False, True])
def test_every_instruction_set_is_right(
    flavours: ctypes.CDLL, flavour: str, dtype: torch.dtype, configuration: int, head_dim: int, modified: bool
) -> None:
    number = FLAVOURS.index(flavour)
    if not flavours.flavour_runs(number):
        pytest.skip(f"this processor has no {flavour}")
    if flavour == "amx" and dtype != torch.bfloat16:
        pytest.skip("AMX multiplies bfloat16 alone")
    heads, length_q, length_k = 2, 130, 197
    query, key, value = (torch.randn(1, heads, n, head_dim).to(dtype) for n in (length_q, length_k, length_k))
    output = torch.full_like(query, float("nan"))
    real = torch.float64 if dtype == torch.float64 else torch.float32
    logsumexp = torch.full((1, heads, length_q), float("nan"), dtype=real)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (query, key, value, output, logsumexp)]
    mask = torch.rand(length_q, length_k) > 0.3
    pointers.append(ctypes.c_void_p(mask.data_ptr() if modified else None))
    shape = (configuration, heads, length_q, length_k, head_dim)
    error = flavours.flavour_forward(number, DTYPES.index(dtype), *shape, *pointers)
    assert error is None, error.decode()
    keywords: dict[str, Any] = {"causal": "lower_right", "scale": 0.125}
    if modified:
        keywords |= {"mask": mask, "softcap": 2.0}
    exact, exact_logsumexp = reference.attention(*(x.double() for x in (query, key, value)), **keywords)
    same_formula, _ = reference.attention(query, key, value, **keywords)
    assert_accurate("output", output, exact, same_formula, 2)
    assert_logsumexp(logsumexp, exact_logsumexp, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("configuration", "head_dim"), [(0, 64), (1, 72), (2, 256)])
@pytest.mark.parametrize("modified", [False, True])
def test_gradients_of_every_instruction_set(
    flavours: ctypes.CDLL, flavour: str, dtype: torch.dtype, configuration: int, head_dim: int, modified: bool
) -> None:
    number = FLAVOURS.index(flavour)
    if not flavours.flavour_runs(number):
        pytest.skip(f"this processor has no {flavour}")
    if flavour == "amx" and dtype != torch.bfloat16:
        pytest.skip("AMX multiplies bfloat16 alone")
    heads, length_q, length_k = 2, 130, 197
    real = torch.float64 if dtype == torch.float64 else torch.float32
    operands = [torch.randn(1, heads, n, head_dim).to(dtype) for n in (length_q, length_k, length_k)]
    exact_operands = leaves(*(operand.double() for operand in operands))
    keywords: dict[str, Any] = {"causal": "lower_right", "scale": 0.125}
    mask, bias = torch.rand(length_q, length_k) > 0.3, torch.zeros(1, 1, length_q, length_k, dtype=real)
    exact_bias, bias_copy = leaves(bias.double(), bias.to(dtype))
    if modified:
        keywords |= {"mask": mask, "softcap": 2.0}
    exact, logsumexp = reference.attention(*exact_operands, bias=exact_bias if modified else None, **keywords)
    grad_output = torch.randn_like(exact).to(dtype)
    output, logsumexp = exact.detach().to(dtype), logsumexp.detach().to(real)
    grads = [torch.full_like(operand, float("nan")) for operand in operands]
    given = (*operands, output, grad_output, logsumexp, *grads)
    grad_bias = torch.full_like(bias, float("nan"))
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in given]
    pointers += [ctypes.c_void_p(tensor.data_ptr() if modified else None) for tensor in (mask, bias, grad_bias)]
    shape = (configuration, heads, length_q, length_k, head_dim)
    error = flavours.flavour_backward(number, DTYPES.index(dtype), *shape, *pointers)
    assert error is None, error.decode()
    exact.backward(grad_output.double())
    copies = leaves(*operands)
    same_output, _ = reference.attention(*copies, bias=bias_copy if modified else None, **keywords)
    same_output.backward(grad_output)
    for name, mine, right, same in zip(("dQ", "dK", "dV"), grads, exact_operands, copies, strict=True):
        assert_accurate(name, mine, right.grad, same.grad, 3)
    if modified:
        assert exact_bias.grad is not None and bias_copy.grad is not None
        assert_accurate("dbias", grad_bias, exact_bias.grad, bias_copy.grad, 3)
