"""Before the engine runs, every rank tells every other who it is and what must be the same on all of them."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

import hvdkit
from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Group, Steps
from hvdkit.config import Settings
from hvdkit.engine.loop.driver import usable_cores
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.wakeup import new_wakeup
from hvdkit.engine.ranks.topology import Topology, topology_of
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Transport

STARTUP_TAG = 0
MOST_BYTES = 1 << 24  # of what a rank says about itself, which is some hundred, and more with many process sets
# Buckets are laid out and algorithms chosen by these, so ranks that differed would wait for each other for ever.
SHARED_SETTINGS = ("fusion_threshold", "max_bytes_in_flight", "allreduce", "verify")


def introduce(
    transport: Transport, world: World, settings: Settings, process_sets: Sequence[list[int]]
) -> tuple[Topology, Settings]:
    """The ranks by node, and the settings with rank 0's word where ranks must not differ.

    Raises HorovodInternalError on every rank where versions or process sets differ.
    """
    mine = {
        "version": hvdkit.__version__,
        "host": socket.gethostname(),
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "cross_rank": world.cross_rank,
        "cross_size": world.cross_size,
        "cores": usable_cores(),  # by number: ranks may be bound to different ones
        "threads": settings.compute_threads,
        "process_sets": [list(ranks) for ranks in process_sets],
        **{name: getattr(settings, name) for name in SHARED_SETTINGS},
    }
    payloads = [json.dumps(mine).encode()]
    if transport.size > 1:
        payloads = exchange_blobs(transport, payloads[0], settings.timeout_seconds)
    reports = [json.loads(payload) for payload in payloads]
    _check_same(reports, "version", "hvdkit has different versions", "install one version on all hosts.")
    _check_same(
        reports,
        "process_sets",
        "hvd.init() was given different process sets",
        "pass the same process_sets in the same order on every rank.",
    )
    settings = dataclasses.replace(settings, **{name: reports[0][name] for name in SHARED_SETTINGS})
    return topology_of(transport.rank, reports), settings


def _check_same(reports: Sequence[dict[str, Any]], field: str, fact: str, hint: str) -> None:
    by_value: dict[str, list[int]] = {}
    for rank, one in enumerate(reports):
        by_value.setdefault(str(one[field]), []).append(rank)
    if len(by_value) > 1:
        listed = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
        raise HorovodInternalError(f"{fact}: {listed}.\nHINT: {hint}")


def exchange_blobs(transport: Transport, mine: bytes, timeout_seconds: float) -> list[bytes]:
    """Everyone's bytes on every rank, before there is an engine."""
    group = Group(transport, range(transport.size))

    def steps() -> Steps[list[bytes]]:
        sizes = np.zeros(group.size, dtype=np.int64)
        own = np.array([len(mine)], dtype=np.int64)
        yield from allgather(group, own, [sizes[rank : rank + 1] for rank in range(group.size)], STARTUP_TAG)
        for rank, size in enumerate(sizes):
            if not 0 <= size <= MOST_BYTES:
                raise HorovodInternalError(f"rank {rank} says that it introduces itself in {size} bytes.")
        blobs = [np.empty(int(size), dtype=np.uint8) for size in sizes]
        yield from allgather(group, np.frombuffer(bytearray(mine), dtype=np.uint8), blobs, STARTUP_TAG + 1)
        return [blob.tobytes() for blob in blobs]

    blobs: list[bytes] = run_alone(transport, steps(), timeout_seconds)
    return blobs


def run_alone(transport: Transport, steps: Steps[Any], timeout_seconds: float, pause: float = 0.0002) -> Any:
    """Drive one algorithm to its end while there is no engine. Raises PeerLostError where ranks do not come.

    ``pause``: seconds between two looks at a transport that must be polled.
    """
    result: list[Any] = []
    operation = Operation("hvd.init()", steps, transport, result.append)
    wakeup = transport.wakeup or new_wakeup()
    transport.set_waker(wakeup.ring)
    deadline = monotonic() + timeout_seconds
    while True:
        seen = wakeup.count()
        transport.advance()
        if operation.advance():
            return result[0]
        lost = transport.lost_peers()
        for rank in operation.awaited_peers() & lost.keys():
            raise PeerLostError(f"hvd.init() on rank {transport.rank} waits for rank {rank}: {lost[rank]}", rank)
        if monotonic() > deadline:
            raise PeerLostError(
                f"hvd.init() on rank {transport.rank} waited {timeout_seconds:g} s (HVDKIT_TIMEOUT_SECONDS) for ranks "
                f"{sorted(operation.awaited_peers())}.\nHINT: see what those ranks printed."
            )
        wakeup.sleep(seen, pause if transport.polling else 0.05)
