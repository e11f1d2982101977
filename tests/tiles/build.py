"""Builds the test kernels into build/tests: tiles_fast.so and tiles_checked.so for the two flavours of the cpu
machine, tiles_sm90.so for Hopper.

    python tests/tiles/build.py --sm90 OUTPUT

builds the last one ahead of time: at build/tests/tiles_sm90.so of a machine that has a GPU, the tests find it.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from kittens_build import toolchain  # noqa: E402
from kittens_build.compiler import Compilation, Record, compile_all, link  # noqa: E402
from kittens_build.jobs import job_count, this_machine  # noqa: E402

BUILD = Path("build/tests")
SM90 = ROOT / BUILD / "tiles_sm90.so"

LANGUAGE = ["-std=c++20"]
HOST = ["-fPIC", "-fvisibility=hidden"]
AVX2 = ("avx2", "fma", "f16c")
# The checker's calls take most of the time whatever the level, and plain code compiles faster. It stays with the oldest
# instruction set, so that this one is tested too.
FLAVOURS = {
    "fast": ["-O2", "-DKITTENS_MACHINE=tiles_fast"],
    "checked": ["-O1", "-DKITTENS_MACHINE=tiles_checked", "-DKITTENS_CHECKED=1"],
}
# The run-time part of the cpu machine: the same objects for both flavours.
MACHINE = [f"csrc/kittens/cpu/{name}.cpp" for name in ("machine", "checker", "checker_barriers", "features")]


def _has_avx2() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return flags.issuperset(AVX2)


@contextmanager
def _alone() -> Iterator[None]:
    """Two test runs at once would write the same objects."""
    folder = ROOT / BUILD
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say_nothing(text: str) -> None:
    pass


def _compilation(source: str, folder: str, command: list[str]) -> Compilation:
    return Compilation(Path(source), BUILD / folder / f"{Path(source).name}.o", command, root=ROOT)


def cpu_library(flavour: str) -> Path:
    """The library of a flavour of the cpu machine, built if it is out of date."""
    program, _ = toolchain.find_compiler()
    host = [*program.split(), *LANGUAGE, *HOST, "-Wall"]
    isa = [f"-m{name}" for name in AVX2] if flavour == "fast" and _has_avx2() else []
    sources = [_compilation("tests/tiles/tile_kernels.cpp", flavour, [*host, *FLAVOURS[flavour], *isa])]
    sources += [_compilation(source, "machine", [*host, "-O2"]) for source in MACHINE]
    library = BUILD / f"tiles_{flavour}.so"
    with _alone():
        compile_all(sources, job_count(this_machine()), _say_nothing)
        objects = [source.object for source in sources]
        link(objects, library, [*program.split(), "-shared"], ["-Wl,--no-undefined", "-lpthread"], ROOT)
    return ROOT / library


def _sm90_compilation(nvcc: toolchain.Nvcc) -> Compilation:
    program, _ = toolchain.find_compiler()
    command = [str(nvcc.path), *LANGUAGE, "-O3", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr"]
    command += ["-Xptxas", "-v,--warn-on-spills,--warn-on-local-memory-usage"]
    command += ["-ccbin", program.split()[-1], "-Xcompiler", ",".join([*HOST, "-O1"])]
    return _compilation("tests/tiles/tile_kernels.cu", "sm90", command)


def build_sm90() -> Record | None:
    """Builds the library for Hopper if it is out of date, and returns what was said; None where there is no nvcc."""
    nvcc = toolchain.find_nvcc()
    if nvcc is None:
        return None
    program, _ = toolchain.find_compiler()
    compilation = _sm90_compilation(nvcc)
    with _alone():
        compile_all([compilation], 1, _say_nothing)
        options = [f"-L{nvcc.lib}", "-lcudart_static", "-Wl,--no-undefined", "-lrt", "-ldl", "-lpthread"]
        link([compilation.object], SM90.relative_to(ROOT), [*program.split(), "-shared"], options, ROOT)
    return compilation.record()


def sm90_library() -> Path | None:
    """The library for Hopper: built here where there is nvcc, else what was put in its place; None if there is none."""
    was_built_here = (ROOT / BUILD / "sm90").exists()
    if was_built_here or not SM90.exists():
        build_sm90()
    return SM90 if SM90.exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm90", metavar="OUTPUT", type=Path, required=True, help="the library for Hopper")
    output = parser.parse_args().sm90.resolve()
    record = build_sm90()
    if record is None:
        raise SystemExit("no nvcc in CUDA_HOME, on PATH or of the pip packages")
    if output != SM90:
        shutil.copyfile(SM90, output)
    print(f"{output}: compiled in {record.seconds:.0f} s")


if __name__ == "__main__":
    main()
