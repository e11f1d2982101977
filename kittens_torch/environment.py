"""What this copy of the package was built with, and what it finds on this machine."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from ._version import __version__
from .dispatch import gpu_missing
from .ops import LIBRARY

try:
    from . import _plan
except ImportError as error:
    _plan = None  # type: ignore[assignment]
    _plan_missing = str(error)


def build_info() -> dict[str, Any]:
    """The facts of the build, as a dict; asks no GPU and starts no CUDA context.

    version, library (path of the op library), cuda_kernels (bool: whether it has any), plan_module (path, or None where
    it was not built), torch, torch_cuda (CUDA release of torch's own build, or None), python. From the plan module, and
    None without it: archs (GPU architectures built for), cpu_features (instruction sets compiled in), cpu_selected (the
    one this CPU runs), compiler, torch_headers (version of the torch whose headers were used).
    """
    told = {} if _plan is None else _plan.build()
    return {
        "version": __version__,
        "library": str(LIBRARY),
        "cuda_kernels": torch._C._dispatch_has_kernel_for_dispatch_key("kittens_torch::forward", "CUDA"),
        "plan_module": None if _plan is None else _plan.__file__,
        "archs": told.get("archs"),
        "cpu_features": told.get("cpu_features"),
        "cpu_selected": told.get("cpu_selected"),
        "compiler": told.get("compiler"),
        "torch_headers": told.get("torch_headers"),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def report() -> str:
    """The environment as lines of text to paste into a bug report. Asks the GPUs, so it may start a CUDA context."""
    info = build_info()

    def joined(name: str, nothing: str) -> str:
        return "unknown" if info[name] is None else " ".join(info[name]) or nothing

    lines = {
        "kittens_torch": info["version"],
        "torch": f"{info['torch']} (CUDA {info['torch_cuda'] or 'none'})",
        "Python": f"{info['python']} on {platform.platform()}",
        "library": info["library"],
        "plan module": info["plan_module"] or f"none, explain() tells less ({_plan_missing})",
        "built with": f"compiler {info['compiler'] or 'unknown'}, torch {info['torch_headers'] or 'unknown'} headers",
        "GPU kernels": joined("archs", "none") if info["cuda_kernels"] else "none (CPU-only build)",
        "CPU kernels": f"built for {joined('cpu_features', 'none')}; selected {info['cpu_selected'] or 'unknown'}",
        "CPU": f"{_cpu_model()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} torch threads",
        "driver": _driver() or "none",
    }
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    lines |= {f"GPU {index}": told for index, told in enumerate(gpus)} or {"GPU": _why_no_gpu()}
    lines["machines"] = f"cpu{', sm90' if any(told.endswith(_RUNS) for told in gpus) else ''}"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


_RUNS = "runs machine sm90"


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    reason = gpu_missing(index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB; {f'calls go to torch: {reason}' if reason else _RUNS}"
    )


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "none: this torch has no CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "none is visible" + ("" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})")


def _driver() -> str | None:
    """The version of NVIDIA's driver, from the kernel: works where the driver's libraries do not."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", text)
    return found[1] if found else text.splitlines()[0]


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
