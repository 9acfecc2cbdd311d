"""A plugin of pytest that appends how each test ended to the file in TESTS_TELL, a line of JSON at once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TELL = "TESTS_TELL"
MOST_CHARACTERS = 6000


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the outcome of a test: of its call, or of a set-up or tear-down that did not pass."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed") or report.outcome == "failed":
        text = "" if report.outcome == "passed" else _reason(report)[-MOST_CHARACTERS:]
        line = {"case": report.nodeid.split("::")[-1], "outcome": report.outcome, "text": text}
        with Path(os.environ[TELL]).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[-1]).removeprefix("Skipped: ")
    return str(report.longrepr)
