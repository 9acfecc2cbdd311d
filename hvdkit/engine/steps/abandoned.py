"""Steps whose results a rank does not use: they must not be used on any other rank either."""

from __future__ import annotations

import threading

ABANDONED = (
    "%s gave up a step of optimizer '%s' after some of its gradients were handed over. %s uses that step, or has used "
    "it, with zeros for the rest: their weights differ then.\n"
    "HINT: an exception ended the step there, or load_state_dict() came in the middle of it. Let the exception end the "
    "job, or have all ranks go back to the same state."
)

ENDED = (
    "%s gave up a step of optimizer '%s', since an exception ended it there, after some of its gradients were handed "
    "over. Ranks that made that step have other weights now.\n"
    "HINT: let the exception end the job, or have all ranks go back to the same state."
)


class AbandonedSteps:
    """Of one lane on this rank. Ranks number a lane's steps alike, and may hear of a step before or after they end it.

    Told by the engine's driver, asked by the training thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here: set[int] = set()
        self._by: dict[int, int] = {}  # by step that did not end here yet, the rank
        self._used = -1  # the newest step that was used here

    def here(self, step: int) -> None:
        """This rank gives a step up."""
        with self._lock:
            self._here.add(step)
            self._by.pop(step, None)

    def use(self, step: int) -> int | None:
        """This rank is about to use a step. Returns the rank that gave it up, as far as it was heard."""
        with self._lock:
            self._used = step
            return self._by.pop(step, None)

    def heard(self, rank: int, step: int) -> bool:
        """``rank`` gave a step up. Returns whether it was used here already."""
        with self._lock:
            if step in self._here:
                return False
            if step > self._used:
                self._by[step] = rank
            return step <= self._used
