"""Parameters verified: after some steps ranks compare hashes of what they train, and raise where they differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Heard, Statement, exchange_by_name, is_due, is_due_for_sparse
from hvdkit.errors import ParametersDifferError

# Of each kind so many are told by name.
MOST_NAMES = 8

# Ranks that do not compute alike may differ by so much of a parameter's norm, or by its type's precision.
ROUNDING = 1e-3

DIFFER = "The parameters of '{title}' are not the same on all ranks after step {step}: {names}. {groups}."
NEVER_BROADCAST = (
    "HINT: they most likely never were; have all ranks start from the same values: {broadcast}. This is a warning "
    "because a broadcast may follow the first step; if they still differ at the next comparison, after step 10 at the "
    "latest, it is an error. Else "
)
LATER = "HINT: {broadcast} brings them together; find out why they differ: "
CAUSES = (
    "gradients were changed on one rank unseen (in PyTorch through .data) between backward() and step(); ranks stepped "
    "differently (learning rates, random numbers in the update, a step that one rank left out, hvd.join() with nothing "
    "broadcast after it), or one loaded or changed values alone. HVDKIT_VERIFY=1 "
    "finds the first step after which they differ; 0 switches this off."
)
OTHER_MACHINES = (
    "The ranks that differ do not compute alike ({machines}), so that the same update may have been rounded "
    "differently: this is told once, and is an error when parameters differ by more than rounding explains."
)
BEYOND_ROUNDING = (
    "The ranks do not compute alike ({machines}), but rounding does not explain this: the values of {ranks} differ "
    "from those of {first} by {distance:.2g} of the norm of '{name}', more than {limit:.2g}."
)


def rounding_limit(precision: float) -> float:
    """Return how far parameters of a type may be apart by rounding; ``precision`` is the type's eps."""
    return max(ROUNDING, precision)


@dataclass(frozen=True)
class Told:
    """What all ranks told of the same step, by rank. ``distances``: from the lowest rank, None if not measured.

    ``is_first``: whether some rank compares these parameters for the first time.
    """

    hashes: dict[int, Array]
    machines: dict[int, str]
    distances: dict[int, Array] | None = None
    is_first: bool = False


def compare(
    title: str, step: int, names: Sequence[str], limits: Sequence[float], told: Told, broadcast: str
) -> tuple[str | None, bool]:
    """What is wrong with the parameters after a step, None if nothing, and whether it is an error or a warning.

    Ranks on machines that round alike must hold the same. Others may differ by rounding: by ``limits``, relative to
    each parameter's norm. In a first comparison all is a warning, since the broadcast may still follow.
    """
    hashes, machines = told.hashes, told.machines
    alike: dict[bytes, list[int]] = {}
    for rank in sorted(hashes):
        alike.setdefault(hashes[rank].tobytes(), []).append(rank)
    if len(alike) < 2:
        return None, False
    by_machine: dict[str, list[int]] = {}
    for rank in sorted(hashes):
        by_machine.setdefault(machines[rank], []).append(rank)
    is_error = len({len(one) for one in hashes.values()}) > 1 or any(
        len({hashes[rank].tobytes() for rank in ranks}) > 1 for ranks in by_machine.values()
    )
    text = DIFFER.format(title=title, step=step, names=_differing(names, hashes), groups=_grouped(list(alike.values())))
    if not is_error:
        listed = "; ".join(f"{_ranks(ranks)}: {machine}" for machine, ranks in by_machine.items())
        beyond = _beyond_rounding(names, limits, told, listed)
        is_error = beyond is not None
        text = f"{text} {beyond or OTHER_MACHINES.format(machines=listed)}"
    hint = (NEVER_BROADCAST if told.is_first else LATER) + CAUSES
    return f"{text}\n{hint.format(broadcast=broadcast)}", is_error and not told.is_first


def _beyond_rounding(names: Sequence[str], limits: Sequence[float], told: Told, machines: str) -> str | None:
    """Return what is said of the parameter that is farthest apart, if that is more than its limit."""
    if told.distances is None:
        return None
    distance, rank, index = max(
        (float(distance) / limit, rank, index)
        for rank, distances in told.distances.items()
        for index, (distance, limit) in enumerate(zip(distances, limits, strict=True))
    )
    if distance <= 1:
        return None
    return BEYOND_ROUNDING.format(
        machines=machines,
        ranks=_ranks([rank]),
        first=_ranks([min(told.hashes)]),
        distance=distance * limits[index],
        name=names[index],
        limit=limits[index],
    )


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
        self._has_compared = False
        self._suspects = False  # whether hashes or machines have differed: from then on sketches are told
        self._names: list[str] = []
        self._limits: list[float] = []
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
            self._steps_before, self._has_compared = 0, False  # other ranks may be new
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
        return is_due(step, self._every)

    def wants_sparse(self, step: int) -> bool:
        """Whether also of those whose gradients are sparse."""
        return self.wants(step) and is_due_for_sparse(step, self._every)

    @property
    def wants_sketches(self) -> bool:
        """True if a statement is to have sketches as well as hashes."""
        return self._suspects

    def state(self, names: Sequence[str], limits: Sequence[float], statement: Statement) -> None:
        """Receives what the parameters of these names are after the last step. ``limits``: see ``rounding_limit``."""
        self._after, self._stated = self._lane.steps, replace(statement, is_first=not self._has_compared)
        self._names, self._limits = list(names), list(limits)

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
            heard = exchange_by_name(self._engine.named, self._lane.name, process_set_id, self._stated)
            self._judge(heard, self._lane.name, self._steps_before + self._lane.steps, self._lane.group.members)

    def _judge(self, heard: Heard, title: str, step: int, members: Sequence[int]) -> None:
        self._has_compared = self._has_compared or heard.is_compared
        if not heard.differs:
            return
        self._suspects = True
        ranks = {members[index]: index for index in heard.present}
        distances = {rank: heard.distances(index) for rank, index in ranks.items()}
        told = Told(
            {rank: heard.hashes(index) for rank, index in ranks.items()},
            {rank: heard.machine(index) for rank, index in ranks.items()},
            {rank: one for rank, one in distances.items() if one is not None} or None,
            heard.is_first,
        )
        text, is_error = compare(title, step, self._names, self._limits, told, self._broadcast)
        if text is not None and is_error:
            raise ParametersDifferError(text)
        if text is None or (self._warned and not heard.is_first):
            return
        self._warned = True
        if heard.is_first or self._engine.topology.rank == min(ranks):
            warnings.warn(text, stacklevel=2)
