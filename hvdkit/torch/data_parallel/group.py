"""A session of the engine among the ranks of a process group, and the thread on which a hook waits for it.

The session is not that of hvd.init(). It has Gloo connections of its own, so that its operations cannot cross those of
the process group.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from hvdkit.config import Settings
from hvdkit.engine.session.session import GOODBYE_SECONDS, Session
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.distributed.process_group import HvdkitProcessGroup
from hvdkit.torch.distributed.session import meet

logger = logging.getLogger("hvdkit")

# The time that a job in progress gets at the end of the process to finish, and after that to fail.
FINISH_SECONDS, FAIL_SECONDS = 0.2, 2.0
MEETING = (
    "to use a ddp_hook.\nHINT: all ranks of the model's process group must use one, in the same order if it is several."
)
LEAVING = "its process or its ddp_hook has come to its end"
# Words of the engine's errors, and the hook's words for the same things.
WORDS = {
    "HVDKIT_TIMEOUT_SECONDS": "the hook's timeout",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "the hook's timeout",
    "optimizer 'ddp_hook'": "ddp_hook",
    "hvd.init()": "ddp_hook",
}
Job = Callable[[], None]


def hooks_text(error: BaseException, ranks: list[int]) -> str:
    """Return an error's text in the words of hvd.ddp_hook; ``ranks``: the ranks of the process group."""
    text = str(error) or repr(error)
    for engines_word, hooks_word in WORDS.items():
        text = text.replace(engines_word, hooks_word)
    if ranks != list(range(len(ranks))):
        text += f"\nRanks are counted in the process group, which has ranks {ranks}."
    return text


def _timeout_of(process_group: Any) -> timedelta:
    if isinstance(process_group, HvdkitProcessGroup):
        return timedelta(seconds=process_group.seconds)
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            return process_group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
    return c10d.default_pg_timeout


def open_session(process_group: Any, timeout: timedelta | None) -> Session:
    """Open a session in which no ranks share memory; collective. Waiting longer than ``timeout`` is an error.

    By default it is that of the process group's operations. Raises PeerLostError unless all ranks come in time.
    """
    seconds = (timeout or _timeout_of(process_group)).total_seconds()
    ranks = dist.get_process_group_ranks(process_group)
    me = ranks.index(dist.get_rank())
    # dist.new_group would need all ranks of the job, or as many groups on each rank of the process group.
    store: Any = c10d._get_process_group_store(process_group)
    store = PrefixStore(f"hvdkit/{store.add(f'hvdkit/opened/{me}', 1)}", store)
    settings = Settings(timeout_seconds=seconds, stall_shutdown_seconds=seconds, node_memory=False, verify=0)
    return meet(store, ranks, me, settings, seconds, MEETING)


class Worker:
    """A daemon thread that runs jobs in order, and closes the session when ``owner`` is gone or the process ends."""

    def __init__(self, owner: object, session: Session) -> None:
        self.session = session
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdkit-ddp-hook", daemon=True)
        _SERVING[self] = None
        self._thread.start()
        # No thread waits for the goodbye, because the garbage collector may end the owner.
        weakref.finalize(owner, self._jobs.put, None).atexit = False

    def run(self, job: Job) -> None:
        """Queue ``job``. An error that it raises is logged."""
        self._jobs.put(job)

    def call(self, job: Job) -> None:
        """Queue ``job``, wait for it and raise its error. It must have a deadline of its own."""
        over: Future[None] = Future()

        def run() -> None:
            try:
                job()
                over.set_result(None)
            except BaseException as error:  # any error: the waiting thread must go on
                over.set_exception(error)

        self._jobs.put(run)
        over.result()

    def leave(self, reason: str, failed: bool = False) -> None:
        """Close the session and tell the other ranks why; a job calls it. With ``failed`` it waits for nothing else."""
        if self._left.is_set():
            return
        try:
            if (lost := self.session.close(reason, failed=failed)) is not None:
                logger.info("ddp_hook: %s", lost)
        finally:
            self._left.set()

    def has_left(self) -> bool:
        """True if the session, which is about to close, is closed in time."""
        return self._left.wait(GOODBYE_SECONDS + FAIL_SECONDS)

    def tell_to_end(self) -> None:
        """Have the thread end after the jobs in the queue."""
        self._jobs.put(None)

    def end(self, deadline: float) -> None:
        """Wait for the thread to end, after ``tell_to_end``. A job that is in progress at ``deadline`` fails."""
        self._thread.join(max(0.0, deadline - monotonic()))
        if self._thread.is_alive():
            # A thread that returns from C++ after Python has ended can crash the process.
            engine = self.session.engine
            engine.driver.defer(lambda: engine.rounds.fail(HorovodInternalError(LEAVING)))
            self._thread.join(GOODBYE_SECONDS + FAIL_SECONDS)

    def _serve(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                try:
                    job()
                except BaseException:  # any error: later jobs end their Futures, and the session must be closed
                    logger.exception("ddp_hook: a job failed")
                del job  # it may hold the last reference to the owner, which would else live until the next job
            self.leave(LEAVING)
        finally:
            _SERVING.pop(self, None)


_SERVING: dict[Worker, None] = {}  # living workers in their order of creation, which is the same on all ranks


@atexit.register
def _end_all() -> None:
    workers = list(_SERVING)
    # All workers end at once. In turn, ranks with several hooks could wait for each other's goodbyes.
    for worker in workers:
        worker.tell_to_end()
    deadline = monotonic() + FINISH_SECONDS
    for worker in workers:
        worker.end(deadline)
