"""Builds the three compiled parts of kittens_torch.

kittens_torch/_C.abi3.so    the operators, on torch's stable ABI: one build for every torch >= 2.11 and Python >= 3.10
kittens_torch/_direct.abi3.so  a short way to the forward operator, for as many
kittens_torch/_plan.*.so    a small pybind11 module for explain() and build_info(); left out where pybind11 is missing

Everything else about the package is in pyproject.toml. KITTENS_TORCH_ARCHS chooses the GPU targets (90a, or none),
MAX_JOBS the number of compilers at once. Objects, and what the compilers said, stay in build/kittens_torch.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from kittens_build import toolchain  # noqa: E402
from kittens_build.compiler import Compilation, compile_all, link  # noqa: E402
from kittens_build.jobs import BYTES_PER_JOB, job_count, this_machine  # noqa: E402

toolchain.require_setuptools(setuptools.__version__)

BUILD = Path("build/kittens_torch")
COMPILE_LOG = BUILD / "compile_log.json"
X86 = platform.machine().lower() in ("x86_64", "amd64")


@dataclass(frozen=True)
class Source:
    """A file to compile. Those ending in .cu go to nvcc, and a CPU-only build leaves them out."""

    path: str
    isa: tuple[str, ...] = ()  # instruction sets beyond the architecture's oldest; x86-64 only
    machine: str = ""  # with isa: the namespace of what the file is compiled for, see Compilation.keep_global
    optimize: str = "-O3"


AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AMX = (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")

LIBRARY = [
    Source("csrc/attention/instances/forward_sm90_bfloat16.cu"),
    Source("csrc/attention/instances/forward_sm90_float16.cu"),
    Source("csrc/attention/instances/split_forward_sm90_bfloat16.cu"),
    Source("csrc/attention/instances/split_forward_sm90_float16.cu"),
    Source("csrc/attention/instances/modified_forward_sm90_bfloat16.cu"),
    Source("csrc/attention/instances/modified_forward_sm90_float16.cu"),
    Source("csrc/attention/instances/backward_sm90_bfloat16.cu"),
    Source("csrc/attention/instances/backward_sm90_float16.cu"),
    Source("csrc/attention/instances/modified_backward_sm90_bfloat16.cu"),
    Source("csrc/attention/instances/modified_backward_sm90_float16.cu"),
    # Calls under the checker are as fast as with -O3, and it compiles in a third of the time.
    Source("csrc/attention/instances/forward_checked.cpp", optimize="-O1"),
    Source("csrc/attention/instances/modified_forward_checked.cpp", optimize="-O1"),
    Source("csrc/attention/instances/backward_checked.cpp", optimize="-O1"),
    Source("csrc/attention/instances/modified_backward_checked.cpp", optimize="-O1"),
    Source("csrc/attention/instances/forward_cpu_amx.cpp", AMX, "cpu_amx"),
    Source("csrc/attention/instances/forward_cpu_avx512.cpp", AVX512, "cpu_avx512"),
    Source("csrc/attention/instances/forward_cpu_avx2.cpp", AVX2, "cpu_avx2"),
    Source("csrc/attention/instances/forward_cpu_generic.cpp"),
    Source("csrc/attention/instances/modified_forward_cpu_amx.cpp", AMX, "cpu_amx"),
    Source("csrc/attention/instances/modified_forward_cpu_avx512.cpp", AVX512, "cpu_avx512"),
    Source("csrc/attention/instances/modified_forward_cpu_avx2.cpp", AVX2, "cpu_avx2"),
    Source("csrc/attention/instances/modified_forward_cpu_generic.cpp"),
    Source("csrc/attention/instances/backward_cpu_amx.cpp", AMX, "cpu_amx"),
    Source("csrc/attention/instances/backward_cpu_avx512.cpp", AVX512, "cpu_avx512"),
    Source("csrc/attention/instances/backward_cpu_avx2.cpp", AVX2, "cpu_avx2"),
    Source("csrc/attention/instances/backward_cpu_generic.cpp"),
    Source("csrc/attention/instances/modified_backward_cpu_amx.cpp", AMX, "cpu_amx"),
    Source("csrc/attention/instances/modified_backward_cpu_avx512.cpp", AVX512, "cpu_avx512"),
    Source("csrc/attention/instances/modified_backward_cpu_avx2.cpp", AVX2, "cpu_avx2"),
    Source("csrc/attention/instances/modified_backward_cpu_generic.cpp"),
    Source("csrc/attention/instances/forward_cpu.cpp"),
    Source("csrc/attention/instances/forward_sm90.cpp"),
    Source("csrc/attention/instances/backward_cpu.cpp"),
    Source("csrc/attention/instances/backward_sm90.cpp"),
    Source("csrc/kittens/sm90/device.cu"),
    Source("csrc/kittens/cpu/machine.cpp"),
    Source("csrc/kittens/cpu/checker.cpp"),
    Source("csrc/kittens/cpu/checker_barriers.cpp"),
    Source("csrc/kittens/cpu/features.cpp"),
    Source("csrc/attention/plan.cpp"),
    Source("csrc/attention/tile_classes_sm90.cu"),
    Source("csrc/attention/tile_classes_cpu.cpp"),
    Source("csrc/bindings/modifiers.cpp"),
    Source("csrc/bindings/forward.cpp"),
    Source("csrc/bindings/backward.cpp"),
    Source("csrc/bindings/stream.cpp"),
    Source("csrc/bindings/library.cpp"),
    Source("csrc/bindings/direct.cpp"),
]
DIRECT = [Source("csrc/direct_module.cpp")]
PLAN = [
    Source("csrc/attention/plan.cpp"),
    Source("csrc/kittens/cpu/features.cpp"),
    Source("csrc/plan_module.cpp"),
]

LANGUAGE = ["-std=c++20"]
# No symbol leaves a library but those its loader needs. Unique symbols would keep a library from being unloaded.
HOST = ["-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]
LIMITED_API = ["-DPy_LIMITED_API=0x030A0000"]
STABLE_ABI = [
    f"-DTORCH_TARGET_VERSION=0x{toolchain.OLDEST_TORCH[0]:02x}{toolchain.OLDEST_TORCH[1]:02x}000000000000",
    *LIMITED_API,
]
# tests/test_build_log.py reads what these flags make ptxas say.
PTXAS = ["-lineinfo", "-Xptxas", "-v,--warn-on-spills,--warn-on-local-memory-usage"]


def say(text: str) -> None:
    print(f"kittens_torch: {text}", flush=True)


def package_version() -> str:
    text = (ROOT / "kittens_torch/_version.py").read_text()
    return re.search(r'"(.+)"', text)[1]  # type: ignore[index]


def pybind11_include() -> Path | None:
    found = toolchain.find_package("pybind11", toolchain.site_folders())
    return next((folder / "include" for folder in found if folder.joinpath("include/pybind11").is_dir()), None)


def python_include() -> Path | None:
    folder = Path(sysconfig.get_path("include"))
    return folder if folder.joinpath("Python.h").exists() else None


def buildable() -> set[str]:
    """The parts that can be built here; what else is listed does without the others."""
    python = python_include() is not None
    return {"_C"} | ({"_direct"} if python else set()) | ({"_plan"} if python and pybind11_include() else set())


class Build:
    """One build: the tools it found, and the commands that follow from them."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise toolchain.BuildError(f"kittens_torch builds on Linux only, this is {sys.platform}")
        self.archs = toolchain.requested_archs()
        self.torch = toolchain.require_torch()
        self.cxx, told = toolchain.find_compiler()
        self.nvcc = toolchain.find_nvcc() if self.archs else None
        self.pybind11 = pybind11_include()
        say(f"{told}; headers of torch {self.torch.version} in {self.torch.folder}")
        if self.nvcc:
            say(f"nvcc {self.nvcc.version} ({self.nvcc.path}) for {', '.join(self.archs)}")
        elif self.archs:
            say("CPU-only build: no nvcc in CUDA_HOME, on PATH or of the pip packages nvidia-cuda-{nvcc,runtime,cccl}")
            self.archs = []
        else:
            say(f"CPU-only build: KITTENS_TORCH_ARCHS={toolchain.CPU_ONLY}")
        if self.nvcc and self.torch.cuda and int(self.torch.cuda.split(".")[0]) < self.nvcc.release[0]:
            say(
                f"note: this torch is built for CUDA {self.torch.cuda} and nvcc is of CUDA {self.nvcc.version}: "
                f"the GPU's driver must know CUDA {self.nvcc.release[0]} too"
            )
        if not python_include():
            say("Python.h is missing: building the op library alone, explain() will say less and calls start slower")
        elif not self.pybind11:
            say("pybind11 is missing: building without the plan module, explain() will say so")

    def wanted(self, sources: list[Source]) -> list[Source]:
        return [
            source for source in sources if (self.nvcc or not source.path.endswith(".cu")) and (X86 or not source.isa)
        ]

    def compilation(self, source: Source) -> Compilation:
        target = BUILD / "objects" / f"{source.path}.o"
        if source.path.endswith(".cu"):
            assert self.nvcc is not None
            code = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs]
            host = ["-Xcompiler", ",".join(HOST)]
            if " " not in self.cxx:  # nvcc takes a compiler alone, no ccache before it.
                host += ["-ccbin", self.cxx]
            command = [str(self.nvcc.path), *LANGUAGE, source.optimize, *code, "--expt-relaxed-constexpr", *PTXAS]
            return Compilation(Path(source.path), target, [*command, *host, "-Icsrc"], root=ROOT)
        command = [*self.cxx.split(), *LANGUAGE, source.optimize, *HOST, "-Wall", *source.isa, "-Icsrc"]
        command += ["-DKITTENS_CUDA"] if self.nvcc else []
        includes: list[Path] = []
        if source.path.startswith("csrc/bindings/"):
            includes += self.torch.include
            command += [*STABLE_ABI, *(["-DUSE_CUDA"] if self.nvcc else [])]
        if source.path == "csrc/plan_module.cpp":
            assert self.pybind11 is not None
            includes += [self.pybind11, Path(sysconfig.get_path("include"))]
            command += [
                f'-DKITTENS_ARCHS="{" ".join(self.archs)}"',
                f'-DKITTENS_TORCH_VERSION="{package_version()}"',
                f'-DKITTENS_TORCH_HEADERS="{self.torch.version}"',
            ]
        if source.path == "csrc/direct_module.cpp":
            includes += [*self.torch.include, Path(sysconfig.get_path("include"))]
            command += LIMITED_API
        command += [word for folder in includes for word in ("-isystem", str(folder))]
        return Compilation(Path(source.path), target, command, source.machine or None, ROOT)

    def link_options(self, library: bool) -> list[str]:
        options = ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]
        if not library:
            return options  # The interpreter has the symbols that the modules lack.
        # torch is imported first, so its libraries need no path of ours. Never torch_cuda, c10_cuda or Python's.
        options += [f"-L{self.torch.lib}", f"-Wl,-rpath-link,{self.torch.lib}", "-ltorch_cpu", "-lc10"]
        options += ["-Wl,--no-undefined"]
        if self.nvcc:
            options += [f"-L{self.nvcc.lib}", "-lcudart_static"]
        return [*options, "-lrt", "-ldl", "-lpthread"]

    def run(self, parts: dict[str, list[Source]]) -> dict[str, Path]:
        """Compiles and links the libraries named, and returns where they lie."""
        sources = list(dict.fromkeys(source for part in parts.values() for source in self.wanted(part)))
        machine = this_machine()
        jobs = job_count(machine)
        say(
            f"{jobs} compiler{'s' * (jobs > 1)} at once ({machine.cores} cores, {machine.memory / 2**30:.1f} GiB free, "
            f"{BYTES_PER_JOB >> 30} GiB planned for each; MAX_JOBS overrides)"
        )
        compiled = compile_all([self.compilation(source) for source in sources], jobs, say, ROOT / COMPILE_LOG)
        say(f"{compiled} of {len(sources)} files compiled, log in {COMPILE_LOG}")
        libraries = {}
        for name, part in parts.items():
            objects = [self.compilation(source).object for source in self.wanted(part)]
            libraries[name] = BUILD / "linked" / f"{name}.so"
            options = self.link_options(library=name == "_C")
            if link(objects, libraries[name], [*self.cxx.split(), "-shared"], options, ROOT):
                say(f"{name} linked")
        return libraries


class BuildLibraries(build_ext):
    """Compiles without distutils' compiler classes: they know no nvcc, no flags for one file and one job at a time."""

    def finalize_options(self) -> None:
        super().finalize_options()
        parts = buildable()
        self.extensions = [built for built in self.extensions if built.name.rpartition(".")[2] in parts]

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith(("_C", "_direct")):
            return "/".join(fullname.split(".")) + ".abi3.so"
        return str(super().get_ext_filename(fullname))

    def build_extensions(self) -> None:
        parts = {"_C": LIBRARY, "_direct": DIRECT, "_plan": PLAN}
        names = {extension.name: extension.name.rpartition(".")[2] for extension in self.extensions}
        try:
            libraries = Build().run({part: parts[part] for part in names.values()})
        except (toolchain.BuildError, ValueError) as error:
            raise SystemExit(f"\nkittens_torch: {error}\n") from None
        for fullname, part in names.items():
            target = self.get_ext_fullpath(fullname)
            self.mkpath(str(Path(target).parent))
            self.copy_file(str(ROOT / libraries[part]), target)


class FreshBuild(build):
    """Collects a wheel's files anew: setuptools would pack what an earlier build left, such as a removed module."""

    def run(self) -> None:
        collected = Path(self.build_lib).resolve()
        if collected.is_relative_to(ROOT / "build"):
            shutil.rmtree(collected, ignore_errors=True)
        super().run()


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension("kittens_torch._C", [source.path for source in LIBRARY]),
            Extension("kittens_torch._direct", [source.path for source in DIRECT]),
            Extension("kittens_torch._plan", [source.path for source in PLAN]),
        ],
        cmdclass={"build": FreshBuild, "build_ext": BuildLibraries},
        # Without the plan module nothing in a wheel depends on the Python it was built with.
        options={} if "_plan" in buildable() else {"bdist_wheel": {"py_limited_api": "cp310"}},
    )
