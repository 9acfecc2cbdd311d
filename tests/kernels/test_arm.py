"""Codecs give the same bits on ARM, where compilers make NEON of their loops, as on this processor.

Run by qemu, so only whether they are right shows, not how quick they are. It takes a compiler for aarch64 and qemu:
`apt-get install g++-aarch64-linux-gnu qemu-user`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kernels.compiling import (
    ARENA,
    KERNELS,
    MEANING,
    TRANSPORTS,
    compile_all,
    run,
    some_compiler,
    sources_without_python,
)
from tests.ranks import ROOT

pytestmark = pytest.mark.thorough
DRIVER = ROOT / "tests/kernels/sanitizers"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def driver(compiler: str, folder: Path) -> Path:
    """The program that the sanitizers run, as it is built for users."""
    folder.mkdir()
    flags = [compiler, *MEANING, "-O3", "-Wall", "-Wextra", "-Werror", "-static"]
    sources = [*sources_without_python(KERNELS, TRANSPORTS, ARENA), *sorted(DRIVER.glob("*.cpp"))]
    objects = compile_all(flags, sources, folder)
    program = folder / "program"
    linked = run([*flags, *map(str, objects), "-o", str(program)])
    assert linked.returncode == 0, linked.stderr
    return program


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The commands that run it on this processor and on ARM."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install g++-aarch64-linux-gnu qemu-user)")
    folder = tmp_path_factory.mktemp("arm")
    here, there = driver(some_compiler(), folder / "here"), driver(COMPILER, folder / "there")
    return [[str(here)], [EMULATOR, str(there)]]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_codecs_give_the_same_bits_on_arm(programs: list[list[str]], seed: int) -> None:
    here, there = (run([*program, "codecs", str(seed), "20"], 300.0) for program in programs)
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    assert here.stdout == there.stdout
    assert len(here.stdout.splitlines()) == 2


def test_kernels_are_right_on_arm(programs: list[list[str]]) -> None:
    done = run([*programs[1], "kernels", "1", "20"], 300.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing found\n"
