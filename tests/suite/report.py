"""What a run of all tests leaves: a file for people, and how long each job took for the next runs.

python -m tests.suite.report build/tests     # where pytest's --tell wrote: tests/REPORT.md and durations.json
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.suite import jobs

REPORT = Path(__file__).parents[1] / "REPORT.md"
LONGEST = 25
RUNS = ("tests", "cluster")  # of pytest, by the name of what each told


@dataclass
class Result:
    outcome: str = "passed"
    seconds: float = 0.0
    reason: str = ""


def write(path: Path, results: Mapping[str, Result], seconds: float) -> None:
    """Keep what one run of pytest told."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tests = {nodeid: asdict(result) for nodeid, result in results.items()}
    path.write_text(json.dumps({"seconds": seconds, "tests": tests}, indent=0) + "\n")


def table(runs: Mapping[str, Mapping[str, Any]], commit: str, processor: str) -> str:
    """The file for people, of what each run told."""
    tests = {nodeid: test for run in runs.values() for nodeid, test in run["tests"].items()}
    outcomes = Counter(test["outcome"] for test in tests.values())
    lines = [
        "# The last run of all tests",
        "",
        "Written by `make test-all`.",
        "",
        f"- commit: {commit}",
        f"- processor: {processor}",
        f"- tests: {len(tests)}, of which " + ", ".join(f"{outcomes[one]} {one}" for one in sorted(outcomes)),
        *(f"- {name}: {jobs.minutes(run['seconds'])} min" for name, run in runs.items()),
        "",
        "| folder | passed | skipped | failed | seconds, one after the other |",
        "|---|---|---|---|---|",
    ]
    folders: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for nodeid, test in tests.items():
        parts = nodeid.partition("::")[0].split("/")
        folders[parts[1] if len(parts) > 2 else "."].append(test)
    for name, members in sorted(folders.items()):
        counts = Counter(test["outcome"] for test in members)
        seconds = sum(test["seconds"] for test in members)
        lines.append(f"| {name} | {counts['passed']} | {counts['skipped']} | {counts['failed']} | {seconds:.0f} |")
    lines += ["", "Skipped:", ""]
    reasons = Counter((nodeid.partition("::")[0], test["reason"]) for nodeid, test in tests.items() if test["reason"])
    lines += [
        f"- {file}: {count} ({reason.removeprefix('Skipped: ')})" for (file, reason), count in sorted(reasons.items())
    ]
    if failed := [nodeid for nodeid, test in tests.items() if test["outcome"] == "failed"]:
        lines += ["", "Failed:", "", *(f"- {nodeid}" for nodeid in failed)]
    lines += ["", f"The {LONGEST} longest jobs:", "", "| job | seconds |", "|---|---|"]
    taken = durations(runs)
    for job in jobs.longest_first(taken, taken)[:LONGEST]:
        lines.append(f"| {job} | {taken[job]:.1f} |")
    return "\n".join(lines) + "\n"


def durations(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    tests = {nodeid: test for run in runs.values() for nodeid, test in run["tests"].items()}
    return jobs.told_of(
        {nodeid: jobs.job_of(nodeid, {}) for nodeid in tests},
        {nodeid: test["seconds"] for nodeid, test in tests.items()},
    )


def _processor() -> str:
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = found[0].partition(":")[2].strip() if found else platform.machine()
    wide = "with" if "avx512f" in Path("/proc/cpuinfo").read_text() else "without"
    return f"{name}, {len(found) or 1} cores, {wide} AVX-512"


def main(folder: str) -> int:
    runs = {name: json.loads(path.read_text()) for name in RUNS if (path := Path(folder, f"{name}.json")).exists()}
    head = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout
    text = table(runs, head.strip(), _processor())
    if (faults := Path(folder, "faults.md")).exists():
        text += f"\n## Random faults\n\n{faults.read_text()}"
    REPORT.write_text(text)
    if len(runs) == len(RUNS):  # else what is known is better than what is left
        jobs.write_durations(durations(runs))
    print(f"wrote {REPORT}, of {', '.join(runs) or 'nothing'}")
    failed = any(test["outcome"] == "failed" for run in runs.values() for test in run["tests"].values())
    return int(failed or len(runs) < len(RUNS))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
