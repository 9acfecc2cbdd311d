"""Allreduce in place: a table of algorithms, and the choice among them.

Only two are chosen unasked: ``all_to_all`` where latency rules, ``two_phase`` where bandwidth does. Both sum in rank
order and round once, and so give the bits that one process gives: the result does not depend on which of them ran, nor
on what was measured. ``round_robin`` and ``master_worker`` give these bits too; ``ring``, ``tree`` and ``butterfly``
sum in orders of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from hvdkit.collectives.by_name import (
    butterfly_allreduce,
    master_worker_allreduce,
    ring_allreduce,
    round_robin_allreduce,
    tree_allreduce,
)
from hvdkit.collectives.choice import AUTO, REDUCE_SECONDS_PER_BYTE, Choice
from hvdkit.collectives.chunks import decode_final, scale_in_place
from hvdkit.collectives.direct import all_to_all_allreduce, two_phase_allreduce
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale

Algorithm = Callable[[Group, Array, ReduceOp, Scale, Cast, int], Steps[None]]

# Each is for two ranks or more, and says where it stands what it costs.
ALGORITHMS: dict[str, Algorithm] = {
    "all_to_all": all_to_all_allreduce,
    "two_phase": two_phase_allreduce,
    "ring": ring_allreduce,
    "tree": tree_allreduce,
    "butterfly": butterfly_allreduce,
    "round_robin": round_robin_allreduce,
    "master_worker": master_worker_allreduce,
}


@lru_cache(maxsize=1024)  # the same few sizes come again and again
def choose_allreduce(nbytes: int, size: int, choice: Choice = AUTO) -> tuple[str, str]:
    """The algorithm for one tensor of ``nbytes`` bytes on ``size`` ranks, and the reason.

    "auto" takes the cheaper one by the alpha-beta model (Hockney, 1994): ``latency_seconds`` for each exchange,
    ``seconds_per_byte`` for each byte that a rank sends, and what summing takes: everything on every rank or a share
    each. All ranks must choose alike, so all arguments must be the same on all of them.

    Raises ValueError for a name that is no algorithm's.
    """
    asked, latency_seconds, seconds_per_byte = choice
    if asked in ALGORITHMS:
        return asked, "HVDKIT_ALLREDUCE"
    if asked != "auto":
        names = ", ".join(["auto", *ALGORITHMS])
        raise ValueError(f"choose_allreduce: asked: expected one of {names}, got {asked!r}")
    summing = nbytes * REDUCE_SECONDS_PER_BYTE
    all_to_all = latency_seconds + (size - 1) * nbytes * seconds_per_byte + size * summing
    two_phase = 2 * latency_seconds + 2 * (size - 1) / size * nbytes * seconds_per_byte + summing
    name = "all_to_all" if all_to_all <= two_phase else "two_phase"
    costs = f"all_to_all {all_to_all * 1e6:.1f} us, two_phase {two_phase * 1e6:.1f} us"
    return name, f"{nbytes} bytes x {size} ranks: {costs}"


def allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int, choice: Choice | None = None
) -> Steps[None]:
    """Replace ``buffer`` (flat) by ``scale * (rank 0's op rank 1's op ...)``. Uses ``tag`` and ``tag + 1``.

    ``choice`` is the group's, unless another one is given.
    """
    if group.size == 1:
        return _alone(buffer, scale, codec)
    name, _ = choose_allreduce(buffer.nbytes, group.size, choice or group.choice)
    return ALGORITHMS[name](group, buffer, op, scale, codec, tag)


def _alone(buffer: Array, scale: Scale, codec: Cast) -> Steps[None]:
    decode_final(codec, [codec.encode(buffer)], [buffer])
    scale_in_place(buffer, scale)
    yield from ()
