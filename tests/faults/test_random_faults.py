"""Some of the faults of tests/faults/report.py, always the same ones; that runs hundreds."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.injection import judge, random_faults
from tests.faults.jobs import run_with_fault

RANKS = 3
FAULTS = list(itertools.islice(random_faults(2026, RANKS), 18))


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[f"{one.kind}-{one.moment}" for one in FAULTS])
def test_a_fault_ends_as_it_must(number):
    fault = FAULTS[number]
    outcome = run_with_fault(fault, ("torch", "mpi")[number % 2], RANKS)
    assert judge(fault, outcome, RANKS).problems == (), f"{fault}\n{outcome.output}"
