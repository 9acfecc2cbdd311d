"""The command ``hvdkit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import hvdkit
from hvdkit.launch import doctor


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Return its exit status, 1 if a finding is bad."""
    parser = argparse.ArgumentParser(prog="hvdkit", description="See also hvdkitrun, which starts jobs.")
    parser.add_argument("-v", "--version", action="version", version=hvdkit.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="show what is installed here, and what to do about what is missing")
    parser.parse_args(argv)
    print("hvdkit doctor: importing what is installed, which takes some seconds ...", file=sys.stderr, flush=True)
    findings = doctor.look()
    print(doctor.report(findings))
    return int(any(finding.good is False for finding in findings))
