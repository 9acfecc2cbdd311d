"""In the first step of a lane: when rank 0 sees its gradients become ready, and that all ranks learn it."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.choice import AUTO
from hvdkit.collectives.group import Group, Steps
from hvdkit.compression import CASTS
from hvdkit.engine.steps.arrangement import UNSEEN
from hvdkit.kernels import ONE, ReduceOp


class Observation:
    """Of ``count`` slots. ``ready_at``: when each was ready on rank 0, in seconds, or UNSEEN; the same on all ranks."""

    def __init__(self, group: Group, count: int) -> None:
        self.ready_at = [UNSEEN] * count
        self._group = group
        self._seen: dict[int, float] = {}  # here, in seconds

    def sees(self, slot: int, since: float | None) -> None:
        """A slot is ready since then (perf_counter), or since just now; UNSEEN where nobody saw that."""
        if since != UNSEEN:
            self._seen[slot] = perf_counter() if since is None else since

    def exchange(self, tag: int, joined: bool) -> Steps[None]:
        """Tell and hear, in microseconds since the first slot. Uses ``tag`` and ``tag + 1``."""
        message = np.full(len(self.ready_at), -1, dtype=np.int64)
        if self._group.rank == 0 and not joined and self._seen:
            first = min(self._seen.values())
            for slot, at in self._seen.items():
                message[slot] = int((at - first) * 1e6)
        yield from allreduce(self._group, message, ReduceOp.MAX, ONE, CASTS["none"], tag, AUTO)
        self.ready_at = [UNSEEN if microseconds < 0 else microseconds * 1e-6 for microseconds in message.tolist()]
