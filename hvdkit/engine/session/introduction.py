"""Steps of init before there is an engine: ranks exchange who they are and their settings, and measure the network."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

import numpy as np

import hvdkit
from hvdkit.collectives.group import Group, Steps
from hvdkit.config import Settings
from hvdkit.engine.loop.driver import new_wakeup, usable_cores
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ranks.topology import Topology, topology_of
from hvdkit.engine.steps.schedule import Network
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, MismatchError, PeerLostError
from hvdkit.transports.base import Exchange, Transport

MOST_BYTES = 1 << 24  # of an introduction, which takes some hundred, and more with many process sets
# Wire format of init's messages: byte 0, which tells them from engine messages, and the number of the exchange.
_MARK, _STARTUP = b"\0", struct.Struct("<cI")
VERDICT_SECONDS = 2.0  # for rank 0 to name the rank that did not come
# Settings that decide the layout of buckets and algorithms: ranks that differed would wait for each other for ever.
SHARED_SETTINGS = ("fusion_threshold", "max_bytes_in_flight", "allreduce", "verify")
PROBE_TAG = 0
QUICKEST_BYTE = 1e-11  # seconds; a shorter time is an error of measurement
# Enough to tell 1 Gb/s from 10, in a few tens of milliseconds.
PROBE_TRIPS, PROBE_LOADS, PROBE_BYTES = 10, 3, 512 * 1024


def introduce(
    rank: int, world: World, settings: Settings, process_sets: Sequence[list[int]], exchange: Exchange
) -> tuple[Topology, Settings]:
    """Return the ranks by node, and the settings, with those of rank 0 where ranks must not differ.

    Raises MismatchError on every rank if versions or process sets differ.
    """
    report = {
        "version": hvdkit.__version__,
        "host": world.host or socket.gethostname(),
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "cores": usable_cores(),  # by number: ranks may be bound to different ones
        "threads": settings.compute_threads,
        "process_sets": [list(ranks) for ranks in process_sets],
        **{name: getattr(settings, name) for name in SHARED_SETTINGS},
    }
    reports = [json.loads(payload) for payload in exchange(json.dumps(report).encode())]
    for field, fact, hint in (
        ("version", "hvdkit has different versions", "install one version on all hosts."),
        (
            "process_sets",
            "hvd.init() was given different process sets",
            "pass the same sets, in the same order, on all ranks.",
        ),
    ):
        by_value: dict[str, list[int]] = {}
        for number, each in enumerate(reports):
            by_value.setdefault(str(each[field]), []).append(number)
        if len(by_value) > 1:
            listed = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
            raise MismatchError(f"{fact}: {listed}.\nHINT: {hint}")
    settings = dataclasses.replace(settings, **{name: reports[0][name] for name in SHARED_SETTINGS})
    return topology_of(rank, reports), settings


class InitExchanges:
    """Exchanges of bytes between all ranks before there is an engine, over rank 0, by control messages."""

    def __init__(self, timeout_seconds: float) -> None:
        self.leftover: list[tuple[int, bytes]] = []  # messages of engines that have started already
        self._timeout_seconds = timeout_seconds
        self._turn = 0

    def exchange(self, transport: Transport, blob: bytes) -> list[bytes]:
        """Return the bytes of all ranks. Raises PeerLostError, on all ranks of the same, if a rank does not come."""
        if transport.size == 1:
            return [blob]
        self._turn += 1
        if transport.rank != 0:
            transport.send_control(0, _STARTUP.pack(_MARK, self._turn) + blob)
            # Rank 0, which may come last, names the missing rank.
            body = self._receive(transport, [0], 2 * self._timeout_seconds + VERDICT_SECONDS)[0]
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(body, MOST_BYTES)
            if not unpacking.eof:
                raise ValueError(f"more than {MOST_BYTES} bytes of introductions")
            answer = json.loads(text)
            if isinstance(answer, dict):
                raise PeerLostError(answer["text"], answer["lost"])
            return [each.encode("latin-1") for each in answer]
        others = range(1, transport.size)
        try:
            came = self._receive(transport, others, self._timeout_seconds)
        except PeerLostError as error:
            self._answer(transport, {"lost": error.rank, "text": str(error)})
            raise
        blobs = [blob, *(came[rank] for rank in others)]
        self._answer(transport, [each.decode("latin-1") for each in blobs])
        return blobs

    def _answer(self, transport: Transport, answer: Any) -> None:
        """Send the bytes of all ranks, which are mostly the same and so are compressed, or the error."""
        body = zlib.compress(json.dumps(answer).encode(), 1)
        for rank in range(1, transport.size):
            transport.send_control(rank, _STARTUP.pack(_MARK, self._turn) + body)

    def _receive(self, transport: Transport, ranks: Sequence[int], seconds: float) -> dict[int, bytes]:
        """Return the message of each of ``ranks``. Raises PeerLostError for a missing rank."""
        came: dict[int, bytes] = {}

        def over() -> bool:
            for rank, payload in transport.poll_control():
                if payload[:1] != _MARK:
                    self.leftover.append((rank, payload))
                    continue
                _, turn = _STARTUP.unpack_from(payload)
                if turn != self._turn or rank not in ranks or len(payload) > MOST_BYTES:
                    said = f"the message of rank {rank} ({len(payload)} bytes)"
                    raise HorovodInternalError(f"hvd.init() on rank {transport.rank} does not understand {said}.")
                came[rank] = payload[_STARTUP.size :]
            return len(came) == len(ranks)

        _wait(transport, over, lambda: set(ranks) - came.keys(), seconds)
        return came


def _wait(
    transport: Transport,
    over: Callable[[], bool],
    awaited: Callable[[], set[int]],
    timeout_seconds: float,
    pause: float = 0.0002,
) -> None:
    """Wait without an engine until ``over()``. Raises PeerLostError for one of the ranks ``awaited()``."""
    wakeup = transport.wakeup or new_wakeup()
    transport.set_waker(wakeup.ring)
    deadline = monotonic() + timeout_seconds
    while True:
        seen = wakeup.count()
        lost = transport.lost_peers()  # before the poll, which then gets all that they sent
        transport.advance()
        if over():
            return
        for rank in awaited() & lost.keys():
            raise PeerLostError(f"hvd.init() on rank {transport.rank} waits for rank {rank}: {lost[rank]}", rank)
        if monotonic() > deadline:
            ranks = sorted(awaited())
            raise PeerLostError(
                f"hvd.init() on rank {transport.rank} waited {timeout_seconds:g} s (HVDKIT_TIMEOUT_SECONDS) for ranks "
                f"{ranks}.\nHINT: see what these ranks printed.",
                ranks[0] if ranks else None,
            )
        wakeup.sleep(seen, pause if transport.polling else 0.05)


def measure_network(
    transport: Transport, nodes: Sequence[Sequence[int]], timeout_seconds: float, exchange: Exchange
) -> Network:
    """Return latency and bandwidth between rank 0 and a rank, if possible of another node; the same on all ranks."""
    first_node = next(node for node in nodes if 0 in node)
    partner = next((rank for rank in range(1, transport.size) if rank not in first_node), 1)
    blob = b""
    if transport.rank in (0, partner):
        times: list[tuple[float, float]] = []
        steps = ping_pong(transport, partner if transport.rank == 0 else 0)
        operation = Operation("hvd.init()", steps, transport, times.append)
        _wait(transport, lambda: bool(operation.advance()), operation.awaited_peers, timeout_seconds, pause=0.0)
        blob = json.dumps(times[0]).encode()
    return Network(*json.loads(exchange(blob)[0]))


def ping_pong(transport: Transport, peer: int) -> Steps[tuple[float, float]]:
    """Return half of a round trip's time and the time of a byte, in seconds, from messages both ways at once."""
    group = Group(transport, sorted((transport.rank, peer)))
    other = 1 - group.rank
    times: list[list[float]] = []
    for nbytes, count in ((8, PROBE_TRIPS), (PROBE_BYTES, PROBE_LOADS)):
        out, into = np.zeros((2, nbytes), np.uint8)
        times.append([])
        for _ in range(count):
            started = perf_counter()
            yield [group.irecv(into, other, PROBE_TAG), group.isend(out, other, PROBE_TAG)]
            times[-1].append(perf_counter() - started)
    trips, loads = times
    latency = sorted(trips)[len(trips) // 2]
    return latency, max((min(loads) - latency) / PROBE_BYTES, QUICKEST_BYTE)
