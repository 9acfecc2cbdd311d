"""The package picks its kernels once, and works without the compiled ones."""

import subprocess
import sys

from hvdkit import kernels
from tests.kernels.arrays import native

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
