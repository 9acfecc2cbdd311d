"""The patches of this folder: what each puts in, and the tests that ought to find it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
HEADERS = ("What", "From", "Tests")


@dataclass(frozen=True)
class Defect:
    """One patch."""

    name: str
    path: Path
    what: str  # what a user would see
    origin: str  # "revert of <commit>, ..." or "by hand"
    tests: tuple[str, ...]  # pytest's arguments
    is_native: bool  # it must be compiled


def read(path: Path) -> Defect:
    """Read a patch and what stands above it.

    Raises:
        ValueError: a header is missing.
    """
    text = path.read_text()
    above = text.partition("\ndiff --git ")[0]
    told = dict(line.split(": ", 1) for line in above.splitlines() if line.startswith(HEADERS))
    if missing := [name for name in HEADERS if name not in told]:
        raise ValueError(f"{path}: no line that begins with {missing[0]}:")
    tests = tuple(shlex.split(told["Tests"]))
    return Defect(path.stem, path, told["What"], told["From"], tests, "/csrc/" in text)


def all_defects() -> list[Defect]:
    """In the order of their names."""
    return [read(path) for path in sorted(FOLDER.glob("*.patch"))]
