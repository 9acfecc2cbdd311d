"""Where nothing can be compiled, a build ends well with the numpy kernels; a wheel's tag says what is in the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.kernels.compiling import some_compiler
from tests.ranks import ROOT

# What a compiler is that is not there, and one that refuses everything; and what is said about it.
NO_COMPILERS = {
    "/nonexistent/c++": "no C++ compiler found",
    "false": "no C++ compiler found (false cannot compile C++17)",
}
WHICH = "from hvdkit import kernels; print(kernels.__file__, kernels.backend())"
IN_PLACE = ("build_ext", "--inplace")
WHEEL = ("--quiet", "bdist_wheel", "--dist-dir", "made")
REQUIRED = """\
hvdkit: {}, and HVDKIT_REQUIRE_NATIVE=1 allows no build without the native kernels
HINT: {}, or unset HVDKIT_REQUIRE_NATIVE to use the numpy kernels.
"""
A_COMPILER = "install one that knows C++17 (Debian: g++), or name it in CXX and CC"
CONTRADICTION = """\
hvdkit: HVDKIT_REQUIRE_NATIVE=1 asks for the native kernels, and HVDKIT_PURE=1 for a build without them
HINT: set one of the two.
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is installed, less what was compiled: a build leaves nothing in the repository."""
    for module in ("setuptools", "pybind11"):
        pytest.importorskip(module, reason="a build without isolation needs it")
    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "hvdkit", tmp_path / "hvdkit", ignore=without)
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(
    tree: Path, compiler: str, command: tuple[str, ...] = IN_PLACE, **variables: str
) -> subprocess.CompletedProcess[str]:
    # Older setuptools compile C++ with CC.
    environment = {**os.environ, "CXX": compiler, "CC": compiler, "PYTHONPATH": ""}
    environment.update({"HVDKIT_REQUIRE_NATIVE": "", "HVDKIT_PURE": "", **variables})
    command = (sys.executable, "setup.py", *command)
    return subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment, timeout=240)


def used(folder: Path) -> list[str]:
    """Where the package in this folder lies, and its kernels; a warning would be an error."""
    command = [sys.executable, "-W", "error", "-c", WHICH]
    told = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout.split()


def unpacked(tree: Path) -> tuple[str, Path]:
    """The tag of the one wheel that was made, and a folder with what is in it."""
    (wheel,) = (tree / "made").iterdir()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tree / "unpacked")
    return wheel.name.split("-", 2)[2], tree / "unpacked"


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("hvdkit/**/*") if path.is_file()}


@pytest.mark.parametrize("compiler", NO_COMPILERS)
def test_without_a_compiler_the_build_ends_well_and_the_numpy_kernels_are_used(tree, compiler):
    built = build(tree, compiler)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout.count(f"hvdkit: {NO_COMPILERS[compiler]}, using the numpy kernels\n") == 1, built.stdout
    assert not list(tree.rglob("*.so"))
    assert used(tree) == [str(tree / "hvdkit/kernels/__init__.py"), "numpy"]


def without_headers(folder: Path) -> str:
    """A compiler that finds no Python.h."""
    compiler = folder / "c++"
    compiler.write_text(f"#!/bin/sh\necho 'probe.cpp:1:10: fatal error: Python.h: {os.strerror(2)}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    return str(compiler)


@pytest.mark.parametrize("compiler", [*NO_COMPILERS, "without headers"])
def test_where_native_kernels_are_required_a_build_that_cannot_make_them_fails_and_says_what_to_do(tree, compiler):
    needed = NO_COMPILERS.get(compiler, "no Python headers found"), A_COMPILER
    if compiler == "without headers":
        compiler, needed = without_headers(tree), (needed[0], "install those of this Python (Debian: python3-dev)")
    built = build(tree, compiler, HVDKIT_REQUIRE_NATIVE="1")
    assert built.returncode == 1
    assert built.stderr.endswith(REQUIRED.format(*needed)), built.stderr
    assert "Traceback" not in built.stderr
    assert "numpy kernels\n" not in built.stdout
    assert not list(tree.rglob("*.so"))


def test_who_requires_native_kernels_and_asks_for_a_pure_build_is_told_that_both_cannot_be(tree):
    built = build(tree, "false", HVDKIT_REQUIRE_NATIVE="1", HVDKIT_PURE="1")
    assert (built.returncode, built.stderr) == (1, CONTRADICTION)


@pytest.mark.parametrize("asked", [True, False])
def test_a_wheel_without_compiled_code_is_for_every_machine_and_uses_the_numpy_kernels(tree, asked):
    expected = contents(tree)
    stale = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "hvdkit/kernels"
    stale.mkdir(parents=True)
    (stale / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_text("of an earlier build")
    # Nobody looks for a compiler where none is wanted.
    built = build(tree, "/nonexistent/c++", WHEEL, **({"HVDKIT_PURE": "1"} if asked else {}))
    assert built.returncode == 0, built.stdout + built.stderr
    assert ("no C++ compiler found" in built.stdout) is not asked
    tag, folder = unpacked(tree)
    assert tag == "py3-none-any.whl"
    assert contents(folder) == expected
    assert used(folder) == [str(folder / "hvdkit/kernels/__init__.py"), "numpy"]


@pytest.mark.thorough
def test_a_wheel_with_native_kernels_is_for_this_python_and_this_machine_and_uses_them(tree):
    compiler = some_compiler()
    expected = contents(tree)
    built = build(tree, compiler, WHEEL, HVDKIT_REQUIRE_NATIVE="1")
    if "install those of this Python" in built.stderr:
        pytest.skip(f"{compiler} cannot compile an extension here")
    assert built.returncode == 0, built.stdout + built.stderr
    tag, folder = unpacked(tree)
    assert re.fullmatch(r"cp3\d+-cp3\d+-linux_\w+\.whl", tag)
    (native,) = contents(folder) - expected
    assert native.startswith("hvdkit/kernels/_native.")
    assert used(folder) == [str(folder / "hvdkit/kernels/__init__.py"), "native"]


@pytest.mark.thorough
def test_an_error_in_our_own_code_fails_the_build(tree):
    compiler = some_compiler()
    for source in tree.glob("hvdkit/*/csrc/*.cpp"):
        source.write_text("#error ours\n")
    built = build(tree, compiler)
    if "using the numpy kernels" in built.stdout:
        pytest.skip(f"{compiler} cannot compile an extension here")
    assert built.returncode != 0
    assert "ours" in built.stdout + built.stderr
