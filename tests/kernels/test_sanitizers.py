"""The native code, less what binds it to Python, runs clean under the sanitizers of addresses and of threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.compiling import MEANING, compile_program, driver_sources, run, some_compiler

pytestmark = pytest.mark.thorough
SANITIZERS = {"addresses": "address,undefined", "threads": "thread"}
FLAGS = [*MEANING, "-O1", "-g"]
# Under a sanitizer clang cannot vectorise what it is asked to; other compilers ignore the name of that warning.
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-pass-failed", "-fno-sanitize-recover=all"]

# Ends well unless it is asked for a fault that one of the sanitizers must see.
FAULTS = """
#include <climits>
#include <cstring>
#include <thread>
int main(int count, char** arguments) {
    if (count == 1) return 0;
    if (std::strcmp(arguments[1], "overflow") == 0) {
        volatile int large = INT_MAX;
        large = large + count;
    }
    if (std::strcmp(arguments[1], "overrun") == 0) {
        volatile char* const memory = new char[count];
        memory[count] = 1;
        delete[] memory;
    }
    if (std::strcmp(arguments[1], "race") == 0) {
        int number = 0;
        std::thread other([&] { for (int i = 0; i < 1000; ++i) ++number; });
        for (int i = 0; i < 1000; ++i) ++number;
        other.join();
    }
    return 0;
}
"""
FAULTS_SEEN = {"addresses": ["overflow", "overrun"], "threads": ["race"]}


class Sanitized:
    """The programs in sanitizers/, compiled for a sanitizer."""

    def __init__(self, compiler: str, sanitizer: str, folder: Path) -> None:
        self.name = sanitizer
        command = [compiler, *FLAGS, f"-fsanitize={SANITIZERS[sanitizer]}"]
        source = folder / "faults.cpp"
        source.write_text(FAULTS)
        try:
            self.faults = compile_program(command, [source], folder / "faults")
        except AssertionError as error:
            pytest.skip(f"{compiler} cannot link with -fsanitize={SANITIZERS[sanitizer]}: {str(error)[-300:]}")
        # Where addresses are more random than an old runtime knows, it starts only without that.
        starts = [[], ["setarch", "-R"]] if shutil.which("setarch") else [[]]
        self._start = next((start for start in starts if run([*start, str(self.faults)]).returncode == 0), None)
        if self._start is None:
            pytest.skip(f"the runtime of -fsanitize={SANITIZERS[sanitizer]} does not start here")
        self.driver = compile_program(command, driver_sources(), folder / "driver")

    def run(self, program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        assert self._start is not None
        return run([*self._start, str(program), *map(str, arguments)])

    def check(self, *arguments: object) -> None:
        """Run the driver; fails with what the sanitizer printed."""
        done = self.run(self.driver, *arguments)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-8000:]}"
        assert done.stdout == "nothing found\n"


@pytest.fixture(scope="session", params=SANITIZERS)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    return Sanitized(some_compiler(), request.param, tmp_path_factory.mktemp(request.param))


def test_the_sanitizer_sees_faults_and_only_faults(sanitized):
    assert sanitized.run(sanitized.faults).returncode == 0
    for fault in FAULTS_SEEN[sanitized.name]:
        found = sanitized.run(sanitized.faults, fault)
        assert found.returncode != 0
        assert "Sanitizer" in found.stderr or "runtime error" in found.stderr


def test_kernels_are_clean_on_any_dtype_size_address_and_value(sanitized):
    sanitized.check("kernels", 1, 100 if sanitized.name == "addresses" else 3)


@pytest.mark.parametrize("seed", [1, 2])
def test_bells_posts_and_staged_collectives_are_clean_between_ranks_that_are_threads(sanitized, seed):
    sanitized.check("ranks", seed, 500)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_arena_is_clean_with_threads_that_free_each_others_blocks(sanitized, seed):
    sanitized.check("arena", seed, 500)
