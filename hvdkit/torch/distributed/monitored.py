"""A barrier at which rank 0 finds which ranks do not come."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic

import numpy as np

from hvdkit.engine.ordered.group import OrderedGroup
from hvdkit.engine.ordered.messages import Messages
from hvdkit.errors import StallError

TAG = (1 << 32) - 1  # of its messages; torch's own tags are smaller


def monitored_barrier(messages: Messages, group: OrderedGroup, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait for all ranks of a group. After an error the group's next monitored barrier is of no use.

    Raises StallError after ``timeout``: on rank 0 with the first rank that has not come, with ``wait_all_ranks`` with
    all of them; on others since rank 0 has not let them go on.
    """
    members, me, seconds = group.group.members, group.group.rank, timeout.total_seconds()
    until, others = monotonic() + seconds, range(1, group.group.size)
    if me > 0:
        messages.send(group, _byte(), 0, TAG)
        messages.receive(group, _byte(), 0, TAG).wait(seconds)
        return
    arrivals, late = {other: messages.receive(group, _byte(), other, TAG) for other in others}, []
    for other, arrival in arrivals.items():
        try:
            arrival.wait(max(0.001, until - monotonic()))
        except StallError:
            late.append(members[other])
            if not wait_all_ranks:
                break
    if late:
        raise StallError(
            f"monitored_barrier of group '{group.name}': ranks {late} did not come within {seconds:g} s.\n"
            "HINT: see what these ranks are doing (py-spy dump), and whether they take another path through the script."
        )
    for other in others:
        messages.send(group, _byte(), other, TAG)


def _byte() -> np.ndarray:
    return np.zeros(1, dtype=np.uint8)
