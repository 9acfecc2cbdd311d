"""A failed job in a few lines: who failed first and where, and one line for what became of the others."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hvdkit.environments.failure_record import ANOTHER, Record

SAYS = "hvdkitrun: "
LONGEST_LINE = 200
FILE = "failure.txt"


def first_to_fail(records: Mapping[int, Record], ended: int, by_signal: bool) -> int:
    """The rank that failed first. ``records`` by rank, as they came in.

    ``ended`` is the rank whose end ended the job, and ``by_signal`` how: one that fails because another one was lost
    may end before that one does, and one that leaves in good order while others need it ends no job.
    """
    if ended not in records and by_signal:
        return ended
    own = next((rank for rank, record in records.items() if record.after is None), None)
    if own is not None:
        return own
    if ended not in records:
        return ended
    blamed = [one.after for one in records.values() if one.after not in (None, ANOTHER, *records)]
    return next((rank for rank in blamed if rank is not None), ended)


def summary(records: Mapping[int, Record], first: int) -> list[str]:
    """What is shown: the first one's own lines and error, then the others, those that say the same in one line."""
    lines = []
    if first in records:
        record = records[first]
        lines += [f"{SAYS}rank {first} failed:", *record.frames.splitlines(), *record.error.splitlines()]
    alike: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank != first:
            same = first in records and record.error == records[first].error
            alike.setdefault("the same" if same else shortened(record.error), []).append(rank)
    for text, ranks in alike.items():
        lines.append(f"{SAYS}rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}: {text}")
    return lines


def shortened(error: str) -> str:
    """The first line of an error, without the path of its class."""
    line = next(iter(error.splitlines()), "")
    kind, colon, text = line.partition(":")
    line = kind.rpartition(".")[2] + colon + text
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} ... (cut off here)"


def spans(ranks: list[int]) -> str:
    """Ranks in order, with what follows each other as a span: "0, 2-63"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    return ", ".join("-".join(map(str, span)) for span in found)


def all_tracebacks(records: Mapping[int, Record], tracebacks: Mapping[int, str]) -> str:
    """Every rank's, as Python printed it."""
    ranks = sorted({*records, *tracebacks})
    return "".join(f"rank {rank}:\n{tracebacks.get(rank) or records[rank].error}".rstrip("\n") + "\n" for rank in ranks)


def keep(text: str, folder: Path | None) -> str:
    """Write the tracebacks into the folder of the ranks' output, else into a file of its own; returns its path."""
    if folder is not None:
        (folder / FILE).write_text(text)
        return str(folder / FILE)
    descriptor, path = tempfile.mkstemp(prefix="hvdkit-", suffix=f"-{FILE}")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path
