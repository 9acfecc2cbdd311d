"""Parameters verified: after some steps ranks compare hashes of what they train, and raise where they differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Heard, Statement, exchange_by_name, is_due, is_due_for_sparse
from hvdkit.errors import ParametersDifferError

# Of each kind so many are told by name.
MOST_NAMES = 8

DIFFER = "The parameters of '{title}' are not the same on all ranks after step {step}: {names}. {groups}."
NEVER_BROADCAST = "HINT: they most likely never were; have all ranks start from the same values: {broadcast}. Else "
LATER = "HINT: {broadcast} brings them together; find out why they differ: "
CAUSES = (
    "gradients were changed on one rank unseen (in PyTorch through .data) between backward() and step(); ranks stepped "
    "differently (learning rates, random numbers in the update, a step that one rank left out, hvd.join() with nothing "
    "broadcast after it), or one loaded or changed values alone. HVDKIT_VERIFY=1 "
    "finds the first step after which they differ; 0 switches this off."
)
OTHER_MACHINES = (
    "The ranks that differ do not compute alike ({machines}), so that the same update may have been rounded "
    "differently: this is told once, and is no error.\n"
)


def compare(
    title: str, step: int, names: Sequence[str], hashes: dict[int, Array], machines: dict[int, str], broadcast: str
) -> tuple[str | None, bool]:
    """What is wrong with the parameters after a step, None if nothing, and whether it is an error or a warning.

    ``hashes`` and ``machines`` by rank. Ranks on machines that round alike must hold the same; others may not.
    """
    alike: dict[bytes, list[int]] = {}
    for rank in sorted(hashes):
        alike.setdefault(hashes[rank].tobytes(), []).append(rank)
    if len(alike) < 2:
        return None, False
    by_machine: dict[str, list[int]] = {}
    for rank in sorted(hashes):
        by_machine.setdefault(machines[rank], []).append(rank)
    is_error = any(len({hashes[rank].tobytes() for rank in ranks}) > 1 for ranks in by_machine.values())
    text = DIFFER.format(title=title, step=step, names=_differing(names, hashes), groups=_grouped(list(alike.values())))
    hint = (NEVER_BROADCAST if step == 1 else LATER) + CAUSES
    if not is_error:
        listed = "; ".join(f"{_ranks(ranks)}: {machine}" for machine, ranks in by_machine.items())
        text = f"{text} {OTHER_MACHINES.format(machines=listed).rstrip()}"
    return f"{text}\n{hint.format(broadcast=broadcast)}", is_error


def _differing(names: Sequence[str], hashes: dict[int, Array]) -> str:
    counts = {len(one) for one in hashes.values()}
    if len(counts) > 1:
        return "; ".join(f"rank {rank} has {len(one)} of them" for rank, one in sorted(hashes.items()))
    table = np.stack(list(hashes.values()))
    found = [f"'{names[index]}'" for index in np.nonzero((table != table[0]).any(axis=0))[0].tolist()]
    more = len(found) - MOST_NAMES
    return ", ".join(found[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "") + f" (of {len(names)}) differ"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _grouped(groups: list[list[int]]) -> str:
    """Who differs from whom: from the largest group, if there is one."""
    groups = sorted(groups, key=lambda ranks: (-len(ranks), ranks))
    if len(groups[0]) == 1 and len(groups) > 2:
        return f"Each of {_ranks(sorted(rank for ranks in groups for rank in ranks))} has other values"
    others = " and of ".join(_ranks(ranks) for ranks in groups[1:])
    return f"The values of {others} differ from those of {_ranks(groups[0])}"


class Verification:
    """Of the parameters of one optimizer, or of one tape's sources, on this rank.

    Steps are counted by the lane, which all ranks count alike, whoever has joined or given a step up. ``broadcast`` is
    how a user brings ranks to the same values.
    """

    def __init__(self, broadcast: str) -> None:
        self.updates = False  # whether the update follows the step that ends now, with nothing of the user's in between
        self._broadcast = broadcast
        self._lane: Any = None
        self._engine: Any = None
        self._every = 0
        self._steps_before = 0  # on earlier lanes
        self._warned = False
        self._names: list[str] = []
        self._forget()

    def _forget(self) -> None:
        self._after = 0  # the step of the lane after which the parameters were as stated
        self._stated = Statement()
        self._at_once = False

    def attach(self, lane: Any, engine: Any) -> None:
        """Go on with another lane of an engine, on which ranks have just agreed."""
        if self._lane is not None and engine is self._engine:
            self._steps_before += self._lane.steps
        else:
            self._steps_before = 0  # other ranks may be new
        self._engine = engine
        self._lane, self._every = lane, lane.verification.every
        lane.verification.ask = self._state
        self._forget()

    @property
    def step(self) -> int:
        """Steps that are over on the lane; 0 if there is none that can be used."""
        lane = self._lane
        return 0 if lane is None or lane.closed or lane.error is not None else int(lane.steps)

    def wants(self, step: int) -> bool:
        """Whether hashes of the parameters are wanted as they are after ``step``."""
        return not self._warned and is_due(step, self._every)

    def wants_sparse(self, step: int) -> bool:
        """Whether also of those whose gradients are sparse."""
        return self.wants(step) and is_due_for_sparse(step, self._every)

    def state(self, names: Sequence[str], statement: Statement) -> None:
        """The parameters of these names as they are after the last step."""
        self._after, self._names, self._stated = self._lane.steps, list(names), statement

    def _state(self) -> Statement:
        """What the lane asks for at the end of a step."""
        if self._after == self._lane.steps:
            return replace(self._stated, updates=self.updates)
        return Statement(updates=self.updates)

    def finished(self) -> None:
        """A step of the lane is over. Raises ParametersDifferError, on all ranks, if they differed after the last."""
        self._at_once = False
        heard = None if self._lane is None else self._lane.verification.take()
        if heard is None:
            return
        self._judge(heard, self._lane.name, self._steps_before + self._lane.steps - 1, self._lane.group.members)
        self._at_once = heard.all_update and self.wants(self.step)

    def compare_at_once(self, process_set_id: int) -> None:
        """The same for the step that is over, whose parameters are stated, if all ranks said that they would be here.

        They have not: what is stated is told at the end of the next step.
        """
        if self._at_once:
            self._at_once, self._after = False, 0
            heard = exchange_by_name(self._engine, self._lane.name, process_set_id, self._stated)
            self._judge(heard, self._lane.name, self._steps_before + self._lane.steps, self._lane.group.members)

    def _judge(self, heard: Heard, title: str, step: int, members: Sequence[int]) -> None:
        if not heard.differs:
            return
        ranks = {members[index]: index for index in heard.present}
        hashes = {rank: heard.hashes(index) for rank, index in ranks.items()}
        machines = {rank: heard.machine(index) for rank, index in ranks.items()}
        text, is_error = compare(title, step, self._names, hashes, machines, self._broadcast)
        if text is not None and is_error:
            raise ParametersDifferError(text)
        if text is not None:
            self._warned = True
            if self._engine.topology.rank == min(ranks):
                warnings.warn(text, stacklevel=2)
