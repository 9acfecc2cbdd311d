"""Verification of parameters: after some steps ranks compare hashes of what they train, and raise if they differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Comparison, Statement, Word, compare_by_name, is_due
from hvdkit.errors import ParametersDifferError

MOST_NAMES = 8  # parameters that a message lists
# Ranks that do not compute alike may differ by this part of a parameter's norm, or by its type's precision.
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


def compare(
    title: str, step: int, statement: Statement, comparison: Comparison, broadcast: str
) -> tuple[str | None, bool]:
    """Return a message about the parameters after a step, None if they are the same, and True if it is an error.

    Ranks on machines that round alike must hold the same. Other ranks may differ by rounding, relative to each
    parameter's norm. In a first comparison every difference is a warning, since the broadcast may still follow.
    ``statement`` is this rank's, ``broadcast`` tells a user how to bring the ranks to the same values.
    """
    hashes, machines = comparison.hashes, comparison.machines
    groups = _ranks_by({rank: each.tobytes() for rank, each in hashes.items()})
    if len(groups) < 2:
        return None, False
    by_machine = _ranks_by(machines)
    names, counts = _differing(statement.names, hashes), set(map(len, hashes.values()))
    text = DIFFER.format(title=title, step=step, names=names, groups=_grouped(list(groups.values())))
    on_machines = {(machines[rank], each.tobytes()) for rank, each in hashes.items()}
    is_error = len(counts) > 1 or len(on_machines) > len(by_machine)
    if not is_error:
        listed = "; ".join(f"{_listed(ranks)}: {machine}" for machine, ranks in by_machine.items())
        beyond = _beyond_rounding(statement, comparison.distances, listed)
        is_error = beyond is not None
        text = f"{text} {beyond or OTHER_MACHINES.format(machines=listed)}"
    hint = (NEVER_BROADCAST if comparison.is_first else LATER) + CAUSES
    return f"{text}\n{hint.format(broadcast=broadcast)}", is_error and not comparison.is_first


def _ranks_by(values: dict[int, Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def _beyond_rounding(statement: Statement, distances: dict[int, Array], machines: str) -> str | None:
    """Return a text about the parameter that is farthest apart, if that is more than its limit."""
    limits = np.maximum(statement.precisions, ROUNDING)
    parts = {rank: each / limits for rank, each in distances.items()}
    part, rank, index = max(((float(p.max()), rank, int(p.argmax())) for rank, p in parts.items()), default=(0.0, 0, 0))
    if part <= 1:
        return None
    limit, name = limits[index], statement.names[index]
    ranks, first = _listed([rank]), _listed([min(parts)])
    return BEYOND_ROUNDING.format(
        machines=machines, ranks=ranks, first=first, distance=part * limit, name=name, limit=limit
    )


def _differing(names: Sequence[str], hashes: dict[int, Array]) -> str:
    if len(set(map(len, hashes.values()))) > 1:
        return "; ".join(f"rank {rank} has {len(each)} of them" for rank, each in sorted(hashes.items()))
    table = np.stack(list(hashes.values()))
    differing = [f"'{names[index]}'" for index in np.nonzero((table != table[0]).any(axis=0))[0].tolist()]
    more = len(differing) - MOST_NAMES
    return ", ".join(differing[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "") + f" (of {len(names)}) differ"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _grouped(groups: list[list[int]]) -> str:
    """Return a text about which ranks differ from the largest group, if there is one."""
    groups = sorted(groups, key=lambda ranks: (-len(ranks), ranks))
    if len(groups[0]) == 1 and len(groups) > 2:
        return f"Each of {_listed(sorted(rank for ranks in groups for rank in ranks))} has other values"
    others = " and of ".join(_listed(ranks) for ranks in groups[1:])
    return f"The values of {others} differ from those of {_listed(groups[0])}"


class Verification:
    """The verification of the parameters of one optimizer, or of one tape's sources, on this rank.

    The lane counts the steps, which all ranks count alike, also where a rank has joined or given a step up.
    ``broadcast`` is how a user brings ranks to the same values.
    """

    def __init__(self, broadcast: str) -> None:
        self.updates = False  # True if the update follows the step that ends now, with no user code in between
        self.wants_sketches = False  # since hashes or machines differed
        self._broadcast = broadcast
        self._lane: Any = None
        self._engine: Any = None
        self._every = 0
        self._steps_before = 0  # on earlier lanes
        self._warned = self._has_compared = False
        self._statement: Statement | None = None  # the newest
        self._stated_after = 0  # the lane's step after which the newest statement was made
        self._at_once = False  # all ranks compare after the update that follows

    def attach(self, lane: Any, engine: Any) -> None:
        """Go on with another lane of an engine, on which ranks have just agreed."""
        if self._lane is not None and engine is self._engine:
            self._steps_before += self._lane.steps
        else:
            self._steps_before, self._has_compared = 0, False  # other ranks may be new
        self._lane, self._engine, self._every = lane, engine, lane.verification.every
        lane.verification.ask = self._word
        self._stated_after, self._at_once = 0, False

    def _word(self) -> int:
        has_hashed = self._stated_after > 0 and self._stated_after == self._lane.steps
        return Word.PRESENT | Word.UPDATES * self.updates | Word.HASHED * has_hashed

    @property
    def step(self) -> int:
        """Steps that are over on the lane; 0 if there is none that can be used."""
        lane = self._lane
        return 0 if lane is None or lane.closed or lane.error is not None else int(lane.steps)

    def wants(self, step: int, sparse: bool = False) -> bool:
        """True if hashes of the parameters are wanted as they are after ``step``; see ``is_due``."""
        return is_due(step, self._every, sparse)

    def state(self, statement: Statement) -> None:
        """Compare the parameters as they are after the lane's last step: now if all ranks update at once, or later."""
        self._statement, self._stated_after = statement, self._lane.steps
        if self._at_once:
            self._at_once, self._stated_after = False, 0
            self._compare(self._lane.name, self._lane.plan.process_set_id, self._steps_before + self._lane.steps)

    def finished(self) -> None:
        """Act on the end of a lane's step. Raises ParametersDifferError on all ranks if parameters differed."""
        self._at_once = False
        if self._lane is None or not self._lane.verification.words:
            return
        words, self._lane.verification.words = self._lane.verification.words, []
        taking_part, process_set_id = [word for word in words if word != Word.JOINED], self._lane.plan.process_set_id
        # A rank that has joined takes part in named operations of all ranks only. A rank without hashes made no update.
        can_compare = len(taking_part) == len(words) or process_set_id == 0
        if can_compare and len(taking_part) > 1 and all(word & Word.HASHED for word in taking_part):
            self._compare(self._lane.name, process_set_id, self._steps_before + self._lane.steps - 1)
        self._at_once = all(word & Word.UPDATES for word in words) and self.wants(self.step)

    def _compare(self, title: str, process_set_id: int, step: int) -> None:
        """Compare the newest statements of all ranks. Raises ParametersDifferError on all ranks, or warns."""
        assert self._statement is not None
        statement = replace(self._statement, is_first=not self._has_compared)
        comparison = compare_by_name(self._engine.named, title, process_set_id, statement)
        self._has_compared = True
        self.wants_sketches = self.wants_sketches or bool(comparison.hashes)
        text, is_error = compare(title, step, statement, comparison, self._broadcast)
        if text is not None and is_error:
            raise ParametersDifferError(text)
        if text is None or (self._warned and not comparison.is_first):
            return
        self._warned = True
        if comparison.is_first or self._engine.topology.rank == min(comparison.machines):
            warnings.warn(text, stacklevel=2)
