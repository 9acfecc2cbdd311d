"""The engine of this process: made by init, given back by shutdown."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit import config, environments
from hvdkit.engine.core import Engine
from hvdkit.engine.ending import ENDING, abort_mpi
from hvdkit.engine.farewell import Farewell
from hvdkit.engine.forked import watch_forks
from hvdkit.engine.introduction import exchange_blobs, introduce
from hvdkit.engine.measuring import measure_network
from hvdkit.engine.schedule import Network
from hvdkit.engine.sharing import share_memory
from hvdkit.engine.topology import Topology
from hvdkit.environments.base import World
from hvdkit.errors import ForkedChildError, HorovodInternalError, NotInitializedError, PeerLostError
from hvdkit.transports import Transport, open_mpi_communicator, open_transport
from hvdkit.transports.heartbeat import start_heartbeat

logger = logging.getLogger("hvdkit")

_engine: Engine | None = None
_dynamic = False
_generations: Counter[tuple[int, ...]] = Counter()  # how often each set of ranks has been a job
_process = 0  # that called init
_inherited: Engine | None = (
    None  # of the process that this one was forked from; to let go of it would end what is in it
)


def engine() -> Engine:
    """The engine, to communicate. Raises NotInitializedError (a ValueError) before init and after shutdown.

    Raises ForkedChildError, a HorovodInternalError, in a process that was forked from the one that called init.
    """
    if _engine is None:
        raise NotInitializedError
    check_not_forked()
    return _engine


def is_initialized() -> bool:
    """Whether there are answers to questions about ranks; also in a process that was forked from a rank."""
    return _engine is not None


def check_not_forked() -> None:
    """Raises ForkedChildError in a process that was forked from the one that called init."""
    if _engine is not None and _process != os.getpid():
        raise ForkedChildError(_engine.told(), _process)


def is_forked() -> bool:
    """Whether this process was forked from the one that called init."""
    return _engine is not None and _process != os.getpid()


def topology() -> Topology:
    """This rank's place in the job, also in forked children. Raises NotInitializedError."""
    if _engine is None:
        raise NotInitializedError
    return _engine.topology


def process_sets() -> Mapping[int, list[int]]:
    """The ranks of each process set by its number, also in forked children. Raises NotInitializedError."""
    if _engine is None:
        raise NotInitializedError
    return _engine.groups.ranks


def carrier() -> str | None:
    """What carries this job between nodes, also in forked children; None before init."""
    return None if _engine is None else _engine.transport.carrier


def dynamic_process_sets() -> bool:
    """Whether process sets may be added and removed after init."""
    return _dynamic


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
    global _engine, _dynamic, _process, _inherited
    if is_forked():
        _inherited, _engine = _engine, None
    if _inherited is not None and _inherited.topology.size > 1:
        _engine = _inherited
    if _engine is not None:
        return
    settings = config.from_environment()
    logger.setLevel(settings.log_level.upper())
    dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    sets = [] if process_sets is None or dynamic else list(process_sets)
    world, members = _place(comm)
    # Told before ranks meet: one that is quick to raise it would leave the others in the midst of that.
    static = _static_ranks(
        sets, world.size if members is None else len(members), comm if _is_communicator(comm) else None
    )
    world, transport = _connect(comm, world, members, settings, cuda, for_torch)
    heartbeat = None
    try:
        topology, settings = introduce(transport, world, settings, static)
        connected = transport

        def exchange(blob: bytes) -> list[bytes]:
            return exchange_blobs(connected, blob, settings.timeout_seconds)

        # Others wait for the outcome with a deadline.
        start_seconds = min(settings.start_timeout_seconds, settings.timeout_seconds / 2)
        transport = connected.start(exchange, start_seconds, settings.timeout_seconds)
        transport = share_memory(transport, topology, settings, exchange)
        network = Network(0.0, 0.0)
        if transport.size > 1:
            heartbeat = start_heartbeat(transport, world, exchange, settings.timeout_seconds, start_seconds)
            network = measure_network(transport, topology.nodes, settings.timeout_seconds)
        _engine, _process = Engine(transport, topology, settings, network, static, heartbeat), os.getpid()
        watch_forks()
    except BaseException:
        if heartbeat is not None:
            heartbeat.stop()
        transport.close(graceful=False)
        raise
    _dynamic = settings.dynamic_process_sets or dynamic
    for number, process_set in enumerate(sets, start=1):
        process_set.process_set_id = number
    if settings.timeline and settings.timeline != "DYNAMIC":
        _engine.start_timeline(settings.timeline, settings.timeline_mark_cycles)


def shutdown() -> None:
    """Tell the others, give everything back; ``init`` may be called again afterwards.

    In a forked child only this process stops to answer questions: what it shares with its parent is left alone.
    Raises PeerLostError for a rank that neither says goodbye nor gives a sign of life, once everything is given back.
    """
    global _engine, _dynamic, _inherited
    if is_forked():
        _inherited, _engine = _engine, None
    if _engine is None:
        return
    engine, _engine, _dynamic = _engine, None, False
    graceful, lost = False, None
    ENDING.another_left = bool(engine.negotiation.departed)
    ENDING.first_code = engine.negotiation.failed_with
    try:
        if engine.transport.size > 1:
            graceful, lost = _say_goodbye(engine)
            ENDING.peer_lost |= isinstance(lost or engine.error, PeerLostError)
    finally:
        engine.driver.stop()
        with engine.driver.halted(1.0) as halted:
            if not halted:
                logger.warning(
                    "%s: a library that the engine called has not come back; it is left there", engine.told()
                )
            engine.fail(HorovodInternalError("hvdkit was shut down on this rank while the operation was in flight."))
            engine.stop_timeline()
            if engine.heartbeat is not None:
                engine.heartbeat.stop()
            engine.transport.close(graceful and halted)
    if lost is not None:
        raise lost


def _is_communicator(comm: Any) -> bool:
    return hasattr(comm, "Get_rank")


def _place(comm: Any) -> tuple[World, list[int] | None]:
    """Who this process is, and which ranks of that world take part, if not all do."""
    if _is_communicator(comm):
        ENDING.watch(shutdown)
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
        ENDING.watch(shutdown)  # before anything can fail that others wait for
        if world.mpi:
            ENDING.abort_with(abort_mpi)
    _generations[tuple(members or ())] += 1
    return world, members


def _connect(
    comm: Any, world: World, members: list[int] | None, settings: config.Settings, cuda: bool, for_torch: bool
) -> tuple[World, Transport]:
    """The world of those who take part, and what connects them."""
    if _is_communicator(comm):
        return world, open_mpi_communicator(comm, settings.start_timeout_seconds)
    generation = _generations[tuple(members or ())]
    transport = open_transport(
        world, settings.transport, cuda, for_torch, generation, settings.start_timeout_seconds, members
    )
    if members is not None:
        world = World(world.launcher, members.index(world.rank), len(members), mpi=world.mpi)
    return world, transport


def _static_ranks(process_sets: Sequence[Any], size: int, communicator: Any) -> list[list[int]]:
    from hvdkit.engine.process_sets import ProcessSet, resolve_ranks

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


def _say_goodbye(engine: Engine) -> tuple[bool, PeerLostError | None]:
    """Tell the others and wait a little for theirs: whether all ranks shut down now, and who is lost after all."""
    negotiation = engine.negotiation
    reason = ENDING.reason or "it called hvd.shutdown() or ended"
    if negotiation.departed:
        first, cause = next(iter(negotiation.departed.items()))
        reason += f", after rank {first} had left ({cause})"
    failed = bool(ENDING.code or engine.error)
    farewell = Farewell(engine, reason, negotiation.failed_with or ENDING.code, failed)
    engine.driver.drive_until(farewell.over)
    # A connection that breaks now is no news: its rank may have left with its goodbye unsent, and if it was killed,
    # whoever started it knows.
    lost = None
    if farewell.losses:
        first_lost = farewell.losses[0]
        lost = PeerLostError(engine.watch.told_loss(first_lost, " and did not say goodbye"), first_lost.rank)
    return not farewell.missing() and engine.error is None, lost
