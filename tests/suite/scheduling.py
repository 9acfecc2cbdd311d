"""How pytest-xdist hands tests to its workers."""

from __future__ import annotations

from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.suite import jobs


class ByJob(LoadScopeScheduling):
    """A worker gets all tests of one job. (With pytest 9.2, xdist's own ``loadgroup`` loses the marks of groups.)"""

    def _split_scope(self, nodeid: str) -> str:
        return jobs.job_of(nodeid, jobs.read_durations())
