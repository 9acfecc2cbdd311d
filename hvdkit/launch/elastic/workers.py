"""The processes of an elastic job, as its launcher sees them, and the choice of members among them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from hvdkit.launch.elastic.slots import ProcessSlot, Slots

ENDING_SECONDS = 30.0  # until a process is killed that was dismissed


class Phase(Enum):
    """The progress of a process.

    STARTING: it has not asked yet. WAITING: it has asked to be in the next generation. MEMBER: it is in the present
    one. ENDING: it was dismissed or killed, and its end tells nothing.
    """

    STARTING = 1
    WAITING = 2
    MEMBER = 3
    ENDING = 4


@dataclass
class ElasticWorker:
    """A process of the job."""

    number: int
    slot: ProcessSlot
    since: float  # when its phase began
    phase: Phase = Phase.STARTING
    steps: int | None = None  # that it had applied when it asked; None: it has not received the state of the job
    generation: int = 0  # the last one of which it was a member
    must_leave: bool = False  # its host will be taken away, or is no longer found
    kill_at: float = math.inf
    is_killed: bool = False

    @property
    def newness(self) -> int:
        """A number that is larger where its state is newer."""
        return -1 if self.steps is None else self.steps

    def kills_at(self, missed_since: float, seconds: float) -> float:
        """Return when the process is to be killed.

        ``missed_since``: when the first of the other members asked again. ``seconds``: the longest wait for a process
        that does not ask.
        """
        if self.is_killed:
            return math.inf
        if self.phase == Phase.ENDING:
            return self.since + ENDING_SECONDS
        if self.phase == Phase.STARTING:
            return self.since + seconds
        return min(self.kill_at, missed_since + seconds) if self.phase == Phase.MEMBER else self.kill_at


def newest_of(workers: Iterable[ElasticWorker]) -> int:
    """Return the newness of the newest state, -1 if no process has one."""
    return max((worker.newness for worker in workers), default=-1)


def choose_members(waiting: list[ElasticWorker], least: int, most: int, slots: Slots) -> list[ElasticWorker]:
    """Return the members of the next generation, in the order of their ranks.

    A process that must leave stays on where no other has so new a state, or the others are fewer than ``least``. The
    ranks of a host are neighbours. Rank 0 has the newest state, as Horovod's scripts expect.
    """
    former = [worker for worker in waiting if worker.generation]
    staying = [worker for worker in former if not worker.must_leave]
    leaving = [worker for worker in former if worker.must_leave]
    new = [worker for worker in waiting if not worker.generation and not worker.must_leave]
    needed = int(newest_of(staying) < newest_of(leaving))
    chosen = staying + new[: max(0, most - len(staying) - needed)]
    leaving.sort(key=lambda worker: worker.newness, reverse=True)
    chosen += leaving[: max(needed, least - len(chosen))]
    if not chosen:
        return []

    def place(worker: ElasticWorker) -> tuple[int, str, int]:
        return slots.index(worker.slot.host), *worker.slot

    newest = newest_of(chosen)
    first = min((worker for worker in chosen if worker.newness == newest), key=place)

    def place_after_first(worker: ElasticWorker) -> tuple[bool, int, str, bool, int]:
        index, host, number = place(worker)
        return host != first.slot.host, index, host, worker is not first, number

    return sorted(chosen, key=place_after_first)
