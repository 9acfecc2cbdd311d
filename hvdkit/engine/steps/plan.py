"""The request of an optimizer, and its tensors in fusion buffers: pure functions of the facts that ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from hvdkit.compression import Codec
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import CACHE_LINE


@dataclass(frozen=True)
class Slot:
    """A tensor of a plan."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: int = 0  # which one of the plan's codecs

    @cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def padded(self) -> int:
        """The elements up to the next cache line."""
        line = max(1, CACHE_LINE // self.dtype.itemsize)
        return -(-self.elements // line) * line


@dataclass(frozen=True)
class Reduction:
    """The operation, the factors and the codecs of a plan."""

    op: ReduceOp
    prescale: float
    postscale: float
    codecs: tuple[Codec, ...]  # slots say which one is theirs


@dataclass(frozen=True)
class Plan:
    """The request of an optimizer. ``device`` is the device on which its slots shall live, or registration.HOST."""

    name: str
    slots: Sequence[Slot]
    reduction: Reduction
    process_set_id: int = 0
    groups: Sequence[Sequence[int]] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class Bucket:
    """Slots that travel together, all of one dtype and one codec, each beginning on a cache line.

    One slot alone is its bucket, with nothing behind it.
    """

    dtype: np.dtype[Any]
    slots: tuple[int, ...]
    offsets: tuple[int, ...]  # in elements, one for each slot
    elements: int
    codec: int = 0

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def lay_out(
    slots: Sequence[Slot],
    order: Sequence[int],
    threshold: int,
    groups: Sequence[Sequence[int]] = (),
    first_threshold: int | None = None,
    alone: int | None = None,
) -> list[Bucket]:
    """Return buckets of at most ``threshold`` bytes, as they become complete if slots become ready in ``order``.

    A slot larger than the threshold has a bucket of its own; the slots of a group share one bucket whatever its size.
    Threshold 0 gives every slot (or group) its own bucket. ``first_threshold`` is that of the first bucket. Slots of
    ``alone`` bytes or more that are in no group have a bucket of their own too. Slots that are not in ``order`` are
    left out.
    """
    buckets: list[Bucket] = []
    first = threshold if first_threshold is None else first_threshold
    filling: dict[tuple[np.dtype[Any], int], tuple[list[int], int]] = {}  # by dtype and codec: slots and bytes so far
    for unit in _units(order, groups):
        kinds: dict[tuple[np.dtype[Any], int], list[int]] = {}
        for slot in unit:
            kinds.setdefault((slots[slot].dtype, slots[slot].codec), []).append(slot)
        for kind, members in kinds.items():
            nbytes = sum(slots[slot].padded * slots[slot].dtype.itemsize for slot in members)
            if alone is not None and len(unit) == 1 and nbytes >= alone:
                buckets.append(_bucket(slots, members))
                continue
            held, held_bytes = filling.pop(kind, ([], 0))
            limit = threshold if buckets else first
            if held and held_bytes + nbytes > limit:
                buckets.append(_bucket(slots, held))
                held, held_bytes = [], 0
            held.extend(members)
            filling[kind] = held, held_bytes + nbytes
            if held_bytes + nbytes >= limit:
                buckets.append(_bucket(slots, filling.pop(kind)[0]))
    buckets += [_bucket(slots, held) for held, _ in filling.values()]
    position = {slot: index for index, slot in enumerate(order)}
    return sorted(buckets, key=lambda bucket: max(position[slot] for slot in bucket.slots))


def _units(order: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the slots that stay together, each unit at the place where its last slot becomes ready."""
    present = set(order)
    groups = [[slot for slot in group if slot in present] for group in groups]
    group_of = {slot: number for number, group in enumerate(groups) for slot in group}
    left = [len(group) for group in groups]
    units: list[list[int]] = []
    for slot in order:
        number = group_of.get(slot)
        if number is None:
            units.append([slot])
            continue
        left[number] -= 1
        if left[number] == 0:
            units.append(list(groups[number]))
    return units


def _bucket(slots: Sequence[Slot], members: Sequence[int]) -> Bucket:
    offsets = []
    end = 0
    for slot in members:
        offsets.append(end)
        end += slots[slot].padded
    first = slots[members[0]]
    elements = first.elements if len(members) == 1 else end
    return Bucket(first.dtype, tuple(members), tuple(offsets), elements, first.codec)


def first_order(count: int) -> list[int]:
    """Return the order before any was observed: the backward pass reaches the last registered tensor first."""
    return list(range(count - 1, -1, -1))


def observed_order(ready: Sequence[int], count: int) -> list[int]:
    """Return the order in which slots became ready; slots without a gradient in that step come last."""
    seen = set(ready)
    return [*ready, *(slot for slot in first_order(count) if slot not in seen)]
