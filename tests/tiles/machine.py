"""Runs the test kernels on a machine: the two flavours of the cpu machine, and Hopper."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from . import build

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float": torch.float32, "double": torch.float64}


class TensorView(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, tensor: Tensor | None) -> TensorView:
        """A tensor of four dimensions as a kernel's maps see it; of any other only the address counts."""
        view = cls()
        if tensor is not None:
            view.data = tensor.data_ptr()
            if tensor.ndim == 4:
                view.size[:] = tensor.shape
                view.stride[:] = tensor.stride()
        return view


class Arguments(ctypes.Structure):
    _fields_ = [("tensors", TensorView * 6), ("integers", ctypes.c_int32 * 12), ("reals", ctypes.c_double * 2)]


class KernelError(Exception):
    """The error text of a launch."""


@dataclass(frozen=True)
class Machine:
    """Where a kernel runs. `seed` orders what is asynchronous on the checked cpu machine."""

    name: str
    device: str = "cpu"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}{self.seed}" if self.seed else self.name

    @property
    def library(self) -> ctypes.CDLL:
        return _library(self.name)

    @functools.cached_property
    def kernels(self) -> list[str]:
        return [self.library.kernel_name(i).decode() for i in range(self.library.kernel_count())]

    def run(
        self,
        kernel: str,
        tensors: Sequence[Tensor | None],
        integers: Sequence[int] = (),
        reals: Sequence[float] = (),
        grid: int = 1,
        wait: bool = True,
    ) -> None:
        """Runs a kernel by its name in kernel_list.h. KernelError if the launch says so."""
        assert all(tensor is None or tensor.device.type == self.device for tensor in tensors)
        given = Arguments()
        for i, tensor in enumerate(tensors):
            given.tensors[i] = TensorView.of(tensor)
        given.integers[: len(integers)] = integers
        given.reals[: len(reals)] = reals
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else None
        error = self.library.run_kernel(self.kernels.index(kernel), ctypes.byref(given), grid, self.seed, stream)
        if error is not None:
            raise KernelError(f"{kernel}: {error.decode()}")
        if wait and self.device == "cuda":
            torch.cuda.synchronize()


@functools.cache
def _library(name: str) -> ctypes.CDLL:
    path = build.sm90_library() if name == "sm90" else build.cpu_library(name)
    if path is None:
        pytest.skip(f"{build.SM90} is missing, and there is no nvcc to build it with")
    library = ctypes.CDLL(str(path))
    library.kernel_name.restype = ctypes.c_char_p
    library.run_kernel.restype = ctypes.c_char_p
    library.run_kernel.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    return library
