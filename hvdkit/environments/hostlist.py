"""Slurm's short forms written out: host lists such as ``node[01-03,7],gpu1`` and task counts such as ``2(x3),1``."""

from __future__ import annotations

import re

from hvdkit.errors import EnvironmentConflictError

_PART = re.compile(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*")


def expand_hosts(text: str) -> list[str]:
    """All hosts of a host list, in its order."""
    hosts: list[str] = []
    position = 0
    while position <= len(text):
        match = _PART.match(text, position)
        assert match is not None  # the pattern also matches nothing at all
        if not match.group() or (match.end() < len(text) and text[match.end()] != ","):
            raise _malformed(text)
        hosts += _expand_part(match.group(), text)
        position = match.end() + 1
    return hosts


def _expand_part(part: str, whole: str) -> list[str]:
    """The hosts of one part without a comma outside brackets."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    numbers: list[str] = []
    for piece in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if match is None:
            raise _malformed(whole)
        first, last = match.group(1), match.group(2) or match.group(1)
        # The first number's width is every number's: 08-11 is 08, 09, 10, 11.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    tails = _expand_part(tail, whole)
    return [head + number + ending for number in numbers for ending in tails]


def expand_counts(text: str) -> list[int]:
    """Tasks per node, one number a node."""
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if match is None:
            raise _malformed(text)
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _malformed(text: str) -> EnvironmentConflictError:
    return EnvironmentConflictError(
        f"cannot read Slurm's list {text!r}\n"
        "HINT: set MASTER_ADDR and MASTER_PORT in every task; `scontrol show hostnames` prints what Slurm means"
    )
