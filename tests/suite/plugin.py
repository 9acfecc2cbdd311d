"""Which tests run, what runs side by side, and what is shown meanwhile: part of every run of pytest here.

``pytest`` leaves out what is marked ``thorough``, unless it is named with ``::`` or all is asked for by ``--all``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import on_ranks, preloaded
from tests.suite import jobs, report, sizes
from tests.suite.progress import Progress


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hvdkit")
    group.addoption("--all", action="store_true", help="also run what is marked thorough")
    group.addoption("--tell", metavar="FILE", type=Path, help="write what ran, how it ended and how long it took")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: runs in make test-all, not in make test")
    config.addinivalue_line("markers", "essential(name=value or tuple): thorough with other values of these parameters")
    config.addinivalue_line("markers", "on_ranks: runs in the ranks of jobs, see tests/on_ranks.py")
    # A shell that runs this in the background has it ignore Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(Shown(config), "hvdkit-shown")
    if config.getoption("numprocesses", None):
        servers = preloaded.Servers()
        config.add_cleanup(servers.close)
        os.environ[preloaded.ASKED] = servers.listen()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    on_ranks.parametrize(metafunc)


def pytest_collection_finish(session: pytest.Session) -> None:
    on_ranks.select(session.items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Have a test that is marked ``on_ranks`` called by ranks."""
    if (job := on_ranks.job_of(pyfuncitem)) is None:
        return None
    job.cases.check(pyfuncitem.originalname, job.size, job.transport)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests and put the tests of the longest jobs first."""
    never = [item for item in items if not sizes.is_ever_run(item.path.parts, *_place(item))]
    named = any("::" in argument for argument in config.args)
    left_out = never if named or config.getoption("--all") else [*never, *filter(_is_thorough, items)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    if hasattr(config, "workerinput"):
        seconds = jobs.read_durations()
        names = {item.nodeid: jobs.job_of(item.nodeid, seconds) for item in items}
        place = {name: number for number, name in enumerate(jobs.longest_first(set(names.values()), seconds))}
        items.sort(key=lambda item: place[names[item.nodeid]])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With ``-n`` and no other wish, a worker gets all tests of one job, and what takes longest starts first."""
    from tests.suite.scheduling import ByJob  # where pytest-xdist is, which calls this

    if config.getoption("dist") != "load":
        return None
    config.option.loadscopereorder = False  # by numbers of tests
    return ByJob(config, log)


def _place(item: pytest.Item) -> tuple[int | None, str | None]:
    """Return the number of ranks and the transport that a case runs on, None where the test does not say."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    ranks = parameters.get("ranks")
    return ranks if isinstance(ranks, int) else None, parameters.get("transport", parameters.get("connected"))


def _is_thorough(item: pytest.Item) -> bool:
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    only = item.get_closest_marker("essential")
    if item.get_closest_marker("thorough") or (only and not sizes.has(parameters, only.kwargs)):
        return True
    is_case = hasattr(item, "callspec") and "case" in item.callspec.params
    return is_case and not sizes.is_essential(*_place(item))


class Shown:
    """The progress bar and the report of a run, of this process or of its workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._progress: Progress | None = None
        self._results: dict[str, report.Result] = {}
        self._started = time.monotonic()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Start the progress bar, now that the workers have collected the tests."""
        if self._progress is not None:
            return
        self._progress = Progress(ids, int(self._config.getoption("numprocesses")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Print no letter for tests that pass or are skipped while there is a progress bar."""
        if self._progress is None or report.failed:
            return None
        if report.skipped:
            return ("xfailed" if hasattr(report, "wasxfail") else "skipped"), "", ""
        return ("passed" if report.when == "call" else ""), "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self._results.setdefault(report.nodeid, _Result())
        result.add(report)
        if report.when == "teardown" and self._progress is not None:
            self._progress.ended(report.nodeid, result.outcome)

    def pytest_sessionfinish(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if (path := self._config.getoption("--tell")) is not None:
            report.write(path, self._results, time.monotonic() - self._started)


class _Result(report.Result):
    """The end of a test, made of the reports of its phases."""

    def add(self, phase: pytest.TestReport) -> None:
        self.seconds += phase.duration
        if phase.failed:
            self.outcome = "failed"
        elif phase.skipped and self.outcome != "failed":
            self.outcome = "skipped"
            self.reason = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
