"""What the coordinator keeps of operations that have not ended well yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdkit.engine.ops.requests import Key, Request, Signature


@dataclass(slots=True)
class Entry:
    """One operation that not all of its ranks have asked for yet."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False

    @property
    def signature(self) -> Signature:
        """What was asked for, where all who asked agree."""
        return next(iter(self.requests.values())).signature


@dataclass
class Failure:
    """An error of the operations ``keys``, and the members that have not asked for any of them yet: each is told once.

    ``cause``: MISMATCH, LEFT or STALLED; ``left``: the rank that left the job, if one did.
    """

    text: str
    cause: str
    keys: list[Key]
    untold: set[int]
    left: int | None = None


@dataclass(frozen=True)
class Stall:
    """An operation that some ranks wait for and others have not submitted."""

    key: Key
    submitted: list[int]
    missing: list[int]
    seconds: float
