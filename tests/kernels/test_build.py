"""Where nothing can be compiled, a build says so in one line and ends well, and the numpy kernels are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def build(tree: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    # Older setuptools compile C++ with CC.
    environment = {**os.environ, "CXX": compiler, "CC": compiler, "PYTHONPATH": ""}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment, timeout=240, check=False)


@pytest.mark.parametrize("compiler", NO_COMPILERS)
def test_without_a_compiler_the_build_ends_well_and_the_numpy_kernels_are_used(tree: Path, compiler: str) -> None:
    built = build(tree, compiler)
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stdout.count(f"hvdkit: {NO_COMPILERS[compiler]}, using the numpy kernels\n") == 1, built.stdout
    assert not list(tree.rglob("*.so"))
    used = subprocess.run(
        [sys.executable, "-W", "error", "-c", WHICH], capture_output=True, text=True, cwd=tree, timeout=60, check=False
    )
    assert used.stdout.split() == [str(tree / "hvdkit/kernels/__init__.py"), "numpy"], used.stderr


@pytest.mark.thorough
def test_an_error_in_our_own_code_fails_the_build(tree: Path) -> None:
    compiler = some_compiler()
    for source in tree.glob("hvdkit/*/csrc/*.cpp"):
        source.write_text("#error ours\n")
    built = build(tree, compiler)
    if "using the numpy kernels" in built.stdout:
        pytest.skip(f"{compiler} cannot compile an extension here")
    assert built.returncode != 0
    assert "ours" in built.stdout + built.stderr
