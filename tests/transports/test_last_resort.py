"""The end of a process whose library neither comes back nor lets another thread of Python run."""

from __future__ import annotations

import sys

import pytest

from tests.launch.launching import Result, run_to_end
from tests.transports.shared import needs_native

STUCK = "ctypes.PyDLL(None).sleep(60)"  # holds Python's lock meanwhile
WITHOUT_NATIVE = "sys.modules['hvdkit.kernels._native'] = None"


def ended(seconds: float, inside: str, before: str = "") -> Result:
    """How a process ends that does ``inside`` in a context of so many seconds."""
    program = f"""
import ctypes, sys, time
{before}
from hvdkit.transports.waiters import ends_process_after
with ends_process_after({seconds}, "rank 1 waited.\\nHINT: look."):
    {inside}
time.sleep({seconds + 0.3})
print("went on")
"""
    return run_to_end([sys.executable, "-c", program])


@needs_native
def test_it_says_why_and_ends_the_process():
    done = ended(0.3, STUCK)
    assert (done.status, done.stdout, done.stderr) == (1, "", "hvdkit: rank 1 waited.\nHINT: look.\n")


def test_without_the_native_part_it_shows_where():
    done = ended(0.3, STUCK, WITHOUT_NATIVE)
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr.startswith("Timeout ")
    assert 'File "<string>"' in done.stderr


@pytest.mark.parametrize("before", [pytest.param("", marks=needs_native), WITHOUT_NATIVE], ids=["native", "python"])
def test_what_is_through_in_time_goes_on(before):
    done = ended(2.0, "time.sleep(0.1)", before)
    assert (done.status, done.stdout, done.stderr) == (0, "went on\n", "")
