"""Which tests run together: those that one job of ranks serves, and the short tests of a file.

Pure functions of node ids and the seconds that jobs took when all tests were run last.
"""

from __future__ import annotations

import functools
import heapq
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

DURATIONS = Path(__file__).with_name("durations.json")
SECONDS_OF_THE_UNKNOWN = 1.0
ALONE_FROM_SECONDS = 1.0
# Tests that share a fixture that takes long.
TOGETHER = (
    r"tests/examples/test_examples\.py::(test_digits)_(?!.*alone|without)",
    r"tests/kernels/test_sanitizers\.py::.*\[(addresses|threads)",
    r"tests/kernels/test_variants\.py::(test_a_version)",
)
START_SECONDS = 6.0  # until workers have collected the tests


def job_of(nodeid: str, seconds: Mapping[str, float]) -> str:
    """Return the name of the group that a test runs in: its job of ranks, itself if it takes long, else its file."""
    file, _, function = nodeid.partition("::")
    for pattern in TOGETHER:
        if found := re.match(pattern, nodeid):
            return f"{file}::{found[1]}"
    name, _, parameters = function.partition("[")
    if found := re.fullmatch(r"(.*\d@\w+)\]", parameters):  # of tests.on_ranks
        return f"{file}::[{found[1]}]"
    parts = parameters.removesuffix("]").split("-")
    others = [part for part in parts if not part.startswith("case_")]
    if len(others) < len(parts):
        return f"{file}::{name}[{'-'.join(others)}]"
    return nodeid if seconds.get(nodeid, 0.0) >= ALONE_FROM_SECONDS else file


def told_of(nodeids: Mapping[str, str], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each job. ``nodeids``: the job of each test; ``seconds``: of each test."""
    told: dict[str, float] = {}
    for nodeid, job in nodeids.items():
        own = seconds.get(nodeid, 0.0)
        name = nodeid if job == nodeid.partition("::")[0] and own >= ALONE_FROM_SECONDS else job
        told[name] = told.get(name, 0.0) + own
    return told


def longest_first(jobs: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """Return jobs in the order in which they start: the longest first, so that none is left alone at the end."""
    return sorted(jobs, key=lambda job: (-seconds.get(job, SECONDS_OF_THE_UNKNOWN), job))


def expected_seconds(jobs: Iterable[str], seconds: Mapping[str, float], workers: int) -> float:
    """Return the seconds that jobs take side by side, if each free worker takes the longest job that is left."""
    ends = [0.0] * max(1, workers)
    for job in longest_first(jobs, seconds):
        heapq.heapreplace(ends, ends[0] + seconds.get(job, SECONDS_OF_THE_UNKNOWN))
    return max(ends) + START_SECONDS


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


@functools.cache
def read_durations() -> dict[str, float]:
    """Return the seconds that each job took when the durations were last written."""
    return dict(json.loads(DURATIONS.read_text())) if DURATIONS.exists() else {}


def write_durations(seconds: Mapping[str, float]) -> None:
    DURATIONS.write_text(json.dumps({job: round(seconds[job], 1) for job in sorted(seconds)}, indent=0) + "\n")
