"""Progress of a run of tests, by time: what jobs took when all tests were run last says how much is left."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from tests.suite import jobs

LINE_EVERY_SECONDS = 60.0
LEAST_SECONDS = 0.01  # also of jobs whose tests were skipped when all tests were run last


class Progress:
    """A bar on a terminal, a line a minute elsewhere."""

    def __init__(self, nodeids: Sequence[str], workers: int) -> None:
        """``nodeids``: of all tests that will run."""
        self._seconds = jobs.read_durations()
        self._tests = Counter(jobs.job_of(nodeid, self._seconds) for nodeid in nodeids)
        self._outcomes: Counter[str] = Counter()
        self._work = sum(self._weight(job) for job in self._tests)
        self._expected = jobs.expected_seconds(self._tests, self._seconds, workers)
        self._started = self._told = time.monotonic()
        self._done = 0.0
        about = f"{len(nodeids)} tests take about {jobs.minutes(self._expected)} min on {workers} workers"
        print(f"hvdkit: {about}, more on a slow machine", flush=True)
        self._bar = None
        if sys.stdout.isatty():
            shown = "{percentage:3.0f}% |{bar}| {elapsed}<{remaining} {postfix}"
            self._bar = tqdm(total=self._work, bar_format=shown, file=sys.stdout, dynamic_ncols=True)

    def _weight(self, job: str) -> float:
        return max(self._seconds.get(job, jobs.SECONDS_OF_THE_UNKNOWN), LEAST_SECONDS)

    def ended(self, nodeid: str, outcome: str) -> None:
        job = jobs.job_of(nodeid, self._seconds)
        share = self._weight(job) / self._tests[job]
        self._done += share
        self._outcomes[outcome] += 1
        if outcome == "failed":
            tqdm.write(f"FAILED {nodeid}")
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self._outcomes.items()))
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(counts, refresh=False)
            self._bar.update(share)
        elif now - self._told >= LINE_EVERY_SECONDS:
            self._told = now
            gone, part = now - self._started, self._done / self._work
            left = max(0.0, gone * (1 / part - 1)) if part > 0.2 else max(0.0, self._expected - gone)
            print(f"{part:4.0%} after {jobs.minutes(gone)}, about {jobs.minutes(left)} left: {counts}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
