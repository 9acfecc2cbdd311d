"""Signs of life from below Python: which ranks watch each other, and the connections between nodes that carry beats.

A library that keeps Python's lock keeps a rank from answering, but not its thread of C++ from beating. Ranks of a node
see each other's beats in shared memory. Between nodes beats have connections of their own, with a byte for each beat: a
rank is connected to the rank with its index on each other node, and counts that rank's beats for all ranks of its own
node. An intruder there can at most make a stopped rank look alive, until the longer timeout.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from hvdkit import kernels
from hvdkit.environments.base import World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.base import Exchange, Transport
from hvdkit.transports.link import receive
from hvdkit.transports.security.credentials import TAG_BYTES, Credentials, new_nonce
from hvdkit.transports.security.listening import addresses_for, listen

if TYPE_CHECKING:
    from hvdkit.kernels._native import Heartbeat

logger = logging.getLogger("hvdkit")

BEATS = 12  # in the timeout, so that a late beat or two do not matter
LONGEST_PAUSE = 0.25
CONNECTING_SECONDS = 5.0
LOOK_SECONDS = 0.05  # between two looks whether an expected rank is lost
GREETING_SECONDS = 1.0  # a process that has connected must prove within this time that it is a rank
RANK_BYTES = 4


def watching_pairs(nodes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the pairs of ranks, the lower first, whose connections let each node watch each rank elsewhere.

    On each other node, the rank with the same index, modulo the number of ranks there, watches a rank.
    """
    watching = [
        (rank, other[index % len(other)])
        for node in nodes
        for index, rank in enumerate(node)
        for other in nodes
        if other is not node
    ]
    return sorted({(min(pair), max(pair)) for pair in watching})


def start_heartbeat(
    transport: Transport, world: World, exchange: Exchange, timeout_seconds: float, start_seconds: float
) -> Heartbeat | None:
    """Let this rank beat and see the beats of other ranks; return None without native kernels. Collective.

    A warning names ranks that cannot be connected. Such a rank is lost when it does not answer within the timeout.
    """
    native = kernels.backend() == "native"
    nodes = transport.nodes or [[rank] for rank in range(transport.size)]
    connections: dict[int, socket.socket] = {}
    if len(nodes) > 1:
        seconds = min(start_seconds, timeout_seconds / 4, CONNECTING_SECONDS)
        connections = connect(world, transport, watching_pairs(nodes), native, exchange, seconds)
    if not native:
        return None
    from hvdkit.kernels._native import Heartbeat

    window, offset = transport.signs_of_life or (None, 0)
    sockets = [(connection.detach(), peer) for peer, connection in connections.items()]
    pause = min(LONGEST_PAUSE, timeout_seconds / BEATS)
    return Heartbeat(window, offset, transport.size, transport.rank, sockets, pause)


def connect(
    world: World,
    transport: Transport,
    pairs: Sequence[tuple[int, int]],
    native: bool,
    exchange: Exchange,
    seconds: float,
) -> dict[int, socket.socket]:
    """Return the connections of this rank, by peer, to those of its pairs that could be reached.

    The lower rank of a pair listens, and tells all ranks its address and a secret.
    """
    rank = transport.rank
    higher = [high for low, high in pairs if low == rank]
    listener, secret, problem = None, new_nonce(), ""
    report: dict[str, Any] = {"beats": native}
    if native and higher:
        try:
            listener = listen(addresses_for(world)[0])
            report |= {"place": listener.getsockname()[:2], "secret": secret.hex()}
        except TransportUnavailableError as error:
            problem = str(error).splitlines()[0]
    try:
        reports = [json.loads(blob) for blob in exchange(json.dumps(report).encode())]
        if not native:
            return {}
        deadline = monotonic() + seconds
        lower = [low for low, high in pairs if high == rank and "place" in reports[low]]
        higher = [high for high in higher if reports[high]["beats"]]
        credentials = Credentials(secret, world.job, 0)
        with ThreadPoolExecutor(1, "hvdkit-greet") as pool:  # no two ranks wait for each other
            reaching = pool.submit(_reach, world, rank, lower, reports, deadline)
            accepted = {} if listener is None else _accept(listener, credentials, transport, higher, deadline)
            connections = accepted | reaching.result()
    finally:
        if listener is not None:
            listener.close()
    unseen = sorted(set(higher) - connections.keys() - transport.lost_peers().keys())
    if unseen:  # only the lower rank of a pair warns
        logger.warning(
            "rank %d and ranks %s cannot exchange signs of life while Python is blocked: %s. If a library keeps "
            "Python's lock (GIL) on one of these ranks for longer than HVDKIT_TIMEOUT_SECONDS, the job ends.",
            rank, unseen, problem or "they could not be connected; check whether a firewall closes ports",
        )  # fmt: skip
    return connections


def _accept(
    listener: socket.socket, credentials: Credentials, transport: Transport, expected: Sequence[int], deadline: float
) -> dict[int, socket.socket]:
    """Accept the expected ranks that come in time and prove themselves; return their connections by rank.

    It ends before the deadline where only ranks are missing that are lost. The caller warns about missing ranks.
    """
    me = transport.rank
    accepted: dict[int, socket.socket] = {}
    while missing := set(expected) - accepted.keys():
        listener.settimeout(LOOK_SECONDS)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if monotonic() > deadline or missing <= transport.lost_peers().keys():
                break
            continue
        except OSError:  # as where there are too many files
            break
        with closing(connection), suppress(OSError):
            connection.settimeout(GREETING_SECONDS)
            shown = receive(connection, RANK_BYTES + TAG_BYTES)
            rank = int.from_bytes(shown[:RANK_BYTES], "big")
            proof = credentials.shown_by(rank, to=me)
            if rank in expected and rank not in accepted and hmac.compare_digest(shown[RANK_BYTES:], proof):
                connection.sendall(credentials.shown_by(me, to=rank))
                accepted[rank] = connection.dup()
    return accepted


def _reach(
    world: World, me: int, ranks: Sequence[int], reports: Sequence[dict[str, Any]], deadline: float
) -> dict[int, socket.socket]:
    """Connect to the ranks that answer in time and prove themselves; return the connections by rank."""
    reached: dict[int, socket.socket] = {}
    for rank in ranks:
        credentials = Credentials(bytes.fromhex(reports[rank]["secret"]), world.job, 0)
        try:
            place, seconds = tuple(reports[rank]["place"]), max(0.001, deadline - monotonic())
            with closing(socket.create_connection(place, seconds)) as connection:
                connection.sendall(me.to_bytes(RANK_BYTES, "big") + credentials.shown_by(me, to=rank))
                connection.settimeout(max(0.001, deadline - monotonic()))
                if hmac.compare_digest(receive(connection, TAG_BYTES), credentials.shown_by(rank, to=me)):
                    reached[rank] = connection.dup()
        except OSError as error:
            logger.debug("no connection for signs of life of rank %d: %s", rank, error)
    return reached
