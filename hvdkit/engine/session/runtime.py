"""The session of this process: made by init, given back by shutdown, asked by all adapters."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit import config, environments
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.session.core import Engine
from hvdkit.engine.session.ending import ENDING, abort_mpi
from hvdkit.engine.session.forked import watch_forks
from hvdkit.engine.session.session import LEAVING, Session
from hvdkit.environments import limits
from hvdkit.environments.base import World
from hvdkit.environments.failure_record import tell_init
from hvdkit.errors import ForkedChildError, NotInitializedError, PeerLostError, TransportUnavailableError
from hvdkit.transports import Job, open_transport
from hvdkit.transports.base import Transport
from hvdkit.transports.mpi import MpiTransport

logger = logging.getLogger("hvdkit")

_session: Session | None = None
# What is the process's, and survives its sessions, as the end of the process (ending.ENDING) does.
_generations: Counter[tuple[int, ...]] = Counter()  # how often each set of ranks has been a job
_inherited: Session | None = None  # of the process that this one was forked from; to let go of it would end it there


def engine() -> Engine:
    """The engine, to communicate. Raises NotInitializedError (a ValueError) before init and after shutdown.

    Raises ForkedChildError, a HorovodInternalError, in a process that was forked from the one that called init.
    """
    if _session is None:
        raise NotInitializedError
    check_not_forked()
    return _session.engine


def current() -> Engine | None:
    """Return the engine if this process can communicate: None before init, after shutdown, and in a forked child."""
    return None if _session is None or _session.process != os.getpid() else _session.engine


def is_initialized() -> bool:
    """Whether there are answers to questions about ranks; also in a process that was forked from a rank."""
    return _session is not None


def check_not_forked() -> None:
    """Raises ForkedChildError in a process that was forked from the one that called init."""
    if _session is not None and _session.process != os.getpid():
        raise ForkedChildError(_session.engine.mailbox.me(), _session.process)


def is_forked() -> bool:
    """Whether this process was forked from the one that called init."""
    return _session is not None and _session.process != os.getpid()


def topology() -> Topology:
    """This rank's place in the job, also in forked children. Raises NotInitializedError."""
    if _session is None:
        raise NotInitializedError
    return _session.engine.topology


def process_sets() -> Mapping[int, list[int]]:
    """The ranks of each process set by its number, also in forked children. Raises NotInitializedError."""
    if _session is None:
        raise NotInitializedError
    return _session.engine.groups.ranks


def carrier() -> str | None:
    """What carries this job between nodes, also in forked children; None before init."""
    return None if _session is None else _session.engine.transport.carrier


def dynamic_process_sets() -> bool:
    """Whether process sets may be added and removed after init."""
    return _session is not None and _session.dynamic


def init(comm: Any = None, process_sets: Any = None, cuda: bool = False, for_torch: bool = False) -> None:
    """Find out who this process is, connect to the others, and start the engine. A second call does nothing.

    Nor does a call in a forked child of one of several ranks, which cannot join their job; that of a rank alone starts
    a job of its own.
    comm: None for all ranks; a list of ranks of the job that take part; or an mpi4py communicator.
    process_sets: ProcessSet objects, the same on every rank, or ``"dynamic"``.
    cuda, for_torch: whether tensors of GPUs shall travel by NCCL, and whether tensors are PyTorch's.
    Raises ValueError for contradictory environments and arguments, TransportUnavailableError where ranks cannot meet,
    HorovodInternalError on every rank where versions or process sets differ.
    """
    global _session, _inherited
    if is_forked():
        _inherited, _session = _session, None
    if _inherited is not None and _inherited.engine.topology.size > 1:
        _session = _inherited
    if _session is not None:
        return
    settings = config.from_environment()
    logger.setLevel(settings.log_level.upper())
    dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    sets = [] if process_sets is None or dynamic else list(process_sets)
    world, members = _world_of(comm)
    # Told before ranks meet: one that is quick to raise it would leave the others in the midst of that.
    static = _static_ranks(
        sets, world.size if members is None else len(members), comm if _is_communicator(comm) else None
    )
    if world.size > 1 and (words := limits.too_few_files(limits.FILES_OF_A_RANK)):
        raise TransportUnavailableError(f"rank {world.rank} cannot start: {words}")  # MPI would crash
    try:
        world, transport = _connect(comm, world, members, settings, cuda, for_torch)
        # A script that submits something goes on: it has caught its SystemExit.
        _session = Session(transport, world, settings, static, dynamic, ENDING.forget)
    except (OSError, MemoryError, RuntimeError) as error:
        words = limits.exhausted(error)
        if words is None:
            raise
        raise TransportUnavailableError(f"rank {world.rank} cannot start: {words}") from error
    watch_forks()
    for number, process_set in enumerate(sets, start=1):
        process_set.process_set_id = number
    settings = _session.engine.settings
    if settings.timeline and settings.timeline != "DYNAMIC":
        _session.engine.telemetry.start(settings.timeline, settings.timeline_mark_cycles)


def shutdown() -> None:
    """Tell the others, give everything back; ``init`` may be called again afterwards.

    In a forked child only this process stops to answer questions: what it shares with its parent is left alone.
    Raises PeerLostError for a rank that neither says goodbye nor gives a sign of life, once everything is given back.
    """
    global _session, _inherited
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
        ENDING.peer_lost |= isinstance(lost or engine.error, PeerLostError)
    if lost is not None:
        raise lost


def _is_communicator(comm: Any) -> bool:
    return hasattr(comm, "Get_rank")


def first_gone() -> int | None:
    """The rank that left the job before all others, None where none has."""
    return None if _session is None else next(iter(_session.engine.mailbox.departed), None)


def _world_of(comm: Any) -> tuple[World, list[int] | None]:
    """Who this process is, and which ranks of that world take part, if not all do."""
    ENDING.take_wanted()
    tell_init()
    ENDING.renumbered = _is_communicator(comm) or (comm is not None and len(comm) > 0)
    if _is_communicator(comm):
        ENDING.watch(shutdown, first_gone)
        ENDING.abort_with(abort_mpi)
        return World("mpi4py", comm.Get_rank(), comm.Get_size(), mpi=True), None
    world = environments.detect()
    members = None if comm is None or len(comm) == 0 else sorted(comm)
    if members is not None:
        if members[0] < 0 or members[-1] >= world.size or len(set(members)) != len(members):
            raise ValueError(
                f"init(): argument comm: expected distinct ranks from 0 to {world.size - 1}, got {list(comm)}"
            )
        if world.rank not in members:
            raise ValueError(
                f"init(): argument comm: rank {world.rank} is not among {members}.\n"
                "HINT: call hvd.init(comm=ranks) only on the ranks that it names."
            )
    if world.size > 1:
        ENDING.watch(shutdown, first_gone)  # before anything can fail that others wait for
        if world.mpi:
            ENDING.abort_with(abort_mpi)
    _generations[tuple(members or ())] += 1
    return world, members


def _connect(
    comm: Any, world: World, members: list[int] | None, settings: config.Settings, cuda: bool, for_torch: bool
) -> tuple[World, Transport]:
    """The world of those who take part, and what connects them."""
    if _is_communicator(comm):
        return world, MpiTransport(comm, None, settings.start_timeout_seconds)
    generation = _generations[tuple(members or ())]
    job = Job(world, settings.transport, cuda, for_torch, generation, settings.start_timeout_seconds)
    transport = open_transport(job, members)
    if members is not None:
        world = World(world.launcher, members.index(world.rank), len(members), mpi=world.mpi)
    return world, transport


def _static_ranks(process_sets: Sequence[Any], size: int, communicator: Any) -> list[list[int]]:
    from hvdkit.engine.session.process_sets import ProcessSet, resolve_ranks

    static: list[list[int]] = []
    for number, process_set in enumerate(process_sets):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(
                f"init(): argument process_sets: expected ProcessSet objects, got {type(process_set).__name__}"
            )
        ranks = resolve_ranks(process_set, size, communicator)
        if ranks in static or ranks == list(range(size)):
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {number} is a duplicate: "
                f"{process_set}"
            )
        static.append(ranks)
    return static
