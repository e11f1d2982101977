"""Finds what a build needs: torch's headers (torch is never imported), pybind11, the C++ compiler, nvcc."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

OLDEST_TORCH = (2, 11)  # TORCH_TARGET_VERSION: the oldest torch whose stable ABI has what the bindings use.
OLDEST_NVCC = (12, 8)  # cudaGetDriverEntryPointByVersion came with 12.5; what is older than 12.8 is not supported.
OLDEST_SETUPTOOLS = 77  # The first to know the licence field of pyproject.toml as it is now.
ALLOWED_ARCHS = ("90a",)
CPU_ONLY = "none"
_NVCC_ADVICE = (
    f"set CUDA_HOME to a CUDA toolkit of at least {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]}, or "
    f"KITTENS_TORCH_ARCHS={CPU_ONLY} for a CPU-only build"
)


class BuildError(Exception):
    """The build cannot go on; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: its folder and its version as text."""

    folder: Path
    version: str
    cuda: str | None  # The CUDA release it was built with.

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])

    @property
    def include(self) -> list[Path]:
        return [self.folder / "include", self.folder / "include/torch/csrc/api/include"]

    @property
    def lib(self) -> Path:
        return self.folder / "lib"


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its path, its release, and where its headers and the static runtime library lie."""

    path: Path
    release: tuple[int, int]
    include: list[Path]
    lib: Path

    @property
    def version(self) -> str:
        return f"{self.release[0]}.{self.release[1]}"


def require_setuptools(version: str) -> None:
    """Refuses a setuptools that would stumble over pyproject.toml with an error that names neither cause nor cure."""
    if int(version.split(".")[0]) < OLDEST_SETUPTOOLS:
        raise BuildError(
            f"setuptools >= {OLDEST_SETUPTOOLS} is needed to build, found {version}: "
            "`pip install --upgrade setuptools`, or build without --no-build-isolation"
        )


def requested_archs(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPU architectures to build for, from KITTENS_TORCH_ARCHS; empty for a CPU-only build."""
    text = environment.get("KITTENS_TORCH_ARCHS", "").strip() or ALLOWED_ARCHS[0]
    archs = [part for part in re.split(r"[\s,;]+", text) if part]
    if archs == [CPU_ONLY]:
        return []
    unknown = [arch for arch in archs if arch not in ALLOWED_ARCHS]
    if unknown:
        raise BuildError(
            f"KITTENS_TORCH_ARCHS={text!r}: {unknown[0]!r} is not known; allowed are {', '.join(ALLOWED_ARCHS)}, "
            f"or {CPU_ONLY} for a CPU-only build"
        )
    return list(dict.fromkeys(archs))


def site_folders(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders that may hold torch and the CUDA packages, the best first.

    Inside pip's isolated build `sys.path` hides the environment being installed into, but `sysconfig` still tells its
    folders. Other front ends build in an environment of their own: then an active environment and the one that runs
    the front end are looked at too. Any torch will do, since only its headers and its stable ABI are used.
    """
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    configuration = Path(sys.prefix, "pyvenv.cfg")
    if configuration.exists() and re.search(r"include-system-site-packages\s*=\s*true", configuration.read_text()):
        folders += site.getsitepackages([sys.base_prefix])
    prefixes = [environment.get("VIRTUAL_ENV"), environment.get("CONDA_PREFIX"), _front_end_prefix()]
    for prefix in filter(None, prefixes):
        folders += [str(path) for path in Path(prefix).glob("lib/python3*/site-packages")]
    return list(dict.fromkeys(Path(folder) for folder in folders if os.path.isdir(folder)))


def _front_end_prefix() -> str | None:
    """The environment of the Python that started this process, as in `.venv/bin/python -m build`."""
    try:
        program = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0].decode()
    except (OSError, UnicodeDecodeError):
        return None
    if not os.path.basename(program).startswith("python"):
        return None
    path = shutil.which(program)
    return str(Path(path).parent.parent) if path else None


def find_package(name: str, folders: Iterable[Path]) -> list[Path]:
    """The folders of the installed packages of that name, found without importing any."""
    spec = importlib.util.find_spec(name)
    own = list(spec.submodule_search_locations or []) if spec else []
    candidates = [Path(folder) for folder in own] + [folder / name for folder in folders]
    return list(dict.fromkeys(path.resolve() for path in candidates if path.is_dir()))


def installed_torches(folders: Iterable[Path] | None = None) -> list[Torch]:
    """Every torch within reach."""
    found = []
    for folder in find_package("torch", site_folders() if folders is None else folders):
        if folder.joinpath("version.py").exists():
            text = folder.joinpath("version.py").read_text()
            version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
            cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
            found.append(Torch(folder, version[1] if version else "0.0", cuda[1] if cuda else None))
    return found


def find_torch(folders: Iterable[Path] | None = None) -> Torch | None:
    """The torch to build against, or None if there is none that is new enough."""
    return next((torch for torch in installed_torches(folders) if torch.release >= OLDEST_TORCH), None)


def require_torch() -> Torch:
    """The torch to build against; BuildError if there is none that is new enough."""
    torch = find_torch()
    if torch is None:
        found = [f"torch {torch.version} in {torch.folder}" for torch in installed_torches()]
        raise BuildError(
            f"torch >= {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} is needed to build (only its headers are used); found "
            f"{', '.join(found) or 'none in ' + ', '.join(map(str, site_folders()))}: `pip install --upgrade torch` "
            "first, or build without --no-build-isolation"
        )
    return torch


def find_compiler(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The C++ compiler (CXX, or g++) and the first line of its --version."""
    program = environment.get("CXX", "").strip() or "g++"
    try:
        told = subprocess.run([*program.split(), "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"no C++ compiler: {program} --version failed ({error}); install g++ 11 or newer") from error
    return program, told.stdout.splitlines()[0]


def find_nvcc(
    folders: Iterable[Path] | None = None, environment: Mapping[str, str] = os.environ, default: str = "/usr/local/cuda"
) -> Nvcc | None:
    """nvcc of CUDA_HOME, else of PATH, of the pip packages nvidia-cuda-{nvcc,runtime,cccl}, of `default`; or None.

    A CUDA_HOME without an nvcc, and an nvcc that does not run or is too old, are errors: who has one wants it used.
    """
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home:
        path = Path(home, "bin/nvcc")
        if not path.exists():
            raise BuildError(f"CUDA_HOME={home} holds no bin/nvcc: {_NVCC_ADVICE}, or unset CUDA_HOME")
        return inspect_nvcc(path)
    on_path = shutil.which("nvcc", path=environment.get("PATH"))
    if on_path:
        return inspect_nvcc(Path(on_path))
    packaged = [path for folder in folders or site_folders() for path in sorted(folder.glob("nvidia/cu*/bin/nvcc"))]
    found = [path for path in [*packaged, Path(default, "bin/nvcc")] if path.exists()]
    return inspect_nvcc(found[0]) if found else None


def inspect_nvcc(path: Path) -> Nvcc:
    """Runs nvcc for its release and its folders. A wrapper script on PATH says nothing about them by where it lies."""
    dry_run = ["--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        folders = subprocess.run([path, *dry_run], capture_output=True, text=True).stderr
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{path} does not run ({error}): {_NVCC_ADVICE}") from error
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None:
        raise BuildError(f"{path} --version names no release: {_NVCC_ADVICE}")
    found = (int(release[1]), int(release[2]))
    if found < OLDEST_NVCC:
        raise BuildError(f"{path} is of CUDA {found[0]}.{found[1]}, which is too old: {_NVCC_ADVICE}")
    told = dict(re.findall(r"^#\$ (\w+)=(.*)$", folders, re.MULTILINE))
    top = Path(told.get("TOP", path.resolve().parent.parent)).resolve()
    include = [Path(part) for part in re.findall(r'-I([^"\s]+)', told.get("INCLUDES", ""))] or [top / "include"]
    places = [Path(part) for part in re.findall(r'-L([^"\s]+)', told.get("LIBRARIES", ""))]
    places += [top / "lib64", top / "lib"]
    lib = next((place for place in places if place.joinpath("libcudart_static.a").exists()), None)
    headers = ["cuda_runtime.h", "nv/target"]  # The second is CCCL's; cuda_fp16.h includes it.
    places_of_headers = [*include, *(folder / "cccl" for folder in include)]
    missing = [name for name in headers if not any(folder.joinpath(name).exists() for folder in places_of_headers)]
    if lib is None or missing:
        raise BuildError(
            f"{path} is incomplete: {', '.join(missing + ['libcudart_static.a'] * (lib is None))} not found in "
            f"{', '.join(map(str, dict.fromkeys([*include, *places])))}. Install the CUDA runtime's development files "
            f"(pip: nvidia-cuda-runtime and nvidia-cuda-cccl of release {found[0]}.{found[1]}), or {_NVCC_ADVICE}"
        )
    return Nvcc(path, found, [folder.resolve() for folder in include], lib.resolve())
