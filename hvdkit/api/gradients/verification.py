"""Verification of parameters: after some steps ranks compare hashes of what they train, and raise if they differ.

A hash does not tell rounding from an unrelated model. So once ranks have met that do not compute alike, each makes a
sketch of every parameter besides, and if hashes differ they measure their distance from the first rank by its sketches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from operator import itemgetter
from typing import Any

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.group import Array
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.telemetry.verifying import Word, is_due
from hvdkit.errors import ParametersDifferError, abridged

# The parameters that are hashed after a step: none, those with dense gradients, all.
NOTHING, DENSE, ALL = range(3)

MOST_NAMES = 8  # parameters that a message lists
# Ranks that do not compute alike may differ by this part of a parameter's norm, or by its type's precision.
ROUNDING = 1e-3
# Smaller norms count as this, so that a subnormal number which one rank flushes to zero is no difference.
SMALLEST_NORM = 1e-30
SKETCH = 64  # numbers of a sketch
CHUNK = 1 << 20  # elements that are read at a time

DIFFER = "The parameters of '{title}' are not the same on all ranks after step {step}: {names}. {groups}."
NEVER_BROADCAST = (
    "HINT: they most likely never were the same; have all ranks start from the same values: {broadcast}. This is a "
    "warning because a broadcast may follow the first step; if the parameters still differ at the next comparison, "
    "after step 10 at the latest, it is an error. If they were the same at the start: "
)
LATER = "HINT: to make them equal, use {broadcast}; find out why they differ: "
STILL_DIFFER = (
    "HINT: they differed in the first comparison already, so they most likely never were the same; have all ranks "
    "start from the same values: {broadcast}. If they were the same at the start: "
)
CAUSES = (
    "gradients were changed on one rank unnoticed (in PyTorch through .data) between backward() and step(); ranks "
    "stepped differently (learning rates, random numbers in the update, a step that one rank left out, hvd.join() "
    "without a broadcast after it); or one rank alone loaded or changed values. HVDKIT_VERIFY=1 "
    "finds the first step after which they differ; 0 switches this comparison off."
)
OTHER_MACHINES = (
    "The ranks that differ do not compute alike ({machines}), so the same update may have been rounded differently. "
    "Later differences of this kind are not reported; a difference that rounding does not explain is an error."
)
BEYOND_ROUNDING = (
    "The ranks do not compute alike ({machines}), but rounding does not explain this: the values of rank {rank} "
    "differ from those of rank {first} by {distance:.2g} of the norm of '{name}', more than {limit:.2g}."
)

# Exchanges details of the ranks, any JSON, under a name; returns those of all ranks.
Gather = Callable[[str, Any], list[Any]]


@dataclass(frozen=True)
class Statement:
    """A rank's description of its parameters after an update."""

    machine: str  # what decides how this rank's kernels round
    names: Sequence[str]
    precisions: Sequence[float]  # eps of the parameters' types, 0 for integers
    hashes: Array  # uint64, one for each parameter
    sketches: Sequence[Array] | None  # one for each parameter if they are wanted


def sketch(chunks: Iterable[Array]) -> Array:
    """Return SKETCH float64 numbers of a tensor; the distance of two sketches is that of the tensors.

    Each element is added, with a sign that follows from its offset, to the number of its offset modulo SKETCH (M.
    Charikar et al., "Finding frequent items in data streams", 2002). The Euclidean distance of tensors of more than
    SKETCH elements is met to about 9 %, of others exactly. Infinities and NaN count as very large numbers.
    ``chunks``: its elements as flat arrays of CHUNK real numbers; the last array may be shorter.
    """
    total = np.zeros(SKETCH)
    for number, chunk in enumerate(chunks):
        values = np.nan_to_num(chunk.astype(np.float64), nan=3e100, posinf=1e100, neginf=-1e100)
        bits = np.frombuffer(shake_128(b"%d" % number).digest(len(values) // 8 + 1), dtype=np.uint8)
        signed = np.where(np.unpackbits(bits, count=len(values)), values, -values)
        total += np.bincount(np.arange(len(values)) % SKETCH, weights=signed, minlength=SKETCH)
    return total


def may_be_rounding(machines: dict[int, str], hashes: dict[int, Sequence[int]]) -> bool:
    """True if all ranks hold equally many parameters, and those that compute alike hold the same."""
    different = {(machines[rank], tuple(values)) for rank, values in hashes.items()}
    return len(set(map(len, hashes.values()))) == 1 and len(different) == len(set(machines.values()))


def describe(title: str, step: int, names: Sequence[str], hashes: dict[int, Sequence[int]]) -> str:
    """Return a message about parameters that differ: which of them, and of which ranks."""
    if len(set(map(len, hashes.values()))) > 1:
        differing = "; ".join(f"rank {rank} has {len(values)} of them" for rank, values in hashes.items())
    else:
        columns = zip(names, *hashes.values(), strict=True)
        changed = [f"'{name}'" for name, *values in columns if len(set(values)) > 1]
        differing = f"{abridged(changed, MOST_NAMES)} (of {len(names)}) differ"
    groups = _ranks_by({rank: tuple(values) for rank, values in hashes.items()}).values()
    largest, *others = sorted(groups, key=lambda ranks: (-len(ranks), ranks))
    if len(largest) == 1 and len(others) > 1:
        text = f"Each of {_listed(list(hashes))} has other values"
    else:
        text = f"The values of {' and of '.join(map(_listed, others))} differ from those of {_listed(largest)}"
    return DIFFER.format(title=title, step=step, names=differing, groups=text)


def explain(
    statement: Statement, rank: int, machines: dict[int, str], is_measured: bool, gather: Gather
) -> tuple[str, bool]:
    """Return a text about ranks that do not compute alike, and True if they differ by more than rounding. Collective.

    If all ranks have sketches (``is_measured``), each tells by which of its parameters it is farthest from the first.
    """
    listed = "; ".join(f"{_listed(ranks)}: {machine}" for machine, ranks in _ranks_by(machines).items())
    if is_measured:
        assert statement.sketches is not None
        first = min(machines)
        reference = gather("sketches", np.array(statement.sketches).tolist() if rank == first else None)[0]
        norms = np.maximum(np.linalg.norm(reference, axis=1), SMALLEST_NORM)
        distances = np.linalg.norm(np.subtract(statement.sketches, reference), axis=1) / norms
        distances[np.isnan(distances)] = np.inf  # where squares are too large for a float64
        limits = np.maximum(statement.precisions, ROUNDING)
        index = int(np.argmax(distances / limits))
        name, distance, limit = statement.names[index], float(distances[index]), float(limits[index])
        text = BEYOND_ROUNDING.format(
            machines=listed, rank=rank, first=first, distance=distance, name=name, limit=limit
        )
        part, text = max(gather("distances", [distance / limit, text]), key=itemgetter(0))
        if part > 1:
            return text, True
    return OTHER_MACHINES.format(machines=listed), False


def _ranks_by(values: Mapping[int, Hashable]) -> dict[Any, list[int]]:
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Verification:
    """The verification of the parameters of one optimizer, or of one tape's sources, on this rank.

    The lane counts the steps, which all ranks count alike, also where a rank has joined or given a step up.
    ``broadcast`` is how a user brings ranks to the same values.
    """

    def __init__(self, broadcast: str) -> None:
        self.updates = False  # True if the update follows the step that ends now, with no user code in between
        self.wants_sketches = False  # since ranks have met that do not compute alike
        self._broadcast = broadcast
        self._lane: Any = None
        self._engine: Any = None
        self._steps_before = 0  # on earlier lanes
        self._compared_in: Any = None  # the engine; ranks of another one may be new
        self._has_warned = self._differed_at_first = False
        self._statement: Statement | None = None  # the newest that awaits the end of the next step
        self._stated_after = 0  # the lane's step after which it was made
        self._at_once = False  # all ranks compare after the update that follows

    def attach(self, lane: Any, engine: Any) -> None:
        """Go on with another lane of an engine, on which ranks have just agreed."""
        goes_on = self._lane is not None and engine is self._engine
        self._steps_before = self._steps_before + self._lane.steps if goes_on else 0
        self._lane, self._engine = lane, engine
        lane.verification.ask = self._word
        self._stated_after, self._at_once = 0, False

    def _word(self) -> int:
        has_hashed: bool = 0 < self._stated_after == self._lane.steps
        return Word.PRESENT | Word.UPDATES * self.updates | Word.HASHED * has_hashed

    def level(self) -> int:
        """Return which parameters are to be hashed as they are after the lane's last step: NOTHING, DENSE or ALL."""
        lane = self._lane
        if lane is None or not lane.verification.is_due or lane.closed or lane.error is not None:
            return NOTHING
        return ALL if is_due(lane.steps, lane.verification.every, sparse=True) else DENSE

    def state(self, statement: Statement) -> None:
        """Compare the parameters as they are after the lane's last step: now if all ranks update at once, or later."""
        if self._at_once:
            self._at_once = False
            self._compare_after(self._lane.steps, statement)
        else:
            self._statement, self._stated_after = statement, self._lane.steps

    def finished(self) -> None:
        """Act on the end of a lane's step. Raises ParametersDifferError on all ranks if parameters differed."""
        self._at_once = False
        if self._lane is None or not self._lane.verification.words:
            return
        words, self._lane.verification.words = self._lane.verification.words, []
        taking_part = [word for word in words if word != Word.JOINED]
        # A rank that has joined takes part in named operations of all ranks only. A rank without hashes made no update.
        can_compare = len(taking_part) == len(words) or self._lane.plan.process_set_id == 0
        if can_compare and len(taking_part) > 1 and all(word & Word.HASHED for word in taking_part):
            assert self._statement is not None
            self._compare_after(self._lane.steps - 1, self._statement)
        self._at_once = all(word & Word.UPDATES for word in words) and self.level() != NOTHING

    def _compare_after(self, steps: int, statement: Statement) -> None:
        lane = self._lane
        self.compare(self._engine, lane.name, lane.plan.process_set_id, self._steps_before + steps, statement)

    def compare(self, engine: Any, title: str, process_set_id: int, step: int, statement: Statement) -> None:
        """Compare the parameters after a step, where all ranks are at the same line. Collective, and blocks.

        Each decision about a further exchange follows from values that all ranks have from the exchange before.

        Ranks on machines that round alike must hold the same. Other ranks may differ by rounding, relative to each
        parameter's norm. In a first comparison every difference is a warning, since the broadcast may still follow.
        Otherwise raise ParametersDifferError on all ranks. Ranks that have joined take no part.
        """

        def gather(what: str, detail: Any) -> list[Any]:
            call = Call(f"{title}.{what} of parameters", process_set_id, wake=False)
            return engine.named.gather_details(detail, call)[1]  # type: ignore[no-any-return]

        rank = engine.topology.rank
        checksum = kernels.checksum(statement.hashes.view(np.uint8))
        is_sketched = statement.sketches is not None
        is_first = self._compared_in is not engine
        rows = gather("checksums", [rank, statement.machine, checksum, is_sketched, is_first])
        ranks, kinds, checksums, are_sketched, are_first = zip(*rows, strict=True)
        machines = dict(zip(ranks, kinds, strict=True))
        self._compared_in = engine
        self.wants_sketches |= len(set(kinds)) > 1
        if len(set(checksums)) == 1:
            self._differed_at_first = False  # a broadcast has made them equal
            return
        hashes = dict(zip(ranks, gather("hashes", statement.hashes.tolist()), strict=True))
        text = describe(title, step, statement.names, hashes)
        is_error = not may_be_rounding(machines, hashes)
        if not is_error:
            explanation, is_error = explain(statement, rank, machines, all(are_sketched), gather)
            text = f"{text} {explanation}"
        hint = (NEVER_BROADCAST if any(are_first) else STILL_DIFFER if self._differed_at_first else LATER) + CAUSES
        text = f"{text}\n{hint.format(broadcast=self._broadcast)}"
        if is_error and not any(are_first):
            raise ParametersDifferError(text)
        if any(are_first) or (rank == ranks[0] and not self._has_warned):
            warnings.warn(text, stacklevel=2)
        self._has_warned = True
        self._differed_at_first |= any(are_first) and is_error
