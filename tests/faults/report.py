"""Random faults, one job after the other, and a table of how they ended.

python -m tests.faults.report --count 200 --report build/faults        # writes build/faults.md and .json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from tests.faults.injection import Fault, Verdict, judge, random_faults
from tests.faults.jobs import START_TIMEOUT_SECONDS, TIMEOUT_SECONDS, run_with_fault

RANKS = 3
TRANSPORTS = ("torch", "mpi", "horovod")


@dataclass(frozen=True)
class Entry:
    """One job: what struck it and how it ended."""

    transport: str
    fault: Fault
    verdict: Verdict


def run(count: int, seed: int, transports: Sequence[str]) -> list[Entry]:
    """Let ``count`` faults strike, on the transports in turn."""
    entries = []
    bar = tqdm(total=count, unit="fault")
    for fault in itertools.islice(random_faults(seed, RANKS), -(-count // len(transports))):
        for transport in transports[: count - len(entries)]:
            outcome = run_with_fault(fault, transport, RANKS)
            verdict = judge(fault, outcome, RANKS, TIMEOUT_SECONDS, START_TIMEOUT_SECONDS)
            entries.append(Entry(transport, fault, verdict))
            bar.update()
            if problems := entries[-1].verdict.problems:
                tqdm.write(f"{transport} {fault}: {problems}\n{outcome.output}")
    bar.close()
    return entries


def table(entries: Sequence[Entry], timeout_seconds: float) -> str:
    right = sum(not entry.verdict.problems for entry in entries)
    lines = [
        f"{right} of {len(entries)} jobs of {RANKS} ranks ended as they must "
        f"(HVDKIT_TIMEOUT_SECONDS={timeout_seconds:g}; seconds from the fault to the last rank that noticed it).",
        "",
        "| fault | transport | jobs | right | noticed after: median | longest | a message | left behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, transport in sorted({(entry.fault.kind, entry.transport) for entry in entries}):
        group = [entry for entry in entries if (entry.fault.kind, entry.transport) == (kind, transport)]
        after = [entry.verdict.noticed_after for entry in group if entry.verdict.noticed_after is not None]
        times = [f"{statistics.median(after):.2f} s", f"{max(after):.2f} s"] if after else ["-", "-"]
        message = next((entry.verdict.message for entry in group if entry.verdict.message), "-")
        left = sum(any("left behind" in one for one in entry.verdict.problems) for entry in group)
        right = sum(not entry.verdict.problems for entry in group)
        cells = [kind, transport, len(group), right, *times, message[:140].replace("|", "/"), left or "nothing"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS[:2])
    parser.add_argument("--report", type=Path, help="where the table (.md) and what it is made of (.json) go")
    args = parser.parse_args(argv)
    entries = run(args.count, args.seed, args.transports)
    text = table(entries, TIMEOUT_SECONDS)
    print(text)
    if args.report is not None:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.with_suffix(".md").write_text(text)
        args.report.with_suffix(".json").write_text(json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")
    return int(any(entry.verdict.problems for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
