"""Thousands of random operations on four ranks of which one is late now and then give what each can compute alone."""

import sys

import pytest

from tests.ranks import TORCH, run_ranks


@pytest.mark.thorough
@pytest.mark.parametrize(("per_node", "operations"), [(4, 2000), (2, 1000)])
def test_random_operations_with_a_late_rank_give_the_right_results(per_node, operations, transport):
    command = [sys.executable, "-m", "tests.engine.stress", "7", str(operations)]
    status, output = run_ranks(command, 4, transport, timeout=240, per_node=per_node, preload=TORCH)
    assert status == 0, output[-6000:]
    assert output.count("SURVIVED") == 4
