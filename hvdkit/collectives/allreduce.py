"""Allreduce in place: the table of algorithms, and the choice among them.

"auto" chooses ``all_to_all`` where latency rules, ``two_phase`` where bandwidth does. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from hvdkit.collectives import algorithms
from hvdkit.collectives.exchange import decode_final, scale_in_place
from hvdkit.collectives.group import AUTO, Array, Choice, Group, Steps
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale

# The time that a core takes to add a byte of one rank to a sum: about that of reading memory.
REDUCE_SECONDS_PER_BYTE = 1e-10

Algorithm = Callable[[Group, Array, ReduceOp, Scale, Cast, int], Steps[None]]

ALGORITHMS: dict[str, Algorithm] = {
    "all_to_all": algorithms.all_to_all_allreduce,
    "two_phase": algorithms.two_phase_allreduce,
    "ring": algorithms.ring_allreduce,
    "tree": algorithms.tree_allreduce,
    "butterfly": algorithms.butterfly_allreduce,
    "round_robin": algorithms.round_robin_allreduce,
    "master_worker": algorithms.master_worker_allreduce,
}


@lru_cache(maxsize=1024)  # the same few sizes come again and again
def choose_allreduce(nbytes: int, size: int, choice: Choice = AUTO) -> tuple[str, str]:
    """Return the algorithm for a tensor of ``nbytes`` bytes on ``size`` ranks, and the reason.

    "auto" takes the cheaper of two by the alpha-beta model (Hockney, 1994): ``latency_seconds`` for each exchange,
    ``seconds_per_byte`` for each byte that a rank sends, and the time of summing all of the tensor or a share of it.
    Raises ValueError for a name that is no algorithm's.
    """
    algorithm, latency_seconds, seconds_per_byte = choice
    if algorithm in ALGORITHMS:
        return algorithm, "HVDKIT_ALLREDUCE"
    if algorithm != "auto":
        names = ", ".join(["auto", *ALGORITHMS])
        raise ValueError(f"choose_allreduce: expected one of {names}, got {algorithm!r}")
    summing = nbytes * REDUCE_SECONDS_PER_BYTE
    all_to_all = latency_seconds + (size - 1) * nbytes * seconds_per_byte + size * summing
    two_phase = 2 * latency_seconds + 2 * (size - 1) / size * nbytes * seconds_per_byte + summing
    name = "all_to_all" if all_to_all <= two_phase else "two_phase"
    costs = f"all_to_all {all_to_all * 1e6:.1f} us, two_phase {two_phase * 1e6:.1f} us"
    return name, f"{nbytes} bytes x {size} ranks: {costs}"


def allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int, choice: Choice | None = None
) -> Steps[None]:
    """Replace ``buffer`` (flat) by ``scale * (rank 0's op rank 1's op ...)``. Uses ``tag`` and ``tag + 1``."""
    if group.size == 1:
        decode_final(codec, [codec.encode(buffer)], [buffer])
        scale_in_place(buffer, scale)
        return
    name, _ = choose_allreduce(buffer.nbytes, group.size, choice or group.choice)
    yield from ALGORITHMS[name](group, buffer, op, scale, codec, tag)
