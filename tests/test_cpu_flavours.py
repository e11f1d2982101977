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

import pytest
import torch
from helpers import assert_accurate, assert_logsumexp

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


def instance(flavour: str) -> Path:
    return OBJECTS / f"attention/instances/forward_cpu_{flavour}.cpp.o"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not found")
@pytest.mark.parametrize("flavour", NEWER)
def test_code_of_a_newer_instruction_set_cannot_replace_other_code(flavour: str) -> None:
    """The linker keeps one copy of a weak function: all of them must carry the name of their machine."""
    told = subprocess.run(["nm", str(instance(flavour))], capture_output=True, text=True, check=True).stdout
    symbols = [line.split() for line in told.splitlines()]
    functions = [name for *_, kind, name in symbols if kind in "TWi"]
    assert any(f"cpu_{flavour}" in name for name in functions), "the test no longer knows how symbols look"
    assert [name for name in functions if f"cpu_{flavour}" not in name] == []


@pytest.fixture(scope="module")
def flavours(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which(CXX[0]) is None:
        pytest.skip(f"no C++ compiler: {CXX[0]} is not found")
    runtime = [OBJECTS / f"kittens/cpu/{name}.cpp.o" for name in ("machine", "checker", "checker_barriers", "features")]
    target = tmp_path_factory.mktemp("flavours") / "flavours.so"
    source = Path(__file__).resolve().parent / "flavours/forward.cpp"
    command = [*CXX, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}", str(source)]
    command += [str(path) for path in (*map(instance, FLAVOURS), *runtime)]
    subprocess.run([*command, "-o", str(target), "-lpthread"], check=True)
    library = ctypes.CDLL(str(target))
    library.flavour_runs.restype = ctypes.c_bool
    library.flavour_forward.restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize(("configuration", "head_dim"), [(0, 64), (1, 128), (1, 72), (2, 256)])
def test_every_instruction_set_is_right(
    flavours: ctypes.CDLL, flavour: str, dtype: torch.dtype, configuration: int, head_dim: int
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
    shape = (configuration, heads, length_q, length_k, head_dim)
    error = flavours.flavour_forward(number, DTYPES.index(dtype), *shape, *pointers)
    assert error is None, error.decode()
    exact, exact_logsumexp = reference.attention(
        *(x.double() for x in (query, key, value)), causal="lower_right", scale=0.125
    )
    same_formula, _ = reference.attention(query, key, value, causal="lower_right", scale=0.125)
    assert_accurate("output", output, exact, same_formula, 2)
    assert_logsumexp(logsumexp, exact_logsumexp, dtype)
