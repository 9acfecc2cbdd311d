"""How quick the network is, measured at init between two ranks; every rank is told the same numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from hvdkit.collectives.group import Group, Steps
from hvdkit.engine.session.introduction import run_alone
from hvdkit.engine.steps.schedule import Network
from hvdkit.transports.base import Exchange, Transport

PROBE_TAG = 0
# Enough to tell 1 Gb/s from 10, in a few tens of milliseconds.
QUICKEST_BYTE = 1e-11  # seconds; what comes out faster was not measured well
PROBE_TRIPS, PROBE_LOADS, PROBE_BYTES = 10, 3, 512 * 1024


def measure_network(
    transport: Transport, nodes: Sequence[Sequence[int]], timeout_seconds: float, exchange: Exchange
) -> Network:
    """Latency and bandwidth between rank 0 and a rank of another node, or of its own where there is only one.

    Collective; the same numbers on all ranks, so that they decide alike.
    """
    first_node = next(node for node in nodes if 0 in node)
    others = [rank for rank in range(1, transport.size) if rank not in first_node]
    partner = others[0] if others else 1
    mine = b""
    if transport.rank in (0, partner):
        steps = ping_pong(transport, partner if transport.rank == 0 else 0)
        latency, per_byte = run_alone(transport, steps, timeout_seconds, pause=0.0)
        mine = json.dumps([latency, per_byte]).encode()
    return Network(*json.loads(exchange(mine)[0]))


def ping_pong(transport: Transport, peer: int) -> Steps[tuple[float, float]]:
    """Half of a trip's time and the time of one byte, from messages both ways at once."""
    group = Group(transport, sorted((transport.rank, peer)))
    other = 1 - group.rank
    small, large = np.zeros(8, np.uint8), np.zeros(PROBE_BYTES, np.uint8)
    small_in, large_in = small.copy(), large.copy()
    trips, loads = [], []
    for _ in range(PROBE_TRIPS):
        started = perf_counter()
        yield [group.irecv(small_in, other, PROBE_TAG), group.isend(small, other, PROBE_TAG)]
        trips.append(perf_counter() - started)
    for _ in range(PROBE_LOADS):
        started = perf_counter()
        yield [group.irecv(large_in, other, PROBE_TAG), group.isend(large, other, PROBE_TAG)]
        loads.append(perf_counter() - started)
    latency = sorted(trips)[len(trips) // 2]
    return latency, max((min(loads) - latency) / PROBE_BYTES, QUICKEST_BYTE)
