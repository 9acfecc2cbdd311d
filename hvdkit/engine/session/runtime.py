"""The session of this process, which ``init`` makes, ``shutdown`` ends, and all adapters use."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvdkit import config, environments
from hvdkit.engine.ranks.topology import Topology, offered_topology
from hvdkit.engine.session.communicators import is_communicator, resolve_ranks
from hvdkit.engine.session.core import Engine
from hvdkit.engine.session.ending import ENDING, abort_mpi, watch_forks
from hvdkit.engine.session.session import LEAVING, Session
from hvdkit.environments import elastic, limits
from hvdkit.environments.base import World
from hvdkit.environments.failure_record import take_wanted, tell_init
from hvdkit.errors import (
    ForkedChildError,
    NotConnectedError,
    NotInitializedError,
    PeerLostError,
    TransportUnavailableError,
)
from hvdkit.transports import Job, open_transport
from hvdkit.transports.base import Transport
from hvdkit.transports.mpi import MpiTransport

if TYPE_CHECKING:
    from hvdkit.engine.session.process_sets import ProcessSet

logger = logging.getLogger("hvdkit")

ELASTIC_COMM = (
    "init: comm: in an elastic job, hvdkitrun decides which processes take part.\n"
    "HINT: leave comm out; for operations of some of the ranks, pass process_sets=[hvd.ProcessSet(ranks)]."
)
CHILD_IMPORTS = (
    "init: multiprocessing has started this process (spawn or forkserver), and it imports the script again.\n"
    'HINT: put hvd.init() and the training below `if __name__ == "__main__":`, which child processes skip.'
)

_session: Session | None = None
# State of the process, which outlives its sessions.
_generations: Counter[tuple[int, ...]] = Counter()  # how often each set of ranks has been a job
_process_sets: list[ProcessSet] = []  # that were passed to init, or added since
_is_dynamic = False  # init was called with process_sets="dynamic"
_offer: Topology | None = None  # of a process of an elastic job that is not connected yet
_inherited: Session | None = None  # of the parent of this fork; to free it would end the parent's session


def engine() -> Engine:
    """Return the engine. Raises NotInitializedError (a ValueError); in forks of the rank's process ForkedChildError."""
    if _session is None and _offer is not None:
        raise NotConnectedError
    if _session is None:
        raise NotInitializedError
    if _session.process != os.getpid():
        raise ForkedChildError(_session.engine.mailbox.me(), _session.process)
    return _session.engine


def current() -> Engine | None:
    """Return the engine if this process can communicate: None before init, after shutdown, and in a forked child."""
    return None if _session is None or _session.process != os.getpid() else _session.engine


def is_initialized() -> bool:
    """True between init and shutdown, also in a process that was forked from a rank."""
    return _session is not None or _offer is not None


def is_forked() -> bool:
    """True if this process was forked from the one that called init."""
    return _session is not None and _session.process != os.getpid()


def is_elastic() -> bool:
    """True in an elastic job, whose ranks come and go."""
    return _offer is not None or (_session is not None and _session.engine.transport.is_elastic)


def check_not_forked() -> None:
    """Raise ForkedChildError in a process that was forked from the one that called init."""
    if is_forked():
        engine()


def _present() -> Session:
    if _session is None:
        raise NotInitializedError
    return _session


def topology() -> Topology:
    """Return this rank's place in the job, also in forked children. Raises NotInitializedError.

    Before a process of an elastic job is connected, it is the place that the launcher offers.
    """
    return _offer if _session is None and _offer is not None else _present().engine.topology


def process_sets() -> Mapping[int, list[int]]:
    """Return the ranks of each process set by its number, also in forked children. Raises NotInitializedError."""
    if _session is None and _offer is not None:
        return {0: list(range(_offer.size))}
    return _present().engine.groups.ranks


def carrier() -> str | None:
    """Return the name of the transport between nodes, also in forked children; None before init."""
    return None if _session is None else _session.engine.transport.carrier


def dynamic_process_sets() -> bool:
    """True if process sets may be added and removed after init."""
    return _session is not None and _session.engine.settings.dynamic_process_sets


def read_settings() -> config.Settings:
    """Return the settings of a session that begins now, and set the log level."""
    settings = config.from_environment()
    logger.setLevel(settings.log_level.upper())
    return replace(settings, dynamic_process_sets=_is_dynamic or settings.dynamic_process_sets)


def init(comm: Any = None, process_sets: Any = None, cuda: bool = False, for_torch: bool = False) -> None:
    """Detect this process's rank, connect to the others, and start the engine. A second call does nothing.

    A call in a forked child of one of several ranks does nothing: the child cannot join their job. A forked child of a
    rank alone starts a job of its own. In an elastic job, it returns with the place that the launcher offers, and
    connects nothing: ``hvd.elastic.run`` does.
    comm: None for all ranks; a list of ranks of the job that take part; or an mpi4py communicator.
    process_sets: ProcessSet objects, the same on every rank, or ``"dynamic"``.
    cuda: tensors of GPUs travel by NCCL; for_torch: tensors are PyTorch's.
    Raises ValueError for contradictory environments and arguments, and in a child process of multiprocessing that is
    importing the script; TransportUnavailableError if ranks cannot meet; HorovodInternalError on every rank if versions
    or process sets differ.
    """
    global _session, _inherited, _offer, _is_dynamic
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # set until the script is imported
        raise ValueError(CHILD_IMPORTS)
    if is_forked():
        _inherited, _session = _session, None
    if _inherited is not None and _inherited.engine.topology.size > 1:
        _session = _inherited
    if _session is not None or _offer is not None:
        return
    _is_dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    settings = read_settings()
    sets = [] if process_sets is None or _is_dynamic else list(process_sets)
    launcher = elastic.launcher()
    if launcher is not None:
        if is_communicator(comm) or comm:
            raise ValueError(ELASTIC_COMM)
        _tell_launcher()
        _process_sets[:] = sets
        _offer = offered_topology(launcher.offer)
        return
    world, members = _world_of(comm)
    # Errors in the arguments are raised before ranks meet: a rank that raised one later would leave the others waiting.
    static: list[list[int]] = []
    size = world.size if members is None else len(members)
    for number, process_set in enumerate(sets):
        ranks = resolve_ranks(process_set, size, comm if is_communicator(comm) else None)
        if ranks in static or ranks == list(range(size)):
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {number} is a duplicate: "
                f"{process_set}"
            )
        static.append(ranks)
    if world.size > 1 and (words := limits.too_few_files(limits.FILES_OF_A_RANK)):
        raise TransportUnavailableError(f"rank {world.rank} cannot start: {words}")  # MPI would crash
    try:
        world, transport = _connect(comm, world, members, settings, cuda, for_torch)
        session = Session(transport, world, settings, static)
    except (OSError, MemoryError, RuntimeError) as error:
        words = limits.exhausted(error)
        if words is None:
            raise
        raise TransportUnavailableError(f"rank {world.rank} cannot start: {words}") from error
    begin(session)
    for number, process_set in enumerate(sets, start=1):
        process_set.process_set_id, process_set.lost = number, ""
    _process_sets[:] = sets
    if settings.timeline and settings.timeline != "DYNAMIC":
        session.engine.telemetry.start(settings.timeline, settings.timeline_mark_cycles)


def begin(session: Session) -> None:
    """Make a session that of this process."""
    global _session, _offer
    _session, _offer = session, None
    session.engine.named.submitting = ENDING.forget  # a script that submits has caught its SystemExit and goes on
    watch_forks()


def take_session() -> Session | None:
    """Return the session of this process, which has none from now on."""
    global _session
    session, _session = _session, None
    return session


def watch_end() -> None:
    """Have the end of this process tell the launcher and the other ranks why."""
    _tell_launcher()
    ENDING.watch(shutdown, _first_gone)


def _tell_launcher() -> None:
    ENDING.record_wanted = take_wanted() or ENDING.record_wanted
    tell_init()


def registered_process_sets() -> list[ProcessSet]:
    """Return the process sets that were passed to init, or added since, for the caller to change."""
    return _process_sets


def shutdown() -> None:
    """Say goodbye to the other ranks and free everything that a fork does not share; ``init`` may be called again.

    Raises PeerLostError for a rank that neither says goodbye nor gives a sign of life, once everything is freed.
    """
    global _session, _inherited, _offer
    _offer = None
    if is_forked():
        _inherited, _session = _session, None
    if _session is None:
        return
    session, _session = _session, None
    engine = session.engine
    ENDING.another_left = bool(engine.mailbox.departed)
    ENDING.first_code = engine.mailbox.failed_with
    lost = None
    try:
        lost = session.close(ENDING.reason or LEAVING, ENDING.code)
    finally:
        ENDING.peer_lost |= isinstance(lost or engine.mailbox.error, PeerLostError)
    if lost is not None:
        raise lost


def _first_gone() -> int | None:
    """Return the rank that left the job before all others, None if none has."""
    return None if _session is None else next(iter(_session.engine.mailbox.departed), None)


def _world_of(comm: Any) -> tuple[World, list[int] | None]:
    """Return this process's place among all ranks, and the ranks that take part if not all do."""
    _tell_launcher()
    ENDING.renumbered = is_communicator(comm) or (comm is not None and len(comm) > 0)
    if is_communicator(comm):
        ENDING.watch(shutdown, _first_gone)
        ENDING.abort = abort_mpi
        return World("mpi4py", comm.Get_rank(), comm.Get_size(), mpi=True), None
    world = environments.detect()
    members = sorted(comm) if ENDING.renumbered else None
    if members is not None and (members[0] < 0 or members[-1] >= world.size or len(set(members)) != len(members)):
        raise ValueError(f"init(): argument comm: expected distinct ranks from 0 to {world.size - 1}, got {list(comm)}")
    if members is not None and world.rank not in members:
        raise ValueError(
            f"init(): argument comm: rank {world.rank} is not among {members}.\n"
            "HINT: call hvd.init(comm=ranks) only on the ranks in comm."
        )
    if world.size > 1:
        ENDING.watch(shutdown, _first_gone)  # before anything can fail that others wait for
        if world.mpi:
            ENDING.abort = abort_mpi
    _generations[tuple(members or ())] += 1
    return world, members


def end_mpi_with_this_rank() -> None:
    """Have this rank, if it fails, end the job of MPI, which other libraries use: others would wait in MPI_Finalize."""
    ENDING.watch(shutdown, _first_gone)
    ENDING.abort = abort_mpi
    watch_forks()


def _connect(
    comm: Any, world: World, members: list[int] | None, settings: config.Settings, cuda: bool, for_torch: bool
) -> tuple[World, Transport]:
    """Return the world of the ranks that take part, and the transport that connects them."""
    if is_communicator(comm):
        return world, MpiTransport(comm, None, settings.start_timeout_seconds)
    generation = _generations[tuple(members or ())]
    job = Job(world, settings.transport, cuda, for_torch, generation, settings.start_timeout_seconds)
    transport = open_transport(job, members)
    if members is not None:
        world = World(world.launcher, members.index(world.rank), len(members), mpi=world.mpi)
    return world, transport
