"""Named operations in a different order on every rank give what numpy gives, over what carries real processes.

``test_sessions.py`` does the same on threads, with many more programs.
"""

from __future__ import annotations

import sys

import pytest

from tests.ranks import TORCH, run_ranks


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
def test_operations_in_any_order_give_what_numpy_gives(seed, transport):
    command = [sys.executable, "-m", "tests.engine.shuffled", str(seed)]
    status, output = run_ranks(command, 2, transport, timeout=120, preload=TORCH)
    assert status == 0, output
    assert output.count("AGREES") == 2
