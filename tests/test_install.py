"""The built library, what importing the package does, and the ways to install it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import kittens_torch
from kittens_torch.ops import LIBRARY

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(kittens_torch.__file__).parent
compiled_here = pytest.mark.skipif(
    not (ROOT / "build/kittens_torch/compile_log.json").exists(), reason="nothing was compiled in this source tree"
)


def run(command: list[str | Path], cwd: Path, environment: dict[str, str] | None = None, fails: bool = False) -> str:
    """Runs a command to success, or to failure if it is to fail, and returns what it printed."""
    told = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (told.returncode != 0) == fails, told.stdout
    return told.stdout


def run_python(code: str, cwd: Path, environment: dict[str, str] | None = None, fails: bool = False) -> str:
    """Runs code in a new interpreter that imports the kittens_torch under test."""
    path = {"PYTHONPATH": str(PACKAGE.parent), **(environment or {})}
    return run([sys.executable, "-W", "ignore", "-c", code], cwd, path, fails)


# The library


def readelf(option: str) -> str:
    return subprocess.run(["readelf", "--wide", option, LIBRARY], capture_output=True, text=True, check=True).stdout


def versions(text: str, name: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, found.split("."))) for found in re.findall(rf"\b{name}_([\d.]+)", text)]


needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here")


@needs_readelf
def test_library_needs_neither_python_nor_cuda_libraries() -> None:
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", readelf("--dynamic")))
    system = ("libstdc++.so", "libgcc_s.so", "libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed - {"libtorch_cpu.so", "libc10.so"} if not name.startswith(system)] == []
    undefined = re.findall(r"UND (\S+)", readelf("--dyn-syms"))
    assert "torch_library_impl" in undefined
    assert [name for name in undefined if re.match(r"_?Py[A-Z_]|cu[A-Z]|cuda[A-Z]|__cuda", name)] == []


@needs_readelf
def test_row_53_library_asks_for_no_newer_libc_than_promised() -> None:
    """Built with glibc <= 2.36 and g++ <= 12 it runs where glibc is 2.34 and libstdc++ is that of g++ 11."""
    library, loaded = readelf("--version-info"), os.confstr("CS_GNU_LIBC_VERSION")
    glibc = max(versions(library, "GLIBC"))
    glibcxx = max(versions(library, "GLIBCXX"))
    assert loaded is not None
    here = tuple(map(int, loaded.split()[1].split(".")))
    assert glibc <= here
    if here > (2, 36):
        pytest.skip(f"built with glibc {loaded.split()[1]}, whose programs need no older one")
    assert glibc <= (2, 34)
    assert glibcxx <= (3, 4, 29)


# Importing


@pytest.mark.parametrize("hidden", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_row_54_import_needs_no_driver_and_starts_no_cuda(tmp_path: Path, hidden: bool) -> None:
    code = """
import os, torch, kittens_torch
numbers = [number for number in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{number}")]
open_files = [os.readlink(f"/proc/self/fd/{number}") for number in numbers]
assert not [name for name in open_files if name.startswith("/dev/nvidia")], open_files
assert not torch.cuda.is_initialized()
kittens_torch.build_info()
assert not torch.cuda.is_initialized()
query = torch.randn(1, 2, 5, 8)
ours = kittens_torch.scaled_dot_product_attention(query, query, query)
assert torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(query, query, query), atol=1e-5)
assert not torch.cuda.is_initialized()
print("works")
"""
    environment = {"CUDA_VISIBLE_DEVICES": ""} if hidden else {}
    assert run_python(code, tmp_path, environment).splitlines()[-1] == "works"


def test_forked_child_computes(tmp_path: Path) -> None:
    """The parent has imported the package; importing must leave no thread and no lock that a child would miss."""
    code = """
import os, torch, kittens_torch
child = os.fork()
if child == 0:
    query = torch.ones(1, 1, 3, 4)
    os._exit(0 if torch.equal(kittens_torch.attention(query, query, query), query) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    run_python(code, tmp_path)


@pytest.mark.gpu
def test_row_54_import_in_a_fork_of_a_process_that_uses_cuda(tmp_path: Path) -> None:
    code = """
import os, torch
torch.ones(1, device="cuda")
child = os.fork()
if child == 0:
    import kittens_torch
    query = torch.ones(1, 1, 3, 4)
    os._exit(0 if torch.equal(kittens_torch.attention(query, query, query), query) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
"""
    run_python(code, tmp_path)


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package whose compiled parts a test may break."""
    shutil.copytree(PACKAGE, tmp_path / "copy/kittens_torch", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def import_error(folder: Path, before: str = "") -> str:
    told = run_python(f"{before}\nimport kittens_torch", folder, {"PYTHONPATH": str(folder)}, fails=True)
    return told.splitlines()[-1]


def test_row_54_missing_library_is_reported(package_copy: Path) -> None:
    library = package_copy / "kittens_torch" / LIBRARY.name
    library.unlink()
    error = import_error(package_copy)
    assert error.startswith("ImportError: kittens_torch")
    assert str(library) in error and "pip install ." in error


def test_row_53_library_that_does_not_load_is_reported(package_copy: Path) -> None:
    library = package_copy / "kittens_torch" / LIBRARY.name
    library.unlink()
    library.write_bytes(b"not an ELF file" * 100)
    error = import_error(package_copy)
    assert error.startswith("ImportError: kittens_torch")
    assert str(library) in error and torch.__version__ in error and "pip install --force-reinstall" in error


def test_row_53_old_torch_is_reported(package_copy: Path) -> None:
    error = import_error(package_copy, "import torch; torch.__version__ = '2.9.1+cu126'")
    assert error.startswith("ImportError: kittens_torch")
    assert "torch >= 2.11" in error and "2.9.1+cu126" in error


def test_newer_torch_is_taken(tmp_path: Path) -> None:
    run_python("import torch; torch.__version__ = '3.0.0a0+git1234'; import kittens_torch", tmp_path)


def test_works_without_the_plan_module(package_copy: Path) -> None:
    for path in package_copy.glob("kittens_torch/_plan*.so"):
        path.unlink()
    # The finder of an editable install would take the missing module from the source tree.
    code = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
import torch, kittens_torch
query = torch.ones(1, 1, 3, 4)
assert torch.equal(kittens_torch.attention(query, query, query), query)
info = kittens_torch.build_info()
assert info["plan_module"] is None and info["archs"] is None and info["version"]
assert "plan module" in kittens_torch.explain(query, query, query).reason
runpy.run_module("kittens_torch", run_name="__main__")
"""
    told = run_python(code, package_copy, {"PYTHONPATH": str(package_copy)})
    assert "plan module    none, explain() tells less (" in told


def test_report_says_what_a_bug_report_needs(tmp_path: Path) -> None:
    told = run([sys.executable, "-W", "ignore", "-m", "kittens_torch"], tmp_path, {"PYTHONPATH": str(PACKAGE.parent)})
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in told.splitlines())
    info = kittens_torch.build_info()
    assert lines["kittens_torch"] == info["version"]
    assert lines["torch"].startswith(torch.__version__)
    assert lines["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert lines["library"] == str(LIBRARY)
    assert lines["plan module"].startswith(info["plan_module"] or "none")
    archs = " ".join(info["archs"] or ["unknown"])
    assert lines["GPU kernels"] == (archs if info["cuda_kernels"] else "none (CPU-only build)")
    assert str(info["cpu_selected"]) in lines["CPU kernels"]
    assert f"{torch.get_num_threads()} torch threads" in lines["CPU"]
    assert lines["machines"].startswith("cpu")
    assert {"built with", "driver"} <= set(lines)
    assert "GPU" in lines or "GPU 0" in lines


def test_build_info_agrees_with_the_library_and_the_package() -> None:
    info = kittens_torch.build_info()
    assert info["torch"] == torch.__version__ and info["torch_cuda"] == torch.version.cuda
    assert f'"{info["version"]}"' in (PACKAGE / "_version.py").read_text()
    if info["plan_module"] is None:
        pytest.skip("the plan module was not built")
    assert (info["archs"] == ["90a"]) == info["cuda_kernels"]
    assert info["cpu_selected"] in info["cpu_features"]
    assert tuple(map(int, info["torch_headers"].split(".")[:2])) >= (2, 11)


# Building and installing the real tree, in a scratch folder


UNWANTED = (".git", ".venv", "dist", "lib.*", "bdist.*", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the source tree with its compiled objects, so that nothing need be compiled again."""
    return Path(shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(*UNWANTED)))


@pytest.mark.build
@compiled_here
def test_touching_one_instance_recompiles_only_it(tree: Path) -> None:
    command: list[str | Path] = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    run(command, tree)
    assert re.search(r"\b0 of \d+ files compiled", run(command, tree))
    touched = tree / "csrc/attention/instances/forward_cpu.cpp"
    os.utime(touched)
    told = run(command, tree)
    assert "[1/1] csrc/attention/instances/forward_cpu.cpp" in told
    assert re.search(r"\b1 of \d+ files compiled", told)


@pytest.mark.build
def test_row_51_sdist_holds_all_it_needs_and_needs_no_torch(tree: Path, tmp_path: Path) -> None:
    """It is made where importing torch fails, and neither git nor a compiler is within reach."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('torch was imported')\n")
    environment = {"PYTHONPATH": str(blocked), "PATH": str(blocked)}
    run([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path], tree, environment)
    with tarfile.open(next(tmp_path.glob("kittens_torch-*.tar.gz"))) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    folders = [ROOT / name for name in ("csrc", "kittens_build", "kittens_torch", "tests")]
    kept = [path for folder in folders for path in folder.rglob("*")]
    suffixes = (".h", ".cuh", ".cpp", ".cu", ".py", ".pyi", "py.typed")
    expected = {str(path.relative_to(ROOT)) for path in kept if path.name.endswith(suffixes)}
    assert len(expected) > 50
    assert expected - members == set()
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"} <= members
    assert not [name for name in members if name.endswith((".so", ".o"))]


@pytest.fixture
def environment_of_its_own(tmp_path: Path) -> Path:
    """A virtual environment that holds torch and whatever else is installed here, but not kittens_torch."""
    folder = tmp_path / "venv"
    run([sys.executable, "-m", "venv", folder], tmp_path)
    site = next(folder.glob("lib/python3*/site-packages"))
    installed = Path(torch.__file__).parent
    for path in [installed, *installed.parent.glob("torch-*.dist-info")]:
        (site / path.name).symlink_to(path)
    for path in site.glob("setuptools*"):
        shutil.rmtree(path)  # The one installed here is used, as the others are.
    (site / "others.pth").write_text(f"{installed.parent}\n")
    return folder


INSTALLS = {
    "isolated": ["."],
    "not isolated": ["--no-build-isolation", "."],
    "editable": ["--no-build-isolation", "--editable", "."],
}


@pytest.mark.build
@pytest.mark.slow
@compiled_here
@pytest.mark.parametrize("arguments", INSTALLS.values(), ids=INSTALLS)
def test_row_51_pip_install(tree: Path, environment_of_its_own: Path, arguments: list[str], tmp_path: Path) -> None:
    python = environment_of_its_own / "bin/python"
    told = run([python, "-m", "pip", "install", "-v", "--no-deps", *arguments], tree)
    assert "Successfully installed kittens_torch" in told
    assert not re.search(r"(Collecting|Downloading) torch\b", told)
    where = "import kittens_torch; print(kittens_torch.build_info()['library'])"
    library = Path(run([python, "-W", "ignore", "-c", where], tmp_path).splitlines()[-1])
    assert library.is_relative_to(tree if "--editable" in arguments else environment_of_its_own)
