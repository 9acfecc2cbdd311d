"""The command ``hvdkit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import hvdkit
from hvdkit.engine.telemetry.trace import late_waits, read_trace, report_waits
from hvdkit.launch import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Return its exit status, 1 if a finding is bad or the trace cannot be read."""
    parser = argparse.ArgumentParser(prog="hvdkit", description="See also hvdkitrun, which starts jobs.")
    parser.add_argument("-v", "--version", action="version", version=hvdkit.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="show which libraries are installed here, and what to do if one is missing")
    timeline = commands.add_parser("timeline", help="show which ranks were late, from a recorded timeline")
    timeline.add_argument("trace", help="the file that hvdkitrun --timeline-filename has written")
    timeline.add_argument("--plot", metavar="FILE", help="also draw the timeline, as out.png or out.svg")
    chosen = parser.parse_args(argv)
    return _doctor() if chosen.command == "doctor" else _timeline(chosen.trace, chosen.plot)


def _doctor() -> int:
    print("hvdkit doctor: importing the installed libraries, which takes some seconds ...", file=sys.stderr, flush=True)
    findings = doctor.look()
    print(doctor.report(findings))
    return int(any(finding.good is False for finding in findings))


def _timeline(path: str, picture: str | None) -> int:
    try:
        trace = read_trace(path)
        waits = late_waits(trace)
        print(report_waits(trace, waits))
        if picture is not None:
            from hvdkit.engine.telemetry.trace_plot import plot_trace

            plot_trace(trace, waits, picture)
    except ImportError:
        print("hvdkit timeline: --plot needs matplotlib\nHINT: pip install matplotlib", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"hvdkit timeline: {error}", file=sys.stderr)
    else:
        return 0
    return 1
