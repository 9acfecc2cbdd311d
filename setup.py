"""Builds the native kernels, if this machine can; everything else about the package is in pyproject.toml.

``HVDKIT_REQUIRE_NATIVE=1``: the build fails where it cannot. ``HVDKIT_PURE=1``: it does not try.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
REQUIRED = os.environ.get("HVDKIT_REQUIRE_NATIVE") == "1"
PURE = os.environ.get("HVDKIT_PURE") == "1"
NO_COMPILER, NO_HEADERS = "no C++ compiler found", "no Python headers found"
HINTS = {
    NO_COMPILER: "install one that knows C++17 (Debian: g++), or name it in CXX and CC",
    NO_HEADERS: "install those of this Python (Debian: python3-dev)",
}


def reason_not_to_build(compile_command: list[str]) -> tuple[str, str] | None:
    """Why this machine cannot compile an extension, and the particulars; None if it can."""
    program = compile_command[0]
    if shutil.which(program) is None:
        return NO_COMPILER, ""
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
        return NO_HEADERS, ""
    return NO_COMPILER, f" ({program} cannot compile C++17)"


class OptionalBuildExt(build_ext):
    """Where nothing can be compiled, installs without the native kernels and says so in one line, if it may."""

    def build_extensions(self) -> None:
        """Probes the compiler first, so that an error in our own code still fails the build."""
        # CXX has an entry of its own in newer setuptools; older ones compile C++ with CC.
        command = getattr(self.compiler, "compiler_so_cxx", None) or self.compiler.compiler_so
        includes = [f"-I{folder}" for folder in self.compiler.include_dirs]
        reason = reason_not_to_build([*command, *includes])
        if reason is None:
            super().build_extensions()
            return
        fact, particulars = reason
        if REQUIRED:
            sys.exit(
                f"hvdkit: {fact}{particulars}, and HVDKIT_REQUIRE_NATIVE=1 allows no build without the native kernels\n"
                f"HINT: {HINTS[fact]}, or unset HVDKIT_REQUIRE_NATIVE to use the numpy kernels."
            )
        print(f"hvdkit: {fact}{particulars}, using the numpy kernels", flush=True)
        self.become_pure()

    def become_pure(self) -> None:
        """Leaves nothing compiled, and no tag on a wheel that says otherwise."""
        if not self.inplace:  # what an earlier build left in build/ would be packed
            for extension in self.extensions:
                Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)
        self.extensions = self.distribution.ext_modules = []
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        if wheel is not None:
            wheel.root_is_pure = True


if REQUIRED and PURE:
    sys.exit(
        "hvdkit: HVDKIT_REQUIRE_NATIVE=1 asks for the native kernels, and HVDKIT_PURE=1 for a build without them\n"
        "HINT: set one of the two."
    )

# The sources take a minute one after the other. More at once than this would need gigabytes.
ParallelCompile(max=8).install()

NATIVE = Pybind11Extension(
    "hvdkit.kernels._native",
    sources=sorted(str(path) for folder in CSRC for path in Path(folder).glob("*.cpp")),
    depends=sorted(str(path) for folder in CSRC for path in Path(folder).glob("*.h")),
    cxx_std=17,
    extra_compile_args=FLAGS,
    extra_link_args=LINKED,
)
setup(
    ext_modules=[] if PURE else [NATIVE],
    cmdclass={"build_ext": OptionalBuildExt},
)
