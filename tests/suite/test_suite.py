"""How the tests are run: what runs together and in which order, how long it will take, and what is told of it."""

from __future__ import annotations

import pytest

from tests.suite import jobs, report, sizes
from tests.suite.progress import Progress

CASE = "tests/torch/test_ops.py::test_ops[np2-mpi-case_sums]"


def test_cases_of_one_job_run_together_wherever_the_case_stands_in_the_id() -> None:
    job = "tests/torch/test_ops.py::test_ops[np2-mpi]"
    assert jobs.job_of(CASE, {}) == job
    assert jobs.job_of("tests/torch/test_ops.py::test_ops[case_x-np2-mpi]", {}) == job
    assert jobs.job_of("tests/a.py::test_b[case_x]", {}) == "tests/a.py::test_b[]"
    assert jobs.job_of("tests/a.py::test_b[two nodes:3@torch]", {}) == "tests/a.py::[two nodes:3@torch]"


def test_what_takes_long_runs_alone_and_a_file_that_does_not_together() -> None:
    seconds = {"tests/a.py::test_long[x]": 3.0, "tests/a.py::test_short": 0.1}
    assert jobs.job_of("tests/a.py::test_long[x]", seconds) == "tests/a.py::test_long[x]"
    assert jobs.job_of("tests/a.py::test_long[y]", seconds) == "tests/a.py"
    assert jobs.job_of("tests/a.py::test_short", seconds) == "tests/a.py"


def test_what_shares_a_fixture_that_takes_long_runs_together() -> None:
    file = "tests/examples/test_examples.py"
    assert jobs.job_of(f"{file}::test_digits_speak_on_rank_0_only", {}) == f"{file}::test_digits"
    assert jobs.job_of(f"{file}::test_digits_reach_97_percent_alone", {}) == file
    file = "tests/kernels/test_sanitizers.py"
    assert jobs.job_of(f"{file}::test_the_arena_is_clean[threads-1]", {}) == f"{file}::threads"


def test_durations_are_told_by_what_will_run_together() -> None:
    names = {"tests/a.py::one": "tests/a.py", "tests/a.py::two": "tests/a.py", "tests/a.py::long": "tests/a.py"}
    names[CASE] = "job"
    told = jobs.told_of(names, {"tests/a.py::one": 0.2, "tests/a.py::two": 0.3, "tests/a.py::long": 9.0, CASE: 2.0})
    assert told == {"tests/a.py": 0.5, "tests/a.py::long": 9.0, "job": 2.0}


def test_the_longest_start_first_and_workers_share_them() -> None:
    seconds = {"a": 1.0, "b": 4.0, "c": 3.0, "d": 2.0}
    assert jobs.longest_first(seconds, seconds) == ["b", "c", "d", "a"]
    assert jobs.expected_seconds(seconds, seconds, 1) == 10.0 + jobs.START_SECONDS
    assert jobs.expected_seconds(seconds, seconds, 2) == 5.0 + jobs.START_SECONDS
    assert jobs.expected_seconds(["unknown"], seconds, 2) == jobs.SECONDS_OF_THE_UNKNOWN + jobs.START_SECONDS


@pytest.mark.parametrize(
    ("ranks", "transport", "essential"),
    [
        (2, "mpi", True),
        (3, "torch", True),
        (2, "torch", False),
        (1, "mpi", False),
        (4, "mpi", False),
        (None, None, True),
    ],
)
def test_cases_run_on_two_jobs_unless_all_are_asked_for(ranks: int, transport: str, essential: bool) -> None:
    assert sizes.is_essential(ranks, transport, every_size=False) is essential
    assert sizes.is_essential(ranks, transport, every_size=True) is (essential or transport == "mpi")


def test_a_test_is_essential_with_the_values_that_it_names() -> None:
    parameters = {"transport": "mpi", "ranks": 3}
    assert sizes.has(parameters, {})
    assert sizes.has(parameters, {"transport": "mpi"})
    assert sizes.has(parameters, {"transport": ("mpi", "torch"), "ranks": 3})
    assert not sizes.has(parameters, {"transport": "mpi", "ranks": 2})


@pytest.fixture
def durations(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Those of the last run of all tests; a line is printed for each test."""
    taken: dict[str, float] = {}
    monkeypatch.setattr(jobs, "read_durations", lambda: taken)
    monkeypatch.setattr("tests.suite.progress.LINE_EVERY_SECONDS", 0.0)
    return taken


def test_progress_is_by_time_and_in_lines_where_nobody_looks(capsys, durations) -> None:
    durations.update({"tests/a.py::long": 90.0, "tests/b.py": 10.0})
    progress = Progress(["tests/a.py::long", "tests/b.py::one", "tests/b.py::two"], 2)
    assert "3 tests take about 1:36 min on 2 workers" in capsys.readouterr().out
    progress.ended("tests/b.py::one", "passed")
    assert capsys.readouterr().out.startswith("  5% after 0:00, about 1:3")
    progress.ended("tests/a.py::long", "failed")
    told = capsys.readouterr().out
    assert told.startswith("FAILED tests/a.py::long\n")
    assert told.rstrip().endswith("left: 1 failed, 1 passed")
    progress.close()


def test_progress_of_tests_that_were_all_skipped_when_they_were_run_last(capsys, durations) -> None:
    durations["tests/a.py"] = 0.0
    progress = Progress(["tests/a.py::one"], 1)
    progress.ended("tests/a.py::one", "passed")
    assert "100% after 0:00" in capsys.readouterr().out
    progress.close()


def test_the_report_tells_counts_skips_and_durations() -> None:
    tests = {
        "tests/a/test_x.py::one": {"outcome": "passed", "seconds": 61.0, "reason": ""},
        "tests/a/test_x.py::two": {"outcome": "skipped", "seconds": 0.0, "reason": "Skipped: no GPU"},
        "tests/test_y.py::three": {"outcome": "failed", "seconds": 0.5, "reason": ""},
    }
    text = report.table({"tests": {"seconds": 62.0, "tests": tests}}, "abc123", "A processor, 2 cores")
    assert "- commit: abc123" in text
    assert "- tests: 3, of which 1 failed, 1 passed, 1 skipped" in text
    assert "- tests: 1:02 min" in text
    assert "| a | 1 | 1 | 0 | 61 |" in text
    assert "- tests/a/test_x.py: 1 (no GPU)" in text
    assert "- tests/test_y.py::three" in text
    assert "| tests/a/test_x.py::one | 61.0 |" in text
