"""The steps after which ranks compare the parameters that they train, and the words by which they decide to.

At the end of some steps of a lane, which follow from its count of steps, ranks tell each other whether they have hashed
what the update before left, and whether the update of this step follows at once, as in ``optimizer.step()``. If all
present ranks have hashed, they compare by named operations; if all update at once, they do so after the update.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag

import numpy as np

from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Group, Steps

FIRST_STEPS = (1, 10, 100)  # ranks that differ from the beginning, or soon, are noticed soon
# A step touches a few rows of parameters with sparse gradients: reading all of them costs far more than the step.
SPARSE_AS_OFTEN = 100


class Word(IntFlag):
    """The word of a rank at the end of a step; 0 if it gave the step up."""

    PRESENT, UPDATES, HASHED, JOINED = 1, 2, 4, 8


def is_due(step: int, every: int, sparse: bool = False) -> bool:
    """True if parameters are compared after ``step`` (from 1); ``every`` is HVDKIT_VERIFY; ``sparse`` ones seldom."""
    every *= SPARSE_AS_OFTEN if sparse else 1
    return every > 0 and step > 0 and (step in FIRST_STEPS or step % every == 0)


class LaneVerification:
    """The exchange of words at the end of a lane's steps; ``ask`` returns this rank's word."""

    def __init__(self, group: Group, every: int) -> None:
        self.ask: Callable[[], int] = lambda: Word.PRESENT
        self.every = every if group.size > 1 else 0
        self.is_due = False  # True if parameters are compared as they are after the last step
        self.words: list[int] = []  # of all members in the step that has just ended; none if there was no exchange
        self._group = group
        self._own = 0

    def begin_step(self, steps: int) -> bool:
        """Return True if ranks exchange words at the end of the step that begins, before which there were ``steps``."""
        self.is_due = is_due(steps, self.every)
        return self.is_due or is_due(steps + 1, self.every)

    def prepare(self) -> None:
        """Take the word of this rank, which uses the step that ends now."""
        self._own, self.words = self.ask(), []

    def exchange(self, joined: bool, tag: int) -> Steps[None]:
        """Exchange words by messages under ``tag``."""
        own = Word.JOINED if joined else self._own
        self._own = 0
        words = np.zeros(self._group.size, dtype=np.uint64)
        yield from allgather(self._group, np.array([own], dtype=np.uint64), np.split(words, len(words)), tag)
        self.words = words.tolist() if own & Word.PRESENT else []
