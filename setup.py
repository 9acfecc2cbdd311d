"""Builds the native kernels, if this machine can; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

CSRC = ("hvdkit/kernels/csrc", "hvdkit/transports/csrc", "hvdkit/arena/csrc")
# No contraction: a fused multiply-add would round differently from one processor to the next.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"]
if os.environ.get("HVDKIT_WERROR") == "1":
    FLAGS.append("-Werror")
LINKED = []
if os.environ.get("HVDKIT_COVERAGE") == "1":  # for gcov, whose counters several threads count in
    FLAGS += ["-O1", "--coverage", "-fprofile-update=atomic", "-DHVDKIT_COVERAGE"]
    LINKED.append("--coverage")


def reason_not_to_build(compile_command: list[str]) -> str | None:
    """Why this machine cannot compile an extension, or None if it can."""
    program = compile_command[0]
    if shutil.which(program) is None:
        return "no C++ compiler found"
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cpp")
        probe.write_text(
            "#include <Python.h>\n#include <optional>\nint main() { return std::optional<int>(0).value(); }\n"
        )
        command = [*compile_command, "-std=c++17", "-c", str(probe), "-o", str(probe.with_suffix(".o"))]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if tried.returncode == 0:
        return None
    if "Python.h" in tried.stderr:
        return "no Python headers found"
    return f"no C++ compiler found ({program} cannot compile C++17)"


class OptionalBuildExt(build_ext):
    """Where nothing can be compiled, installs without the native kernels and says so in one line."""

    def build_extensions(self) -> None:
        """Probes the compiler first, so that an error in our own code still fails the build."""
        # CXX has an entry of its own in newer setuptools; older ones compile C++ with CC.
        command = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
        includes = [f"-I{folder}" for folder in self.compiler.include_dirs]
        reason = reason_not_to_build([*command, *includes])
        if reason is None:
            super().build_extensions()
            return
        print(f"hvdkit: {reason}, using the numpy kernels", flush=True)
        self.extensions = []


# The sources take a minute one after the other. More at once than this would need gigabytes.
ParallelCompile(max=8).install()

setup(
    ext_modules=[
        Pybind11Extension(
            "hvdkit.kernels._native",
            sources=sorted(str(path) for folder in CSRC for path in Path(folder).glob("*.cpp")),
            depends=sorted(str(path) for folder in CSRC for path in Path(folder).glob("*.h")),
            cxx_std=17,
            extra_compile_args=FLAGS,
            extra_link_args=LINKED,
        )
    ],
    cmdclass={"build_ext": OptionalBuildExt},
)
