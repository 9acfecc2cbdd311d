"""The package picks its kernels once, and works without the compiled ones."""

from __future__ import annotations

import platform
import subprocess
import sys

from hvdkit import kernels
from tests.kernels.arrays import native, needs_native

WITHOUT_NATIVE = """
import sys
sys.modules["hvdkit.kernels._native"] = None
import numpy
from hvdkit import kernels
into = numpy.zeros(3, "f4")
kernels.reduce_into(into, [into + 1, into + 2], kernels.ReduceOp.SUM, 0.5)
print(kernels.backend(), into.tolist())
"""


def test_native_kernels_are_used_where_they_were_built():
    assert kernels.backend() == ("numpy" if native is None else "native")


def test_numpy_kernels_take_over_where_nothing_was_compiled():
    run = subprocess.run([sys.executable, "-c", WITHOUT_NATIVE], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "numpy [1.5, 1.5, 1.5]"


@needs_native
def test_loops_that_are_written_in_several_ways_run_with_what_this_processor_has() -> None:
    """Which is quickest is measured once, so that a process does not change its mind."""
    from hvdkit.kernels._native import instructions

    chosen = instructions()
    assert chosen.keys() == {"select", "sign"}
    assert set(chosen.values()) <= {"portable", "avx2", "avx512"}
    if platform.machine() != "x86_64":
        assert set(chosen.values()) == {"portable"}
    assert instructions() == chosen
