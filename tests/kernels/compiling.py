"""What the tests that compile the native code share: where its sources are, with which flags, and a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.ranks import ROOT

KERNELS, TRANSPORTS = ROOT / "hvdkit/kernels/csrc", ROOT / "hvdkit/transports/csrc"
ARENA = ROOT / "hvdkit/arena/csrc"
NEEDS_PYTHON = {"arguments.cpp", "codec_arguments.cpp", "codec_module.cpp", "module.cpp", "turns_module.cpp"}
# As setup.py has them, where they change what the code means.
MEANING = ["-std=c++17", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def sources_without_python(*folders: Path) -> list[Path]:
    """The sources of these folders that a compiler without Python's headers takes."""
    return [one for folder in folders for one in sorted(folder.glob("*.cpp")) if one.name not in NEEDS_PYTHON]


def run(command: list[str], seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)


def compile_one(command: list[str], source: Path) -> None:
    """Run the compiler; fails with what it printed."""
    done = run([*command, str(source)])
    assert done.returncode == 0, f"{source}:\n{done.stderr}"


def compile_all(command: list[str], sources: list[Path], folder: Path) -> list[Path]:
    """Compile each source in ``folder``, as many at a time as there are cores. Returns the objects."""
    objects = [folder / f"{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, into: compile_one([*command, "-c", "-o", str(into)], source), sources, objects))
    return objects


def compile_program(command: list[str], sources: list[Path], folder: Path) -> Path:
    """Compile and link the sources in a new folder. Returns the program."""
    folder.mkdir()
    objects = compile_all(command, sources, folder)
    linked = run([*command, *map(str, objects), "-o", str(folder / "program")])
    assert linked.returncode == 0, linked.stderr
    return folder / "program"


def driver_sources() -> list[Path]:
    """The native code without what needs Python, and the program that runs it."""
    driver = sorted((ROOT / "tests/kernels/sanitizers").glob("*.cpp"))
    return [*sources_without_python(KERNELS, TRANSPORTS, ARENA), *driver]


def some_compiler() -> str:
    """A C++ compiler of this machine; skips the test if there is none."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or shutil.which(compiler) is None:
        pytest.skip("no C++ compiler found")
    return compiler
