"""The machine of a run: names and versions, clocks under load, and what a plain GEMM and a copy reach on it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .timing import ClockSampler, EventSampler, Sampler, interleave

ROOT = Path(__file__).resolve().parent.parent
GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
GEMM_SECONDS = 0.5  # a CPU without 16-bit products takes minutes for the full size: it gets the largest within this
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}  # far above the last-level cache


def command_output(*command: str) -> str:
    """First line a command prints, or an empty text where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=ROOT)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def commit() -> str:
    """The commit of the source tree, ``-modified`` if tracked files differ from it; "unknown" outside a repository."""
    head = command_output("git", "rev-parse", "HEAD")
    if not head:
        return "unknown"
    changed = command_output("git", "status", "--porcelain", "--untracked-files=no")
    return head + "-modified" if changed else head


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def facts(device: torch.device, commit_name: str | None) -> dict[str, str]:
    """What a reader needs to judge or repeat the figures."""
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit_name or commit(),
        "cpu": cpu_name(),
        "cpu_cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        # The UUID names the same GPU whatever CUDA_VISIBLE_DEVICES hides.
        uuid = f"GPU-{properties.uuid}"
        answers = command_output("nvidia-smi", query, "--format=csv,noheader", "-i", uuid).split(", ")
        answers = answers if len(answers) == 4 else ["unknown"] * 4
        found |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": str(properties.multi_processor_count),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
        }
        found |= dict(zip(("driver", "power_limit", "maximum_sm_clock", "maximum_memory_clock"), answers, strict=True))
    return found


@dataclass(frozen=True)
class Clocks:
    """Readings of the GPU under load."""

    sm_mhz: int
    power_w: float
    temperature_c: int


def read_clocks(device: torch.device) -> Clocks | None:
    """The GPU's clock, power and temperature now, or None on a CPU and where NVML cannot be read."""
    if device.type != "cuda":
        return None
    try:
        return Clocks(
            torch.cuda.clock_rate(device), torch.cuda.power_draw(device) / 1e3, torch.cuda.temperature(device)
        )
    except Exception:  # no NVML binding, or a driver that refuses: the figures stand without the clock
        return None


def sampler_for(device: torch.device, call: Callable[[], object]) -> Sampler:
    return EventSampler(call) if device.type == "cuda" else ClockSampler(call)


def gemm_sampler(device: torch.device, dtype: torch.dtype, size: int) -> Sampler:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    return sampler_for(device, lambda: torch.mm(left, right, out=out))


def gemm_size(device: torch.device, dtype: torch.dtype) -> int:
    """GEMM_SIZE, or on a CPU the largest power of two below it whose product takes at most GEMM_SECONDS."""
    limit = GEMM_SIZE[device.type]
    size = limit if device.type == "cuda" else 256
    while size < limit and 8 * gemm_sampler(device, dtype, size).sample(1) < GEMM_SECONDS:
        size *= 2
    return size


def measure_gemm(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """TFLOP/s of torch's square matrix product (cuBLAS on a GPU) on random inputs."""
    size = gemm_size(device, dtype)
    sampler = gemm_sampler(device, dtype, size)
    return 2 * size**3 / interleave({"gemm": sampler}, seconds=seconds)["gemm"].median / 1e12


def measure_copy(device: torch.device, seconds: float) -> float:
    """TB/s of a copy inside the device's memory, bytes read and bytes written together."""
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    sampler = sampler_for(device, lambda: target.copy_(source))
    return 2 * COPY_BYTES[device.type] / interleave({"copy": sampler}, seconds=seconds)["copy"].median / 1e12
