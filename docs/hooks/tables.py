"""The generated tables of the documentation. ``python -m docs.hooks.tables`` puts them between the marks of pages."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from hvdkit.config import Settings
from hvdkit.launch import horovod_flags
from hvdkit.launch.options import build_parser

UNITS = ("s", "ms", "us", "bytes", "steps", "threads", "signatures")
_TITLES = {"positional arguments": "the program", "options": "the job"}  # argparse's titles, and those on the page


def settings() -> str:
    """Return the table of all settings in docs/settings.md."""
    lines = ["| variable and its default | what it does |", "|---|---|"]
    for setting in fields(Settings):
        names = "<br>".join(f"`{name}`" for name in setting.metadata["names"])
        default = _default_in_words(setting.default, setting.metadata["unit"])
        lines.append(f"| {names}<br>{default} | {setting.metadata['about']} |")
    return "\n".join(lines)


def _default_in_words(default: object, unit: str) -> str:
    """Return "60 s", "auto, or bytes", "mpi (mpi, torch)"."""
    if default is None:
        return f"auto, or {unit.removesuffix(', auto')}"
    text = f"{default:g}" if isinstance(default, float | int) else str(default) or "none"
    return f"{text} {unit}" if unit in UNITS else f"{text} ({unit})"


def flags() -> str:
    """Return a table for each group of flags in ``hvdkitrun --help``, then a table of horovodrun's other flags."""
    tables = []
    for group in build_parser()._action_groups:
        rows = [_row(action) for action in group._group_actions if action.help != argparse.SUPPRESS]
        title = _TITLES.get(group.title or "", group.title or "")
        tables.append(_table(title, group.description, "flag | what it does", rows))
    others: dict[str, list[str]] = {}
    for flag, text in effects().items():
        others.setdefault(text, []).append(f"`{flag}`")
    rows = [f"{', '.join(flags)} | {text}" for text, flags in others.items()]
    return "\n\n".join([*tables, _table("other flags of horovodrun", None, "flag | effect", rows)])


def effects() -> dict[str, str]:
    """Return the effect of each of horovodrun's other flags."""
    without_effect = {flag: f"no effect: {reason}" for flag, reason in horovod_flags.REASONS.items()}
    always = "hvdkit always behaves in this way: it checks the hosts at each start, and its log lines have no time"
    granted = dict.fromkeys(horovod_flags.GRANTED, always)
    refused = {flag: f"refused: {fact}; {instead}" for flag, (fact, instead) in horovod_flags.REFUSALS.items()}
    return without_effect | granted | refused


def _table(title: str, about: str | None, columns: str, rows: list[str]) -> str:
    lines = [f"### {title[0].upper()}{title[1:]}", "", *((f"{about[0].upper()}{about[1:]}.", "") if about else ())]
    return "\n".join([*lines, f"| {columns} |", "|---|---|", *(f"| {row} |" for row in rows)])


def _row(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest} ...` | {action.help}"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    metavar = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar
    value = "" if action.nargs == 0 else f" `{metavar or ', '.join(action.choices or ()) or 'N'}`"
    return f"{names}{value} | {action.help}"


if __name__ == "__main__":
    for page, mark, text in (("settings.md", "settings", settings()), ("api/hvdkitrun.md", "flags", flags())):
        path, begin, end = Path("docs") / page, f"<!-- {mark} -->", f"<!-- /{mark} -->"
        before, rest = path.read_text().split(begin)
        path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
