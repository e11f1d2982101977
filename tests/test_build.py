"""The build: what it decides, what it compiles, and what it leaves on disk."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kittens_build import backend, jobs, toolchain
from kittens_build.compiler import Compilation, compile_all, link, parse_dependencies
from kittens_build.jobs import BYTES_PER_JOB, MEMORY_SHARE, Machine, job_count, this_machine
from kittens_build.toolchain import BuildError, find_nvcc, find_torch, requested_archs

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
GXX = shutil.which("g++")
needs_gxx = pytest.mark.skipif(GXX is None, reason="no g++ here")


@pytest.fixture(scope="module")
def setup_script() -> ModuleType:
    """setup.py as a module: its tables and its Build."""
    spec = importlib.util.spec_from_file_location("kittens_torch_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# How many compilers at once


MACHINES = {
    "96 cores, 850 GiB": (Machine(96, 850 * GIB), 96),
    "2 cores, 24 GiB": (Machine(2, 24 * GIB), 2),
    "64 cores, 16 GiB": (Machine(64, 16 * GIB), 6),
    "1 core, 2 GiB": (Machine(1, 2 * GIB), 1),
}


@pytest.mark.parametrize(("machine", "expected"), MACHINES.values(), ids=MACHINES)
def test_row_52_jobs_fit_cores_and_memory(machine: Machine, expected: int) -> None:
    count = job_count(machine, {})
    assert count == expected
    assert 1 <= count <= machine.cores
    assert count == 1 or count * BYTES_PER_JOB <= MEMORY_SHARE * machine.memory


@pytest.mark.parametrize("machine", [machine for machine, _ in MACHINES.values()], ids=MACHINES)
def test_row_52_max_jobs_is_obeyed_exactly(machine: Machine) -> None:
    assert job_count(machine, {"MAX_JOBS": "3"}) == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_max_jobs_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"MAX_JOBS={text!r}")):
        job_count(Machine(2, GIB), {"MAX_JOBS": text})


def write(path: Path, text: str, executable: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if executable:
        path.chmod(0o755)
    return path


@pytest.fixture
def sixty_four_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine of 16 cores and 64 GiB free; the test adds its cgroups."""
    monkeypatch.setattr(jobs.os, "sched_getaffinity", lambda _: set(range(16)))
    write(tmp_path / "proc/meminfo", f"MemTotal: {96 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    return tmp_path


def test_machine_without_cgroups(sixty_four_gib: Path) -> None:
    assert this_machine(sixty_four_gib) == Machine(16, 64 * GIB)


def test_row_52_limits_of_a_cgroup_and_its_parents(sixty_four_gib: Path) -> None:
    write(sixty_four_gib / "proc/self/cgroup", "0::/user/job\n")
    top = sixty_four_gib / "sys/fs/cgroup"
    write(top / "user/memory.max", f"{20 * GIB}\n")
    write(top / "user/memory.current", f"{13 * GIB}\n")
    write(top / "user/memory.stat", f"anon {10 * GIB}\ninactive_file {3 * GIB}\n")  # the kernel drops those when asked
    write(top / "user/job/memory.max", "max\n")
    write(top / "user/job/cpu.max", "350000 100000\n")
    assert this_machine(sixty_four_gib) == Machine(3, 10 * GIB)
    assert job_count(this_machine(sixty_four_gib), {}) == 3
    assert job_count(this_machine(sixty_four_gib), {}, bytes_per_job=5 * GIB) == 1


def test_limits_of_a_container(sixty_four_gib: Path) -> None:
    """Inside a container the path is the host's, and the group itself is mounted at the top."""
    write(sixty_four_gib / "proc/self/cgroup", "0::/kubepods/pod1234\n")
    write(sixty_four_gib / "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    write(sixty_four_gib / "sys/fs/cgroup/memory.current", f"{1 * GIB}\n")
    assert this_machine(sixty_four_gib) == Machine(16, 7 * GIB)


def test_limits_of_cgroups_version_1(sixty_four_gib: Path) -> None:
    write(sixty_four_gib / "proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/job\n")
    top = sixty_four_gib / "sys/fs/cgroup"
    write(top / "memory/job/memory.limit_in_bytes", f"{6 * GIB}\n")
    write(top / "memory/job/memory.usage_in_bytes", f"{2 * GIB}\n")
    write(top / "cpu/job/cpu.cfs_quota_us", "200000\n")
    write(top / "cpu/job/cpu.cfs_period_us", "100000\n")
    assert this_machine(sixty_four_gib) == Machine(2, 4 * GIB)


def test_this_machine_is_read() -> None:
    machine = this_machine()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert machine.memory > 0


# What is built


@pytest.mark.parametrize(
    ("text", "archs"), [(None, ["90a"]), ("", ["90a"]), ("90a", ["90a"]), ("90a; 90a", ["90a"]), ("none", [])]
)
def test_archs(text: str | None, archs: list[str]) -> None:
    assert requested_archs({} if text is None else {"KITTENS_TORCH_ARCHS": text}) == archs


@pytest.mark.parametrize("text", ["90", "80;90a", "none 90a", "sm_90a", "all"])
def test_unknown_archs_are_refused_with_the_allowed_ones(text: str) -> None:
    with pytest.raises(BuildError) as refused:
        requested_archs({"KITTENS_TORCH_ARCHS": text})
    assert repr(text) in str(refused.value) and "allowed are 90a, or none" in str(refused.value)


def test_every_source_is_listed_once(setup_script: ModuleType) -> None:
    listed = [source.path for source in setup_script.LIBRARY]
    assert len(listed) == len(set(listed))
    listed += [source.path for source in setup_script.PLAN + setup_script.DIRECT]
    places = ["csrc/*", "csrc/attention/**/*", "csrc/bindings/*", "csrc/kittens/cpu/*", "csrc/kittens/sm90/*"]
    found = {str(path.relative_to(ROOT)) for place in places for path in ROOT.glob(place)}
    assert {path for path in found if path.endswith((".cpp", ".cu"))} == set(listed)


def test_cpu_only_build_says_so_in_one_line(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.delenv("KITTENS_TORCH_ARCHS", raising=False)
    build = setup_script.Build()
    assert sum("CPU-only build: no nvcc" in line for line in capsys.readouterr().out.splitlines()) == 1
    sources = build.wanted(setup_script.LIBRARY)
    assert sources and not any(source.path.endswith(".cu") for source in sources)
    sources += setup_script.PLAN if build.pybind11 else []
    commands = [word for source in sources for word in build.compilation(source).full_command]
    assert not build.pybind11 or '-DKITTENS_ARCHS=""' in commands
    assert "-DKITTENS_CUDA" not in commands and "-DUSE_CUDA" not in commands
    assert "-lcudart_static" not in build.link_options(library=True)


def test_row_53_newer_cuda_than_torch_s_is_pointed_out(
    setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No error: the library has a CUDA runtime of its own, and shares none with torch."""
    torch = toolchain.Torch(Path("/torch"), "2.12.0+cu128", "12.8")
    monkeypatch.setattr(toolchain, "require_torch", lambda: torch)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(Path("/nvcc"), (13, 0), [], Path("/lib")))
    setup_script.Build()
    note = "this torch is built for CUDA 12.8 and nvcc is of CUDA 13.0: the GPU's driver must know CUDA 13 too"
    assert note in capsys.readouterr().out
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: toolchain.Nvcc(Path("/nvcc"), (12, 9), [], Path("/lib")))
    setup_script.Build()
    assert "note:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lacks", "says", "built"),
    [
        ("pybind11_include", "pybind11 is missing", ["_C", "_direct"]),
        ("python_include", "Python.h is missing", ["_C"]),
    ],
)
def test_build_leaves_out_modules_whose_headers_are_missing(
    setup_script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lacks: str,
    says: str,
    built: list[str],
) -> None:
    monkeypatch.setattr(setup_script, lacks, lambda: None)
    setup_script.Build()
    assert says in capsys.readouterr().out
    extensions = [setup_script.Extension(f"kittens_torch.{name}", []) for name in ("_C", "_direct", "_plan")]
    command = setup_script.BuildLibraries(setup_script.setuptools.Distribution({"ext_modules": extensions}))
    command.finalize_options()
    assert [extension.name for extension in command.extensions] == [f"kittens_torch.{name}" for name in built]


# nvcc


def fake_toolkit(top: Path, release: str = "13.0", fails: bool = False, left_out: str = "") -> Path:
    """A CUDA toolkit as far as the build looks at one; returns its nvcc."""
    for name in ("include/cuda_runtime.h", "include/cccl/nv/target", "lib/libcudart_static.a"):
        if name != left_out:
            write(top / name, "")
    script = f"""#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release {release}, V{release}.1" && exit {int(fails)}
cat >&2 <<'END'
#$ TOP={top}/bin/..
#$ INCLUDES="-I{top}/bin/../include"
#$ LIBRARIES=  "-L{top}/bin/../lib/stubs" "-L{top}/bin/../lib"
END
"""
    return write(top / "bin/nvcc", script, executable=True)


def find(tmp_path: Path, default: str = "/nowhere", **environment: str) -> toolchain.Nvcc | None:
    """What find_nvcc finds in a made-up environment whose site-packages is `tmp_path`/site; /bin/sh is reachable."""
    folders = [tmp_path / "site"]
    return find_nvcc(folders, {"PATH": str(tmp_path / "empty"), **environment}, default)


def test_nvcc_of_cuda_home_comes_first(tmp_path: Path) -> None:
    nvcc = fake_toolkit(tmp_path / "home")
    other = fake_toolkit(tmp_path / "path")
    found = find(tmp_path, CUDA_HOME=str(tmp_path / "home"), PATH=str(other.parent))
    assert found == toolchain.Nvcc(nvcc, (13, 0), [tmp_path / "home/include"], tmp_path / "home/lib")


def test_nvcc_on_path_may_be_a_wrapper(tmp_path: Path) -> None:
    nvcc = fake_toolkit(tmp_path / "toolkit")
    wrapper = write(tmp_path / "path/nvcc", f'#!/bin/sh\nexec {nvcc} "$@"\n', executable=True)
    found = find(tmp_path, PATH=str(wrapper.parent))
    assert found is not None and found.path == wrapper and found.lib == tmp_path / "toolkit/lib"


def test_nvcc_of_pip_packages(tmp_path: Path) -> None:
    nvcc = fake_toolkit(tmp_path / "site/nvidia/cu13")
    found = find(tmp_path)
    assert found is not None and found.path == nvcc and found.version == "13.0"


def test_nvcc_of_the_default_place_or_none(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    nvcc = fake_toolkit(tmp_path / "default")
    found = find(tmp_path, default=str(tmp_path / "default"))
    assert found is not None and found.path == nvcc


def test_cuda_home_without_nvcc_is_an_error(tmp_path: Path) -> None:
    fake_toolkit(tmp_path / "path")
    with pytest.raises(BuildError, match=r"CUDA_HOME=.*holds no bin/nvcc.*KITTENS_TORCH_ARCHS=none"):
        find(tmp_path, CUDA_HOME=str(tmp_path / "nothing"), PATH=str(tmp_path / "path/bin"))


@pytest.mark.parametrize(
    ("toolkit", "message"),
    [
        ({"release": "12.2"}, r"is of CUDA 12\.2, which is too old: set CUDA_HOME .* at least 12\.8"),
        ({"fails": True}, r"does not run .*exit status 1"),
        ({"left_out": "lib/libcudart_static.a"}, r"incomplete: libcudart_static\.a not found.*nvidia-cuda-runtime"),
        ({"left_out": "include/cccl/nv/target"}, r"incomplete: nv/target not found.*nvidia-cuda-cccl"),
    ],
)
def test_useless_nvcc_is_reported(tmp_path: Path, toolkit: dict[str, object], message: str) -> None:
    fake_toolkit(tmp_path / "home", **toolkit)  # type: ignore[arg-type]
    with pytest.raises(BuildError, match=message):
        find(tmp_path, CUDA_HOME=str(tmp_path / "home"))


# torch


def fake_torch(folder: Path, version: str, cuda: str = "None") -> Path:
    write(folder / "torch/version.py", f"__version__ = {version!r}\ncuda: Optional[str] = {cuda}\n")
    return folder


@pytest.fixture
def no_torch_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_torch_on_path")
def test_row_51_torch_is_found_without_importing_it(tmp_path: Path) -> None:
    old = fake_torch(tmp_path / "old", "2.10.1")
    new = fake_torch(tmp_path / "new", "2.12.0+cu130", "'13.0'")
    assert find_torch([old, new]) == toolchain.Torch(new / "torch", "2.12.0+cu130", "13.0")
    assert find_torch([old]) is None


@pytest.mark.usefixtures("no_torch_on_path")
def test_row_51_isolated_build_asks_for_torch_only_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path]
    monkeypatch.setattr(toolchain, "site_folders", lambda: folders)
    assert "torch>=2.11" in backend.get_requires_for_build_wheel()
    assert "torch>=2.11" in backend.get_requires_for_build_editable()
    assert "torch>=2.11" not in backend.get_requires_for_build_sdist()
    fake_torch(tmp_path, "2.11.0")
    assert "torch>=2.11" not in backend.get_requires_for_build_wheel()
    assert "torch>=2.11" not in backend.get_requires_for_build_editable()


@pytest.mark.usefixtures("no_torch_on_path")
def test_missing_and_old_torch_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "site_folders", lambda: [tmp_path])
    with pytest.raises(BuildError, match=rf"torch >= 2\.11 .*found none in {tmp_path}.*pip install --upgrade torch"):
        toolchain.require_torch()
    fake_torch(tmp_path, "2.9.0")
    with pytest.raises(BuildError, match=rf"torch >= 2\.11 .*found torch 2\.9\.0 in {tmp_path}/torch"):
        toolchain.require_torch()


def test_old_setuptools_is_reported() -> None:
    toolchain.require_setuptools("77.0.1")
    with pytest.raises(BuildError, match=r"setuptools >= 77 .*found 65\.5\.0.*pip install --upgrade setuptools"):
        toolchain.require_setuptools("65.5.0")


# Compiling


@pytest.fixture
def small_tree(tmp_path: Path) -> list[Compilation]:
    """Three files, two of which include a header."""
    write(tmp_path / "value.h", "#pragma once\ninline int value() { return 7; }\n")
    for name in ("one", "two"):
        write(tmp_path / f"{name}.cpp", f'#include "value.h"\nint {name}() {{ return value(); }}\n')
    write(tmp_path / "three.cpp", "int three() { return 3; }\n")
    sources = [Path(f"{name}.cpp") for name in ("one", "two", "three")]
    command = [GXX or "", "-fPIC", "-I."]
    return [Compilation(source, Path("out", f"{source}.o"), command, root=tmp_path) for source in sources]


def touch(path: Path) -> None:
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1_000_000))


def compiled(compilations: list[Compilation], log_file: Path | None = None) -> set[str]:
    """What compile_all said it compiled, by the name of the source."""
    lines: list[str] = []
    count = compile_all(compilations, 2, lines.append, log_file)
    assert sorted(re.findall(r"^\[(\d+)/\d+\]", "\n".join(lines), re.MULTILINE)) == [str(i + 1) for i in range(count)]
    return {line.split()[1] for line in lines}


@needs_gxx
def test_only_what_changed_is_compiled(small_tree: list[Compilation]) -> None:
    root = small_tree[0].root
    assert compiled(small_tree) == {"one.cpp", "two.cpp", "three.cpp"}
    assert compiled(small_tree) == set()
    touch(root / "two.cpp")
    assert compiled(small_tree) == {"two.cpp"}
    touch(root / "value.h")
    assert compiled(small_tree) == {"one.cpp", "two.cpp"}
    (root / "out/three.cpp.o").unlink()
    assert compiled(small_tree) == {"three.cpp"}
    other = [Compilation(c.source, c.object, [*c.command, "-O1"], root=root) for c in small_tree]
    assert compiled(other[:1]) == {"one.cpp"}


@needs_gxx
def test_linking_waits_for_a_change(small_tree: list[Compilation]) -> None:
    root, objects = small_tree[0].root, [compilation.object for compilation in small_tree]
    compiled(small_tree)
    arguments = (objects, Path("out/small.so"), [GXX or "", "-shared"], [], root)
    assert link(*arguments) and not link(*arguments)
    touch(root / "one.cpp")
    compiled(small_tree)
    assert link(*arguments)


@needs_gxx
def test_log_keeps_what_the_compiler_said_of_every_file(small_tree: list[Compilation], tmp_path: Path) -> None:
    write(tmp_path / "one.cpp", "int one() { int unused; return 1; }\n")
    warned = [Compilation(c.source, c.object, [*c.command, "-Wall"], root=tmp_path) for c in small_tree]
    for _ in range(2):  # the second time nothing is compiled
        compiled(warned, tmp_path / "log.json")
        text = (tmp_path / "log.json").read_text()
        assert "unused" in text
        assert all(str(compilation.source) in text for compilation in warned)


@needs_gxx
def test_failure_shows_the_command_and_the_compiler_s_words(small_tree: list[Compilation], tmp_path: Path) -> None:
    write(tmp_path / "two.cpp", "int two() { return nothing_of_that_name; }\n")
    with pytest.raises(BuildError, match=r"two\.cpp failed \(exit 1\):\n.*-c two\.cpp(.|\n)*nothing_of_that_name"):
        compiled(small_tree)
    write(tmp_path / "two.cpp", "int two() { return 2; }\n")
    assert "two.cpp" in compiled(small_tree)


def test_dependency_files_are_read_as_make_does() -> None:
    text = "out/a.o: a.cpp \\\n  /opt/with\\ space/b.h \\\n c$$d.h\n\nb.h:\n"
    assert parse_dependencies(text) == ["a.cpp", "/opt/with space/b.h", "c$d.h"]


@needs_gxx
def test_code_for_newer_cpus_is_kept_to_itself(tmp_path: Path) -> None:
    """Both files define helper<int>(), one for a newer CPU. The other's is not replaced by it, whatever the order."""
    helper = "template <class T> __attribute__((noinline)) T helper(T x) { static T last; return last += x; }\n"
    write(tmp_path / "newer.cpp", helper + "namespace cpu_new { int run(int x) { return helper(x); } }\n")
    write(tmp_path / "oldest.cpp", helper + "int run(int x) { return helper(x); }\n")
    flags = [GXX or "", "-fPIC", "-O2", "-fno-gnu-unique", "-Wa,--noexecstack"]
    newer = Compilation(Path("newer.cpp"), Path("newer.o"), flags, keep_global="cpu_new", root=tmp_path)
    oldest = Compilation(Path("oldest.cpp"), Path("oldest.o"), flags, root=tmp_path)
    compiled([newer, oldest])

    def symbols(name: str) -> dict[str, str]:
        told = subprocess.run(["nm", tmp_path / name], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1]: line.split()[-2] for line in told.splitlines()}

    function, state = "_Z6helperIiET_S0_", "_ZZ6helperIiET_S0_E4last"
    assert symbols("newer.o")[function] == "t" and symbols("oldest.o")[function] == "W"
    assert symbols("newer.o")["_ZN7cpu_new3runEi"] == "T"
    assert symbols("newer.o")[state] == "V", "variables stay shared"
    link([Path("newer.o"), Path("oldest.o")], Path("both.so"), [GXX or "", "-shared"], [], tmp_path)
    addresses = subprocess.run(["nm", tmp_path / "both.so"], capture_output=True, text=True, check=True).stdout
    assert addresses.count(f" {function}\n") == 2 and addresses.count(f" {state}\n") == 1
