"""How many compilers may run at once: as many as the cores and the memory that this process may use allow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Measured on the largest files: 0.5 GB for g++, 0.25 GB for nvcc; the rest is room for larger kernels. nvcc compiles
# one architecture after the other, so their number does not matter.
BYTES_PER_JOB = 2 << 30
MEMORY_SHARE = 0.8  # The rest of the machine goes on working while we compile.


@dataclass(frozen=True)
class Machine:
    """What this process may use: whole cores, and bytes of memory that are free for it."""

    cores: int
    memory: int


def job_count(machine: Machine, environment: Mapping[str, str] = os.environ, bytes_per_job: int = BYTES_PER_JOB) -> int:
    """Compilers to run at once: exactly MAX_JOBS if it is set, else what cores and memory allow, at least 1."""
    wanted = environment.get("MAX_JOBS", "").strip()
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise ValueError(f"MAX_JOBS={wanted!r}: a whole number of at least 1 is needed")
        return int(wanted)
    return max(1, min(machine.cores, int(machine.memory * MEMORY_SHARE) // bytes_per_job))


def this_machine(root: Path = Path("/")) -> Machine:
    """The machine under `root` (tests give a made-up one), seen through the limits of this process's cgroups."""
    cores = float(len(os.sched_getaffinity(0)))
    memory = _available_memory(root / "proc/meminfo")
    for group in _cgroups(root):
        cores = min(cores, _core_limit(group))
        memory = min(memory, _memory_limit(group))
    return Machine(cores=max(1, int(cores)), memory=int(memory))


def _available_memory(meminfo: Path) -> float:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return float(value.split()[0]) * 1024
    raise ValueError(f"{meminfo} has no line MemAvailable")


def _cgroups(root: Path) -> list[Path]:
    """The folders of the cgroups that this process is in, and of all their ancestors: each of them limits it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(",") if controllers else [""]:  # Version 2 has one tree without a name.
            if controller not in ("", "memory", "cpu"):
                continue
            top = mount / controller if controller else mount
            group = top / path.lstrip("/")
            # In a container the path is the host's, and the folder mounted at the top is the process's own group.
            found += [folder for folder in (group, *group.parents) if folder.is_relative_to(top) and folder.is_dir()]
    return found


def _number(file: Path) -> float:
    """The number in a cgroup file; infinity if there is no file or no limit."""
    try:
        text = file.read_text().split()[0]
        return float(text) if text != "max" else float("inf")
    except (OSError, IndexError, ValueError):
        return float("inf")


def _memory_limit(group: Path) -> float:
    """Bytes still free under the group's memory limit. File pages the kernel can drop do not count as used."""
    limit = min(_number(group / "memory.max"), _number(group / "memory.limit_in_bytes"))
    if limit == float("inf"):
        return limit
    used = min(_number(group / "memory.current"), _number(group / "memory.usage_in_bytes"))
    droppable = 0.0
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == "inactive_file":
                droppable = float(value)
    except OSError:
        pass
    return max(0.0, limit - (used - droppable if used != float("inf") else 0.0))


def _core_limit(group: Path) -> float:
    """Cores' worth of time that the group may use."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota, period = str(_number(group / "cpu.cfs_quota_us")), str(_number(group / "cpu.cfs_period_us"))
    if quota in ("max", "inf") or float(quota) <= 0 or period == "inf":
        return float("inf")
    return float(quota) / float(period)
