"""Ranks that are threads of this process: jobs that take milliseconds, for tests that need no processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hvdkit.config import Settings
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session.session import Session
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.offers import FILLED, offer_of
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels import ReduceOp
from tests.network import MemoryTransport, Wires

T = TypeVar("T")

JOB_SECONDS = 150.0  # longer than the engine itself waits


class Dies(Exception):  # noqa: N818 (not an error)
    """Raised by the code of a rank to end it without a goodbye, as a process that is killed."""


def allreduce(session: Session, array: Any, name: str, process_set: int = 0) -> None:
    """Sum an array by name, in place, and wait for it."""
    session.engine.named.allreduce([array], ReduceRequest(ReduceOp.SUM), Call(name, process_set)).wait()


def hand_over(lane: Lane, slot: int, own: Any) -> Any:
    """Give a lane this rank's gradient, or None for zeros. Return the array that the sum will be in."""
    if own is None:
        lane.ready(slot, None)
    elif (small := lane.small(slot)) is not None:
        small[...] = own
        lane.ready(slot, FILLED)
        return small
    else:
        lane.ready(slot, offer_of(own))
    return own


def on_threads(
    size: int,
    run: Callable[[Session], T],
    process_sets: Sequence[list[int]] = (),
    transport: type[MemoryTransport] = MemoryTransport,
    per_node: int | None = None,
    **settings: Any,
) -> list[T | None]:
    """Return the result of ``run(session)`` on each of ``size`` ranks, each a thread with a session of its own.

    ``per_node``: how many ranks a node has, all if None; ``settings``: fields of Settings.
    The result of a rank that ``Dies`` is None. Raises the error of a rank, AssertionError if a rank does not end.
    """
    wires, there = Wires(size), per_node or size
    asked = replace(Settings(), node_memory=False, verify=0, **settings)
    results: dict[int, T | None] = {}
    errors: dict[int, BaseException] = {}

    def rank_runs(rank: int) -> None:
        try:
            world = World("threads", rank, size, rank % there, there)
            session = Session(transport(rank, size, wires), world, asked, process_sets)
            try:
                results[rank] = run(session)
            except Dies:
                wires.cut(rank)
                results[rank] = None
            finally:
                lost = session.close()
            if lost is not None:
                raise lost
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_runs, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOB_SECONDS)
    if errors:
        # An error of the engine may be the consequence of another rank's, so it comes last.
        raise min(errors.items(), key=lambda item: (isinstance(item[1], HorovodInternalError), item[0]))[1]
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} did not end in {JOB_SECONDS:g} s"
    return [results[rank] for rank in range(size)]
