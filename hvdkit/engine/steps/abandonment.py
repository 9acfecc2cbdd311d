"""Steps that ranks abandon: a rank tells all others that it does not use the results of a step that it has begun.

If all ranks abandon the step, the lane is spent and they agree anew. If a rank uses the results, the lane fails on the
ranks that use them and on the ranks that abandoned the step, so that each rank raises once.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

from hvdkit.engine.loop.driver import ROUND_SECONDS
from hvdkit.engine.loop.messages import Abandoned, LaneFailed
from hvdkit.errors import HorovodInternalError, MismatchError

if TYPE_CHECKING:
    from hvdkit.engine.steps.lane import Lane

ABANDONED = (
    "%s gave up a step of optimizer '%s' after some of its gradients were handed over, but %s did not. Ranks that made "
    "the step have different weights now.\n"
    "HINT: an exception ended the step, or load_state_dict() was called in the middle of it. Let the exception end the "
    "job, or bring all ranks back to the same state."
)
GAVE_UP = "all ranks gave up a step of optimizer '%s'"


class Abandonment:
    """The abandoned steps of ``lane``, by this rank and by others. The lane's lock protects what both threads use."""

    def __init__(self, lane: Lane) -> None:
        self.is_spent = False  # all ranks abandoned a step, so that they agree anew without an error
        self._lane_of = weakref.ref(lane)  # its memory goes with its last user, not with a cycle
        self._steps: set[int] = set()  # that this rank abandoned
        self.ranks: dict[int, set[int]] = {}  # that abandoned a step, by step
        self._declined: dict[int, set[int]] = {}  # the ranks that were told so, by step that this rank declined
        self._used = -1  # the newest step whose results this rank used

    @property
    def _lane(self) -> Lane:
        lane = self._lane_of()
        assert lane is not None, "a lane that is gone has no step"
        return lane

    # -- the training thread ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Tell all ranks that this rank does not use the step's results. ``settle`` or ``Lane.fail`` must follow."""
        lane = self._lane
        if lane.in_flight and lane.error is None and lane.steps not in self._steps:
            self._steps.add(lane.steps)
            lane.lanes.mailbox.tell_later(lane.group.members, Abandoned(lane.lane_id, lane.steps))
            if lane.on_device:  # collectives that other ranks have launched end only with this rank
                lane.give_zeros()

    def settle(self) -> None:
        """Wait until the other ranks have abandoned this step too, or raise HorovodInternalError if one has used it.

        The answer of a rank that has used it may have come since ``begin``.
        """
        lane = self._lane
        if self.is_spent or lane.steps not in self._steps:
            return
        if lane.on_device:
            lane.end()
            return
        lane.lanes.waiting.wait(lane, lambda: lane.error is not None or not self.unanswered())
        if lane.error is not None:
            raise lane.error
        with lane.lanes.driver.halted(ROUND_SECONDS):
            self._spend()

    def use(self, step: int) -> None:
        """Note that this rank uses the results of a step. Raises HorovodInternalError if a rank abandoned it."""
        with self._lane.lock:
            self._used = step
            ranks = self.ranks.pop(step, set())
        if ranks:
            self.refuse(ranks)

    def refuse(self, ranks: Collection[int] = ()) -> None:
        """Raise the error of a step that ``ranks`` abandoned and this rank uses; by default of the present step."""
        with self._lane.lanes.driver.halted(ROUND_SECONDS):  # not in the middle of a sum
            raise self._fail(ranks or self.ranks[self._lane.steps])

    # -- the engine's driver ------------------------------------------------------------------------------------------

    def unanswered(self) -> set[int]:
        """Return the ranks that have not abandoned a step that this rank abandoned."""
        group, step = self._lane.group, self._lane.steps
        if step not in self._steps:
            return set()
        return set(group.members) - {group.members[group.rank]} - self.ranks.get(step, set())

    def decline(self) -> None:
        """Tell ranks that abandoned a step that this rank, which has joined or closed the lane, does not use it."""
        lane = self._lane
        for step, ranks in list(self.ranks.items()):
            if step <= self._used or (step in self._steps and step not in self._declined):
                continue
            receivers = ranks - self._declined.get(step, set())
            self._steps.add(step)
            self._declined[step] = set(ranks)
            lane.lanes.mailbox.tell_later(sorted(receivers), Abandoned(lane.lane_id, step))
            if not lane.on_device:  # zeros that this rank has started would never end
                lane.lanes.driver.defer(self._spend)

    def hear(self, rank: int, step: int) -> None:
        """Note that ``rank`` does not use the results of ``step``; fail the lane if this rank has used them."""
        lane = self._lane
        with lane.lock:
            self.ranks.setdefault(step, set()).add(rank)
            has_used = step <= self._used and step not in self._steps
        if has_used:
            self._fail({rank})
        elif lane.error is not None and not self.is_spent and step not in self._steps:  # ``rank`` awaits an answer
            lane.lanes.mailbox.tell_later([rank], LaneFailed(lane.lane_id, str(lane.error)))

    def _spend(self) -> None:
        """Fail the lane after all ranks abandoned its step, so that they agree anew without an error."""
        if self._lane.error is None:
            self.is_spent = True
            self._lane.fail(MismatchError(GAVE_UP % self._lane.name))

    def _fail(self, ranks: Collection[int]) -> HorovodInternalError:
        """Fail the lane here and on ``ranks``, which abandoned a step that is used here. Return the lane's error."""
        lane, mailbox = self._lane, self._lane.lanes.mailbox
        text = ABANDONED % (mailbox.topology.describe(min(ranks)), lane.name, mailbox.me())
        error = MismatchError(text)
        lane.fail(error)
        mailbox.tell_later(sorted(ranks), LaneFailed(lane.lane_id, text))
        return lane.error or error
