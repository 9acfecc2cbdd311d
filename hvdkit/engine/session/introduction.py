"""Before the engine runs, every rank tells every other who it is and what must be the same on all of them."""

from __future__ import annotations

import dataclasses
import json
import socket
import struct
import zlib
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import hvdkit
from hvdkit.collectives.group import Steps
from hvdkit.config import Settings
from hvdkit.engine.loop.driver import usable_cores
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.wakeup import new_wakeup
from hvdkit.engine.ranks.topology import Topology, topology_of
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Exchange, Transport

MOST_BYTES = 1 << 24  # of what a rank says about itself, which is some hundred, and more with many process sets
# What is said at the start, behind a byte with which no engine's message begins: which exchange, and what follows.
_MARK = b"\0"
_STARTUP = struct.Struct("<cIB")
_BLOB, _FAILURE = 0, 1
_COUNT = struct.Struct("<I")
VERDICT_SECONDS = 2.0  # for rank 0 to say whom it waited for in vain
# Buckets are laid out and algorithms chosen by these, so ranks that differed would wait for each other for ever.
SHARED_SETTINGS = ("fusion_threshold", "max_bytes_in_flight", "allreduce", "verify")


def introduce(
    rank: int, world: World, settings: Settings, process_sets: Sequence[list[int]], exchange: Exchange
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
    reports = [json.loads(payload) for payload in exchange(json.dumps(mine).encode())]
    _check_same(reports, "version", "hvdkit has different versions", "install one version on all hosts.")
    _check_same(
        reports,
        "process_sets",
        "hvd.init() was given different process sets",
        "pass the same process_sets in the same order on every rank.",
    )
    settings = dataclasses.replace(settings, **{name: reports[0][name] for name in SHARED_SETTINGS})
    return topology_of(rank, reports), settings


def _check_same(reports: Sequence[dict[str, Any]], field: str, fact: str, hint: str) -> None:
    by_value: dict[str, list[int]] = {}
    for rank, one in enumerate(reports):
        by_value.setdefault(str(one[field]), []).append(rank)
    if len(by_value) > 1:
        listed = "; ".join(f"{value} on ranks {ranks}" for value, ranks in by_value.items())
        raise HorovodInternalError(f"{fact}: {listed}.\nHINT: {hint}")


class Exchanges:
    """Everyone's bytes on every rank, before there is an engine: through rank 0, by control messages.

    What engines that have started sooner say meanwhile is kept, in ``early``.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.early: list[tuple[int, bytes]] = []
        self._timeout_seconds = timeout_seconds
        self._turn = 0

    def exchange(self, transport: Transport, mine: bytes) -> list[bytes]:
        """Raises PeerLostError, of the same rank on all ranks, where one does not come."""
        if transport.size == 1:
            return [mine]
        self._turn += 1
        if transport.rank == 0:
            return self._collect(transport, mine)
        transport.send_control(0, _STARTUP.pack(_MARK, self._turn, _BLOB) + mine)
        answers: dict[int, tuple[int, bytes]] = {}
        # Rank 0 knows whom all wait for, and says it; it may have come last.
        missing = self._receive(transport, answers, [0], 2 * self._timeout_seconds + VERDICT_SECONDS)
        if missing is not None:
            raise missing
        kind, body = answers[0]
        if kind == _FAILURE:
            rank, text = json.loads(body)
            raise PeerLostError(text, rank)
        return _unpacked(body)

    def _collect(self, transport: Transport, mine: bytes) -> list[bytes]:
        others = range(1, transport.size)
        came: dict[int, tuple[int, bytes]] = {}
        missing = self._receive(transport, came, others, self._timeout_seconds)
        if missing is not None:
            kind, body = _FAILURE, json.dumps([missing.rank, str(missing)]).encode()
        else:
            blobs = [mine, *(came[rank][1] for rank in others)]
            kind, body = _BLOB, _packed(blobs)
        for rank in others:
            transport.send_control(rank, _STARTUP.pack(_MARK, self._turn, kind) + body)
        if missing is not None:
            raise missing
        return blobs

    def _receive(
        self, transport: Transport, came: dict[int, tuple[int, bytes]], ranks: Sequence[int], seconds: float
    ) -> PeerLostError | None:
        """Fill in what has come from each of ``ranks``; or who is missing."""
        me = f"hvd.init() on rank {transport.rank}"

        def over() -> bool:
            for rank, payload in transport.poll_control():
                if payload[:1] != _MARK:
                    self.early.append((rank, payload))
                    continue
                _, turn, kind = _STARTUP.unpack_from(payload)
                if turn != self._turn or rank not in ranks or len(payload) > MOST_BYTES:
                    raise HorovodInternalError(
                        f"{me} does not understand what rank {rank} said in {len(payload)} bytes."
                    )
                came[rank] = kind, payload[_STARTUP.size :]
            return len(came) == len(ranks)

        def awaited() -> set[int]:
            return set(ranks) - came.keys()

        try:
            _wait(transport, over, awaited, seconds)
        except PeerLostError as error:
            return error
        return None


def _packed(blobs: Sequence[bytes]) -> bytes:
    """Of many ranks most of it is the same."""
    lengths = struct.pack(f"<{len(blobs)}I", *map(len, blobs))
    return zlib.compress(b"".join((_COUNT.pack(len(blobs)), lengths, *blobs)), 1)


def _unpacked(body: bytes) -> list[bytes]:
    """Raises ValueError for what rank 0 does not send."""
    unpacking = zlib.decompressobj()
    raw = unpacking.decompress(body, MOST_BYTES)
    if not unpacking.eof:
        raise ValueError(f"more than {MOST_BYTES} bytes of introductions")
    (count,) = _COUNT.unpack_from(raw)
    lengths = struct.unpack_from(f"<{count}I", raw, _COUNT.size)
    begin, blobs = _COUNT.size + struct.calcsize(f"<{count}I"), []
    for length in lengths:
        blobs.append(raw[begin : begin + length])
        begin += length
    return blobs


def run_alone(transport: Transport, steps: Steps[Any], timeout_seconds: float, pause: float = 0.0002) -> Any:
    """Drive one algorithm to its end while there is no engine. Raises PeerLostError where ranks do not come.

    ``pause``: seconds between two looks at a transport that must be polled.
    """
    result: list[Any] = []
    operation = Operation("hvd.init()", steps, transport, result.append)
    _wait(transport, lambda: bool(operation.advance()), operation.awaited_peers, timeout_seconds, pause)
    return result[0]


def _wait(
    transport: Transport,
    over: Callable[[], bool],
    awaited: Callable[[], set[int]],
    timeout_seconds: float,
    pause: float = 0.0002,
) -> None:
    """Look until it is ``over``, while there is no engine. Raises PeerLostError for one of the ranks ``awaited``."""
    wakeup = transport.wakeup or new_wakeup()
    transport.set_waker(wakeup.ring)
    deadline = monotonic() + timeout_seconds
    while True:
        seen = wakeup.count()
        lost = transport.lost_peers()  # first: once they are lost, all that they said has come in
        transport.advance()
        if over():
            return
        for rank in awaited() & lost.keys():
            raise PeerLostError(f"hvd.init() on rank {transport.rank} waits for rank {rank}: {lost[rank]}", rank)
        if monotonic() > deadline:
            ranks = sorted(awaited())
            raise PeerLostError(
                f"hvd.init() on rank {transport.rank} waited {timeout_seconds:g} s (HVDKIT_TIMEOUT_SECONDS) for ranks "
                f"{ranks}.\nHINT: see what those ranks printed.",
                ranks[0] if ranks else None,
            )
        wakeup.sleep(seen, pause if transport.polling else 0.05)
