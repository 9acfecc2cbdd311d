"""The flags of ``hvdkitrun`` as the tables that docs/api/hvdkitrun.md shows."""

from __future__ import annotations

import argparse
import sys

from hvdkit import config
from hvdkit.launch import horovod_flags
from hvdkit.launch.options import build_parser

_TITLES = {"positional arguments": "what runs", "options": "the job"}


def markdown_tables() -> str:
    """A table for each group of flags that ``--help`` shows, then one of horovodrun's other flags."""
    parts = []
    for group in build_parser()._action_groups:
        rows = [_row(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        title = _TITLES.get(group.title or "", group.title or "")
        parts.append(_table(title, group.description, "flag | what it does", rows))
    others: dict[str, list[str]] = {}
    for flag, text in horovod_flags.reasons().items():
        others.setdefault(text, []).append(f"`{flag}`")
    rows = [f"{', '.join(flags)} | {text}" for text, flags in others.items()]
    parts.append(_table("other flags of horovodrun", None, "flag | what becomes of it", rows))
    return "\n\n".join(parts)


def _table(title: str, about: str | None, columns: str, rows: list[str]) -> str:
    lines = [f"### {title[0].upper()}{title[1:]}", "", *((f"{about[0].upper()}{about[1:]}.", "") if about else ())]
    return "\n".join([*lines, f"| {columns} |", "|---|---|", *(f"| {row} |" for row in rows)])


def _row(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest} ...` | {action.help}"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    value = "" if action.nargs == 0 else f" `{action.metavar or ', '.join(action.choices or ()) or 'N'}`"
    return f"{names}{value} | {action.help}"


if __name__ == "__main__":
    config.write_or_print(sys.argv[1:], "flags", markdown_tables())
