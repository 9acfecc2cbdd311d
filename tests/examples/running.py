"""Examples run as their users run them: to the end, on real ranks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

from tests.launch.launching import Result, run_to_end

TIMEOUT_SECONDS = 200


def start_example(name: str | Path, *flags: object, size: int = 2, **environment: str) -> Result:
    """Run an example, under the launcher if ``size`` is more than one, and wait for its end.

    ``name``: a path below ``examples/``, or a whole one.
    """
    command = [sys.executable, str(Path("examples") / name), *map(str, flags)]
    if size > 1:
        command = [sys.executable, "-m", "hvdkit.launch", "-np", str(size), *command]
    return run_to_end(command, TIMEOUT_SECONDS, **environment)


def run_example(name: str | Path, *flags: object, size: int = 2, **environment: str) -> tuple[str, str]:
    """Run an example that succeeds. Returns its stdout and stderr."""
    done = start_example(name, *flags, size=size, **environment)
    assert done.status == 0, f"exit status {done.status}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def lines(output: str) -> list[str]:
    """What was printed, without the launcher's "[rank]<stdout>: " before each line."""
    return [bare for line in output.splitlines() if (bare := re.sub(r"^\[\d+\]<\w+>: ?", "", line).strip())]


def assert_only_one_rank_prints(output: str) -> None:
    """No line came twice. Reports hold averages over all ranks, so a second rank's line would be the same again."""
    assert max(Counter(lines(output)).values()) == 1, output
