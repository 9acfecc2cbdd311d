"""A session of the engine among the ranks of a process group, and the thread on which a hook waits for it.

hvd.init() has no part in it: the session has Gloo connections of its own, so that what ranks do in it cannot cross what
the process group does.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from hvdkit.config import Settings
from hvdkit.engine.life.goodbye import GOODBYE_SECONDS
from hvdkit.engine.life.session import Session
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Transport
from hvdkit.transports.security.admission import Admission, Authenticator, absent_after, introduction_key, pack_address
from hvdkit.transports.security.credentials import Credentials, new_nonce
from hvdkit.transports.security.listening import addresses_for, listen
from hvdkit.transports.solo import SoloTransport
from hvdkit.transports.torch_distributed import GlooTransport, open_gloo

logger = logging.getLogger("hvdkit")

# What a job that is under way when the process ends gets to finish in, and what then becomes of it.
FINISH_SECONDS, FAIL_SECONDS = 0.2, 2.0
LAUNCHER = "torch.distributed"
LEAVING = "its process or its ddp_hook has come to its end"
Job = Callable[[], None]


class GroupTransport(GlooTransport):
    """Connects the ranks of ``process_group``, whatever its backend; construction is collective among them.

    Ranks are counted in the process group. Raises PeerLostError where not all come within ``timeout``. It is no part of
    what ``torch.distributed`` knows.
    """

    name = "process_group"
    beats = False

    def __init__(self, process_group: Any, timeout: timedelta) -> None:
        ranks = dist.get_process_group_ranks(process_group)
        rank = dist.get_rank()
        me = ranks.index(rank)
        # Not dist.new_group: for a part of the ranks that needs equally many groups on each of them, or all ranks.
        store: Any = c10d._get_process_group_store(process_group)
        turn = store.add(f"hvdkit/opened/{me}", 1)
        store = PrefixStore(f"hvdkit/{turn}", store)
        addresses = addresses_for(World(LAUNCHER, me, len(ranks)))
        listener = listen(addresses[0])
        try:
            admission = _admit(store, ranks, me, listener.getsockname()[:2], timeout)
            gloo_store = PrefixStore("gloo", store)
            group = open_gloo(gloo_store, me, len(ranks), addresses, timeout.total_seconds())
        except BaseException:
            listener.close()
            raise
        super().__init__(me, len(ranks), group, gloo_store, listener, admission)


def _admit(store: Any, ranks: list[int], me: int, address: tuple[str, int], timeout: timedelta) -> Admission:
    keys = [introduction_key(index) for index in range(len(ranks))]
    authenticator = Authenticator(ranks[me], None)
    store.set(keys[me], new_nonce() + pack_address(address))
    if absent := absent_after(store, keys, timeout.total_seconds()):
        raise PeerLostError(
            f"rank {ranks[me]} waited {timeout.total_seconds():g} s for ranks {[ranks[index] for index in absent]} to "
            "use a ddp_hook.\n"
            "HINT: all ranks of the model's process group must use one, in the same order if it is several."
        )
    introductions = [authenticator.introduction(rank, store.get(key)) for rank, key in zip(ranks, keys, strict=True)]
    session = Credentials(b"", LAUNCHER, 0).for_session([nonce for nonce, _ in introductions])
    return Admission(store, session, [address for _, address in introductions])


def timeout_of(process_group: Any) -> timedelta:
    """The time limit of a process group's operations."""
    for device in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return c10d.default_pg_timeout


def open_session(process_group: Any, timeout: timedelta) -> Session:
    """A session in which no ranks share memory. Collective.

    ``timeout``: for how long a rank may give no sign of life, or not do its part of what others wait for. Raises
    PeerLostError, HorovodInternalError.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    transport: Transport = SoloTransport() if size == 1 else GroupTransport(process_group, timeout)
    seconds = timeout.total_seconds()
    settings = Settings(timeout_seconds=seconds, stall_shutdown_seconds=seconds, node_memory=False, verify=0)
    return Session(transport, World(LAUNCHER, rank, size, 0, 1, rank, size), settings)


class Worker:
    """Runs jobs on a daemon thread in the order in which they were given, and then closes the session.

    That is when ``owner`` is gone, or the process ends. What is under way then fails.
    """

    def __init__(self, owner: object, session: Session) -> None:
        self.session = session
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._is_closed = False
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdkit-ddp-hook", daemon=True)
        _SERVING[self] = None
        self._thread.start()
        # Nobody waits for the goodbye of a hook that is let go of, which may be the garbage collector's doing.
        weakref.finalize(owner, self._jobs.put, None).atexit = False

    def run(self, job: Job) -> None:
        """Have ``job`` run after those that were given before. What it raises is logged."""
        self._jobs.put(job)

    def call(self, job: Job) -> None:
        """Run ``job``, which ends by a deadline of its own, and raise what it raises."""
        over: Future[None] = Future()

        def run() -> None:
            try:
                job()
                over.set_result(None)
            except BaseException as error:  # any: who waits for it must go on
                over.set_exception(error)

        self._jobs.put(run)
        over.result()

    def leave(self, reason: str, failed: bool = False) -> None:
        """Close the session; others learn the reason, which is all that one that ``failed`` waits for. For jobs."""
        if not self._is_closed:
            self._is_closed = True
            try:
                lost = self.session.close(reason, failed=failed)
            finally:
                self._left.set()
            if lost is not None:
                logger.info("ddp_hook: %s", lost)

    def has_left(self) -> bool:
        """Whether the session is closed, which it is about to be."""
        return self._left.wait(GOODBYE_SECONDS + FAIL_SECONDS)

    def tell_to_end(self) -> None:
        """Have the thread end after the jobs that were given."""
        self._jobs.put(None)

    def end(self, deadline: float) -> None:
        """Return when the thread, which was told to, has ended. What is under way at ``deadline`` fails."""
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            # A thread that comes back from C++ when Python is gone can take the process down with it.
            engine = self.session.engine
            engine.driver.defer(lambda: engine.fail(HorovodInternalError(LEAVING)))
            self._thread.join(GOODBYE_SECONDS + FAIL_SECONDS)

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException:  # any: later jobs end their Futures, and the session must be closed
                    logger.exception("ddp_hook: what the hook does failed")
                del job  # it may hold the last reference to the owner, which would otherwise wait for the next job
            self.leave(LEAVING)
        finally:
            _SERVING.pop(self, None)


_SERVING: dict[Worker, None] = {}  # in the order in which they were made, which is the same on all ranks


@atexit.register
def _end_all() -> None:
    workers = list(_SERVING)
    # All at once: of several hooks, each rank would otherwise wait in one for goodbyes that others say after another's.
    for worker in workers:
        worker.tell_to_end()
    deadline = monotonic() + FINISH_SECONDS
    for worker in workers:
        worker.end(deadline)
