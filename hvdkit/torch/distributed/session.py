"""Sessions of the engine among ranks that meet at a store of torch.distributed; they are not that of hvd.init()."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvdkit import config, environments
from hvdkit.config import Settings
from hvdkit.engine.session.session import GOODBYE_SECONDS, Session
from hvdkit.environments.base import World
from hvdkit.errors import EnvironmentConflictError, PeerLostError
from hvdkit.transports.base import SoloTransport
from hvdkit.transports.gloo import GlooTransport
from hvdkit.transports.security.admission import Admission, Authenticator, absent_after, introduction_key, pack_address
from hvdkit.transports.security.credentials import Credentials, new_nonce
from hvdkit.transports.security.listening import addresses_for, listen

LAUNCHER = "torch.distributed"
MEETING = "to make the group.\nHINT: see what these ranks printed; all ranks must call init_process_group."
ENDED = "it called destroy_process_group() or ended"


class StoreTransport(GlooTransport):
    """Gloo connections between ranks that meet at a store of torch.distributed."""

    name = LAUNCHER


def meet(store: Any, names: Sequence[int], me: int, settings: Settings, seconds: float, purpose: str) -> Session:
    """Open a session among the ranks ``names``, of which this is number ``me``. Collective, and blocks.

    ``names`` and ``purpose`` are for the PeerLostError that is raised unless all ranks come within ``seconds``.
    """
    world = _world(me, len(names))
    if len(names) == 1:
        return Session(SoloTransport(), world, settings)
    addresses = addresses_for(world)
    listener = listen(addresses[0])
    try:
        keys, authenticator = list(map(introduction_key, range(len(names)))), Authenticator(names[me], None)
        store.set(keys[me], new_nonce() + pack_address(listener.getsockname()[:2]))
        if absent := absent_after(store, keys, seconds):
            late = [names[index] for index in absent]
            raise PeerLostError(f"rank {names[me]} waited {seconds:g} s for ranks {late} {purpose}")
        words = [authenticator.introduction(rank, store.get(key)) for rank, key in zip(names, keys, strict=True)]
        credentials = Credentials(b"", LAUNCHER, 0).for_session([nonce for nonce, _ in words])
        admission = Admission(store, credentials, [address for _, address in words])
        transport = StoreTransport(me, len(names), addresses, listener, admission)
    except BaseException:
        listener.close()
        raise
    return Session(transport, world, settings)


def _world(rank: int, size: int) -> World:
    """Return this rank's place, on the node that a launcher tells if the ranks are those of its job."""
    try:
        started = environments.detect()
    except EnvironmentConflictError:
        started = World(LAUNCHER, -1, 0)
    if (started.rank, started.size) != (rank, size):
        return World(LAUNCHER, rank, size)
    return World(LAUNCHER, rank, size, started.local_rank, started.local_size)


CLOSING_SECONDS = 2.0  # for what follows the goodbyes
_closing: list[threading.Event] = []  # set when a session is closed
_open_sessions: dict[Session, str] = {}  # in their order, which is the same on all ranks; and why this rank leaves


def close_at_exit(session: Session, reason: str) -> None:
    """Close a session when the process ends, with this ``reason`` for the other ranks, if nothing does before."""
    _open_sessions[session] = reason


def open_session(store: Any, size: int, rank: int, seconds: float) -> Session:
    """Open the session of a default group, whose ranks share memory within nodes. Collective, and blocks.

    ``seconds``: the longest wait for a rank that does not come.
    """
    settings = replace(config.from_environment(), verify=0, stall_shutdown_seconds=0.0)
    session = meet(store, range(size), rank, settings, min(seconds, settings.start_timeout_seconds), MEETING)
    close_at_exit(session, ENDED)
    return session


def close_session(session: Session, reason: str = "", failed: bool = False) -> None:
    """Say goodbye to the other ranks, and free everything. A second call does nothing.

    ``failed``: wait only until the others have the goodbye.
    """
    over = threading.Event()
    _closing.append(over)
    try:
        usual = _open_sessions.pop(session, None)
        if usual is not None and session.process == os.getpid():  # a forked child is no rank
            session.close(reason or usual, failed=failed)
    finally:
        over.set()
        _closing.remove(over)


@atexit.register
def _close_all() -> None:
    for session in list(_open_sessions):
        close_session(session)
    for over in list(_closing):  # on other threads, which would come back from C++ when Python has ended
        over.wait(GOODBYE_SECONDS + CLOSING_SECONDS)
