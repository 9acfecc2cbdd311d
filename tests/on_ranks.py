"""Tests that run on the ranks of a job: each is called in every rank, with the adapter as ``hvd``.

    pytestmark = [on_ranks(2, 3), on_ranks(2, name="apart", HVDKIT_NODE_MEMORY="0")]

    def test_the_sum_is_of_all_ranks(hvd): ...

Starting ranks takes seconds, so a job serves all tests of a module that are marked alike; each is reported on its own.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks import CASES, JOB_TIMEOUT_SECONDS, SKIPPED, run_ranks
from tests.suite import sizes


def case_names(module: str) -> list[str]:
    """Return the tests and cases of a module that take ``hvd``, in the order of the file, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    functions = [node for node in ast.parse(Path(spec.origin).read_text()).body if isinstance(node, ast.FunctionDef)]
    return [
        node.name
        for node in functions
        if node.name.startswith("case_") or (node.name.startswith("test_") and "hvd" in [a.arg for a in node.args.args])
    ]


class RankedCases:
    """The cases of some modules; a job of a size on a transport runs once, the first time one of them is checked."""

    def __init__(
        self,
        *modules: str,
        runner: str = "tests.ranks",
        per_node: int | None = None,
        preload: tuple[str, ...] = CASES,
        seconds: float = JOB_TIMEOUT_SECONDS,
        **environment: str,
    ) -> None:
        """``seconds``: the limit for a case, and for the start of the ranks."""
        self.modules = modules
        self.per_node = per_node
        self.runner = runner
        self.preload = preload
        self.seconds = seconds
        self.environment = environment
        self.names = [name for module in modules for name in case_names(module)]
        assert len(set(self.names)) == len(self.names), "cases of one job need different names"
        self.selected: dict[tuple[int, str], set[str]] = defaultdict(set)  # by job; all cases, if empty
        self._results = functools.cache(self._run)

    def _run(self, size: int, transport: str) -> tuple[list[dict[str, str]], str]:
        with tempfile.TemporaryDirectory() as folder:
            selected = ",".join(sorted(self.selected[size, transport]))
            command = [sys.executable, "-m", self.runner, ",".join(self.modules), folder]
            paths = [Path(folder, f"{rank}.json") for rank in range(size)]

            def progress() -> list[int]:
                return [path.stat().st_size if path.exists() else 0 for path in paths]

            try:
                status, output = run_ranks(
                    command,
                    size,
                    transport,
                    self.seconds,
                    per_node=self.per_node,
                    preload=self.preload,
                    progress=progress,
                    TESTS_SELECTED=selected,
                    **self.environment,
                )
                end = f"exit status {status}"
            except subprocess.TimeoutExpired as stuck:
                output = (stuck.output or b"").decode(errors="replace")
                end = f"killed: no case ended for {self.seconds} s"
            reports = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        return reports, f"{end}\n{output[-8000:]}"

    def check(self, case: str, size: int, transport: str) -> None:
        """Fail with every rank's traceback unless the case passed on all ranks, or all skipped it for one reason."""
        reports, output = self._results(size, transport)
        results = {report.get(case, "") for report in reports}
        if len(results) == 1 and (reason := results.pop()).startswith(SKIPPED):
            pytest.skip(reason.removeprefix(SKIPPED))
        problems = [
            f"rank {rank}: {report.get(case, 'did not reach this case')}"
            for rank, report in enumerate(reports)
            if report.get(case) != "passed"
        ]
        assert not problems, "\n".join([*problems, output])


class Job(NamedTuple):
    """The job in whose ranks a test runs."""

    cases: RankedCases
    size: int
    transport: str


def on_ranks(
    *jobs: int | tuple[int, str],
    name: str = "",
    thorough: bool = False,
    every_size: bool = False,
    without: tuple[str, ...] = (),
    **options: Any,
) -> pytest.MarkDecorator:
    """Mark a test, or a module as ``pytestmark``, to run on jobs of these numbers of ranks.

    A number alone stands for the transports of ``sizes.PYTORCHS``, of which ``make test`` runs ``sizes.ESSENTIAL``, and
    with ``every_size`` more; a number with a transport for a job that ``make test`` runs unless it is ``thorough``.
    ``name`` tells apart marks of one module, ``without`` names tests that this mark leaves out; ``options`` are those
    of RankedCases: where nodes end, the program of a rank, variables of its environment.
    """
    return pytest.mark.on_ranks(
        *jobs, name=name, thorough=thorough, every_size=every_size, without=without, options=options
    )


@functools.cache
def _cases(module: str, options: tuple[tuple[str, Any], ...]) -> RankedCases:
    return RankedCases(module, **dict(options))


def _jobs(mark: pytest.Mark) -> Iterator[tuple[int, str, bool]]:
    for job in mark.args:
        if isinstance(job, tuple):
            yield (*job, mark.kwargs["thorough"])
            continue
        for transport in sizes.PYTORCHS[job]:
            essential = sizes.is_essential(job, transport, every_size=mark.kwargs["every_size"])
            yield job, transport, mark.kwargs["thorough"] or not essential


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make a test of each job that a function is marked to run on; its id ends in ``SIZE@TRANSPORT``."""
    if "hvd" not in metafunc.fixturenames:
        return
    parameters = []
    for mark in metafunc.definition.iter_markers("on_ranks"):
        if metafunc.definition.originalname in mark.kwargs["without"]:
            continue
        cases = _cases(metafunc.module.__name__, tuple(sorted(mark.kwargs["options"].items())))
        for size, transport, thorough in _jobs(mark):
            marks = [pytest.mark.thorough] if thorough else []
            prefix = mark.kwargs["name"] and f"{mark.kwargs['name']}:"
            parameters.append(pytest.param(Job(cases, size, transport), id=f"{prefix}{size}@{transport}", marks=marks))
    if parameters:
        metafunc.parametrize("hvd", parameters)


def job_of(item: pytest.Item) -> Job | None:
    """Return the job in whose ranks a test runs, or None."""
    job = item.callspec.params.get("hvd") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return job if isinstance(job, Job) else None


def select(items: list[pytest.Item]) -> None:
    """Let jobs run those tests alone that were collected."""
    for item in items:
        if (job := job_of(item)) is not None:
            job.cases.selected[job.size, job.transport].add(item.originalname)  # type: ignore[attr-defined]
