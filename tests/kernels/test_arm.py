"""Codecs give the same bits on ARM, where compilers make NEON of their loops, as on this processor.

Run by qemu, so only whether they are right shows, not how quick they are. It takes a compiler for aarch64 and qemu:
`apt-get install g++-aarch64-linux-gnu qemu-user`.
"""

from __future__ import annotations

import shutil

import pytest

from tests.kernels.compiling import MEANING, compile_program, driver_sources, run, some_compiler

pytestmark = pytest.mark.thorough
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = [*MEANING, "-O3", "-Wall", "-Wextra", "-Werror", "-static"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The commands that run the sanitizers' program, built as for users, on this processor and on ARM."""
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (apt-get install g++-aarch64-linux-gnu qemu-user)")
    folder = tmp_path_factory.mktemp("arm")
    native = compile_program([some_compiler(), *FLAGS], driver_sources(), folder / "native")
    arm = compile_program([COMPILER, *FLAGS], driver_sources(), folder / "arm")
    return [[str(native)], [EMULATOR, str(arm)]]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_codecs_give_the_same_bits_on_arm(programs, seed):
    native, arm = (run([*program, "codecs", str(seed), "20"], 300.0) for program in programs)
    assert native.returncode == arm.returncode == 0, native.stderr + arm.stderr
    assert native.stdout == arm.stdout
    assert len(native.stdout.splitlines()) == 2


def test_kernels_are_right_on_arm(programs):
    done = run([*programs[1], "kernels", "1", "20"], 300.0)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing found\n"
