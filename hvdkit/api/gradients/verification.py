"""Verification of parameters: after some steps ranks compare hashes of what they train, and raise if they differ."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Comparison, Statement, exchange_by_name, is_due
from hvdkit.errors import ParametersDifferError

# Parameters that a message lists by name.
MOST_NAMES = 8

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
    """Return a message about the parameters after a step, None if they are the same, and whether it is an error.

    Ranks on machines that round alike must hold the same. Other ranks may differ by rounding, relative to each
    parameter's norm. In a first comparison every difference is a warning, since the broadcast may still follow.
    ``statement`` is this rank's, ``broadcast`` tells a user how to bring the ranks to the same values.
    """
    hashes = comparison.hashes
    by_hashes = _ranks_by({rank: each.tobytes() for rank, each in hashes.items()})
    by_machine = _ranks_by(comparison.machines)
    if len(by_hashes) < 2:
        return None, False
    on_machines = {(comparison.machines[rank], each.tobytes()) for rank, each in hashes.items()}
    is_error = len(set(map(len, hashes.values()))) > 1 or len(on_machines) > len(by_machine)
    names, groups = _differing(statement.names, hashes), _grouped(list(by_hashes.values()))
    text = DIFFER.format(title=title, step=step, names=names, groups=groups)
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
    if not distances:
        return None
    limits = np.maximum(statement.precisions, ROUNDING)
    parts = {rank: each / limits for rank, each in distances.items()}
    part, rank, index = max((float(each.max()), rank, int(each.argmax())) for rank, each in parts.items())
    if part <= 1:
        return None
    return BEYOND_ROUNDING.format(
        machines=machines,
        ranks=_listed([rank]),
        first=_listed([min(parts)]),
        distance=part * limits[index],
        name=statement.names[index],
        limit=limits[index],
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
        self.updates = False  # whether the update follows the step that ends now, with no user code in between
        self.wants_sketches = False  # since hashes or machines differed
        self._broadcast = broadcast
        self._lane: Any = None
        self._engine: Any = None
        self._every = 0
        self._steps_before = 0  # on earlier lanes
        self._warned = self._has_compared = False
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
        self._lane, self._engine, self._every = lane, engine, lane.verification.every
        lane.verification.ask = self._statement_of_step
        self._forget()

    @property
    def step(self) -> int:
        """Steps that are over on the lane; 0 if there is none that can be used."""
        lane = self._lane
        return 0 if lane is None or lane.closed or lane.error is not None else int(lane.steps)

    def wants(self, step: int, sparse: bool = False) -> bool:
        """True if hashes of the parameters are wanted as they are after ``step``; see ``is_due``."""
        return is_due(step, self._every, sparse)

    def state(self, statement: Statement) -> None:
        """Take a statement about the parameters as they are after the lane's last step."""
        self._after, self._stated = self._lane.steps, replace(statement, is_first=not self._has_compared)

    def _statement_of_step(self) -> Statement:
        """Return the statement that the lane sends at the end of the present step."""
        return replace(self._stated if self._after == self._lane.steps else Statement(), updates=self.updates)

    def finished(self) -> None:
        """A step of the lane is over. Raises ParametersDifferError, on all ranks, if they differed after the last."""
        self._at_once = False
        comparison = None if self._lane is None else self._lane.verification.take()
        if comparison is not None:
            self._judge(comparison, self._lane.name, self._steps_before + self._lane.steps - 1)
            self._at_once = comparison.all_update and self.wants(self.step)

    def compare_at_once(self, process_set_id: int) -> None:
        """Compare as ``finished`` does after the step that is over, if all ranks said that they update at once.

        Otherwise the statement is sent at the end of the next step.
        """
        if self._at_once:
            self._at_once, self._after = False, 0
            comparison = exchange_by_name(self._engine.named, self._lane.name, process_set_id, self._stated)
            self._judge(comparison, self._lane.name, self._steps_before + self._lane.steps)

    def _judge(self, comparison: Comparison, title: str, step: int) -> None:
        self._has_compared = self._has_compared or comparison.is_compared
        self.wants_sketches = self.wants_sketches or bool(comparison.hashes)
        text, is_error = compare(title, step, self._stated, comparison, self._broadcast)
        if text is not None and is_error:
            raise ParametersDifferError(text)
        if text is None or (self._warned and not comparison.is_first):
            return
        self._warned = True
        if comparison.is_first or self._engine.topology.rank == min(comparison.present):
            warnings.warn(text, stacklevel=2)
