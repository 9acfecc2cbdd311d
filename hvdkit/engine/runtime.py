"""The engine of this process: made by init, given back by shutdown, and taken down with the process."""

from __future__ import annotations

import atexit
import json
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

import numpy as np

import hvdkit
from hvdkit import config, environments
from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Group, Steps
from hvdkit.engine.core import Engine
from hvdkit.engine.operation import Operation
from hvdkit.engine.signal import Signal
from hvdkit.engine.topology import Topology, topology_of
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, NotInitializedError, PeerLostError
from hvdkit.transports import Transport, open_mpi_communicator, open_transport
from hvdkit.transports.subset import SubsetTransport

logger = logging.getLogger("hvdkit")

# How long shutdown waits for the others to shut down too.
GOODBYE_SECONDS = 5.0
# A rank that failed only makes sure that the others have heard. One that ends because another failed leaves that one
# the time to end the job with its own exit code.
FAILED_GOODBYE_SECONDS = 0.3
AFTER_ANOTHER_SECONDS = 2.0
STARTUP_TAG = 0

_engine: Engine | None = None
_dynamic = False
_generation = 0
_exit_reason: str | None = None
_exit_code = 0
_hooks_installed = False


def engine() -> Engine:
    """The engine. Raises NotInitializedError (a ValueError) before init and after shutdown."""
    if _engine is None:
        raise NotInitializedError
    return _engine


def is_initialized() -> bool:
    return _engine is not None


def dynamic_process_sets() -> bool:
    """Whether process sets may be added and removed after init."""
    return _dynamic


def init(comm: Any = None, process_sets: Any = None, cuda: bool = False) -> None:
    """Find out who this process is, connect to the others, and start the engine. A second call does nothing.

    comm: None for all ranks; a list of ranks of the job that take part; or an mpi4py communicator.
    process_sets: ProcessSet objects, the same on every rank, or ``"dynamic"``.
    Raises ValueError for contradictory environments and arguments, TransportUnavailableError where ranks cannot meet.
    """
    global _engine, _dynamic, _generation
    if _engine is not None:
        return
    settings = config.from_environment()
    logger.setLevel(settings.log_level.upper())
    sets = [] if process_sets is None or process_sets == "dynamic" else list(process_sets)
    _generation += 1
    world, transport = _connect(comm, settings, cuda)
    try:
        topology = _introduce(transport, world, settings.timeout_seconds)
        static = _static_ranks(sets, transport.size)
        _engine = Engine(transport, topology, settings, static)
    except BaseException:
        transport.close(graceful=False)
        raise
    _dynamic = settings.dynamic_process_sets or process_sets == "dynamic"
    for number, process_set in enumerate(sets, start=1):
        process_set.process_set_id = number
    if settings.timeline and settings.timeline != "DYNAMIC":
        _engine.start_timeline(settings.timeline, settings.timeline_mark_cycles)
    if transport.size > 1:
        _install_hooks()


def shutdown() -> None:
    """Tell the others, give everything back; ``init`` may be called again afterwards."""
    global _engine, _dynamic
    if _engine is None:
        return
    engine, _engine, _dynamic = _engine, None, False
    reason = _exit_reason or "it called hvd.shutdown() or ended"
    graceful = False
    if engine.transport.size > 1:
        graceful = _say_goodbye(engine, reason)
        engine.driver.stop()
    engine.fail(HorovodInternalError("hvdkit was shut down on this rank while the operation was in flight."))
    engine.stop_timeline()
    engine.transport.close(graceful)


def _connect(comm: Any, settings: config.Settings, cuda: bool) -> tuple[World, Transport]:
    if comm is not None and hasattr(comm, "Get_rank"):
        transport = open_mpi_communicator(comm)
        return World("mpi4py", transport.rank, transport.size, mpi=True), transport
    world = environments.detect()
    transport = open_transport(world, settings.transport, cuda, _generation, settings.start_timeout_seconds)
    if comm is None or len(comm) == 0:
        return world, transport
    ranks = sorted(comm)
    if ranks[0] < 0 or ranks[-1] >= world.size or len(set(ranks)) != len(ranks):
        raise ValueError(f"init(): argument comm: expected distinct ranks from 0 to {world.size - 1}, got {list(comm)}")
    if world.rank not in ranks:
        raise ValueError(
            f"init(): argument comm: rank {world.rank} is not among {ranks}.\n"
            "HINT: call hvd.init(comm=ranks) only on the ranks that it names."
        )
    return World(world.launcher, ranks.index(world.rank), len(ranks), mpi=world.mpi), SubsetTransport(transport, ranks)


def _introduce(transport: Transport, world: World, timeout_seconds: float) -> Topology:
    """Every rank tells every other its host, its version and what its launcher says. Raises on versions that differ."""
    mine = {
        "version": hvdkit.__version__,
        "host": socket.gethostname(),
        "local_rank": world.local_rank,
        "local_size": world.local_size,
        "cross_rank": world.cross_rank,
        "cross_size": world.cross_size,
    }
    payloads = [json.dumps(mine).encode()]
    if transport.size > 1:
        payloads = exchange_blobs(transport, payloads[0], timeout_seconds)
    told = [json.loads(payload) for payload in payloads]
    versions: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        versions.setdefault(str(one["version"]), []).append(rank)
    if len(versions) > 1:
        listed = "; ".join(f"{version} on ranks {ranks}" for version, ranks in versions.items())
        raise HorovodInternalError(f"hvdkit has different versions: {listed}.\nHINT: install one version on all hosts.")
    return topology_of(transport.rank, told)


def exchange_blobs(transport: Transport, mine: bytes, timeout_seconds: float) -> list[bytes]:
    """Everyone's bytes on every rank, before there is an engine."""
    group = Group(transport, range(transport.size))

    def steps() -> Steps[list[bytes]]:
        sizes = np.zeros(group.size, dtype=np.int64)
        own = np.array([len(mine)], dtype=np.int64)
        yield from allgather(group, own, [sizes[rank : rank + 1] for rank in range(group.size)], STARTUP_TAG)
        blobs = [np.empty(int(size), dtype=np.uint8) for size in sizes]
        yield from allgather(group, np.frombuffer(bytearray(mine), dtype=np.uint8), blobs, STARTUP_TAG + 1)
        return [blob.tobytes() for blob in blobs]

    result: list[list[bytes]] = []
    operation = Operation("hvd.init()", steps(), transport, result.append)
    signal = Signal()
    transport.set_waker(signal.set)
    deadline = monotonic() + timeout_seconds
    while not operation.advance():
        if monotonic() > deadline:
            raise PeerLostError(
                f"hvd.init() on rank {transport.rank} waited {timeout_seconds:g} s (HVDKIT_TIMEOUT_SECONDS) for ranks "
                f"{sorted(operation.awaited_peers())}.\nHINT: see what those ranks printed."
            )
        signal.wait(0.0002 if transport.polling else 0.05)
    return result[0]


def _static_ranks(process_sets: Sequence[Any], size: int) -> list[list[int]]:
    from hvdkit.engine.process_sets import ProcessSet, resolve_ranks

    static: list[list[int]] = []
    for number, process_set in enumerate(process_sets):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(
                f"init(): argument process_sets: expected ProcessSet objects, got {type(process_set).__name__}"
            )
        ranks = resolve_ranks(process_set, size)
        if ranks in static or ranks == list(range(size)):
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {number} is a duplicate: "
                f"{process_set}"
            )
        static.append(ranks)
    return static


# -- the end of the process -------------------------------------------------------------------------------------------


def _say_goodbye(engine: Engine, reason: str) -> bool:
    """Tell the others and wait a little for theirs. True if all ranks shut down now."""
    negotiation = engine.negotiation
    deadline = monotonic() + (FAILED_GOODBYE_SECONDS if _exit_code else GOODBYE_SECONDS)
    told = [False]

    def tell() -> None:
        negotiation.tell_everyone(["bye", reason])
        told[0] = True

    engine.defer(tell)
    others = engine.transport.size - 1

    def finished() -> bool:
        everyone = len(negotiation.departed) == others
        return told[0] and (everyone or engine.error is not None or monotonic() > deadline)

    engine.driver.drive_until(finished)
    return len(negotiation.departed) == others and engine.error is None


def _install_hooks() -> None:
    """An exception or a non-zero exit of this rank must end the job, not leave the others waiting."""
    global _hooks_installed
    if _hooks_installed:
        return
    _hooks_installed = True
    atexit.register(_at_exit)
    previous_hook = sys.excepthook
    previous_exit = sys.exit

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous_hook(kind, error, trace)
        _note_exit(f"it raised {kind.__name__}: {error}"[:500], 1)

    def exit_noting(code: Any = None) -> None:
        number = code if isinstance(code, int) else int(code is not None)
        if number:
            _note_exit(f"it called sys.exit({code!r})", number)
        previous_exit(code)

    sys.excepthook = excepthook
    sys.exit = exit_noting  # type: ignore[assignment]


def _note_exit(reason: str, code: int) -> None:
    global _exit_reason, _exit_code
    _exit_reason, _exit_code = reason, code


def _at_exit() -> None:
    """Leave in order. A rank that failed tells the others and, under MPI, ends the job with its exit code."""
    if _engine is None:
        return
    transport, code, departed = _engine.transport, _exit_code, _engine.negotiation.departed
    if code == 0:
        shutdown()
        return
    _flush(sys.stdout)
    _flush(sys.stderr)
    another_failed = bool(departed)
    shutdown()
    if another_failed:
        sleep(AFTER_ANOTHER_SECONDS)
    transport.abort(code)


def _flush(stream: Any) -> None:
    flush: Callable[[], None] | None = getattr(stream, "flush", None)
    if flush is not None:
        flush()
