"""The group of ordered operations in which a hook averages: of its process group, or in a session beside that."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from hvdkit.config import Settings
from hvdkit.engine.ordered.group import OrderedGroup
from hvdkit.engine.session.session import Session
from hvdkit.torch.distributed import callbacks
from hvdkit.torch.distributed.process_group import HvdkitProcessGroup
from hvdkit.torch.distributed.session import close_at_exit, close_session, meet

NAME = "ddp_hook"
MEETING = (
    "to use a ddp_hook.\nHINT: all ranks of the model's process group must use one; make several hooks in the same "
    "order on all ranks."
)
LEAVING = "its process or its ddp_hook has ended"


def ranks_beside(process_group: Any) -> list[int] | None:
    """Return the ranks of a process group of another backend, in whose session ranks are counted anew; else None."""
    if isinstance(process_group, HvdkitProcessGroup):
        return None
    return dist.get_process_group_ranks(process_group)


def hooks_text(error: BaseException, ranks: list[int] | None) -> str:
    """Return an error's text in the words of hvd.ddp_hook; ``ranks``: see ``ranks_beside``."""
    text = (str(error) or repr(error)).replace("plan 'ddp_hook'", "ddp_hook")
    if ranks is None:
        return text
    if ranks != list(range(len(ranks))):
        text += f"\nRanks are counted in the process group, which has ranks {ranks}."
    return text.replace("HVDKIT_TIMEOUT_SECONDS", "the hook's timeout")


def _timeout_of(process_group: Any) -> timedelta:
    if isinstance(process_group, HvdkitProcessGroup):
        return timedelta(seconds=process_group.seconds)
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            return process_group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
    return c10d.default_pg_timeout


class HookGroup:
    """The ordered group of one hook. It ends when ``owner``, the hook, is gone; ``has_ended`` is set then."""

    def __init__(self, owner: object, process_group: Any, timeout: timedelta | None) -> None:
        """Make the group; collective. Waiting longer than ``timeout``, by default the process group's, is an error.

        On hvdkit the group is one more of the process group's session. For another backend a session is opened, in
        which no ranks share memory; PeerLostError is raised unless all ranks come in time.
        """
        seconds = (timeout or _timeout_of(process_group)).total_seconds()
        self._session: Session | None = None
        if isinstance(process_group, HvdkitProcessGroup):
            self.engine = process_group.session.engine
            self.ordered = process_group.another_group(NAME, seconds, MEETING)
        else:
            self._session = _session_beside(process_group, seconds)
            self.engine = self._session.engine
            ranks = range(dist.get_world_size(process_group))
            self.ordered = self.engine.ordered_group(ranks, 1, NAME, seconds)
        self.has_ended = threading.Event()
        # The garbage collector, which may run on any thread, does not wait for goodbyes.
        end = partial(_end, self.ordered, self._session, self.has_ended, "")
        self._finalizer = weakref.finalize(owner, callbacks.run, end)
        self._finalizer.atexit = False  # sessions close by themselves then

    def leave(self, reason: str) -> None:
        """End the group after a failure, and tell the other ranks the reason."""
        if self._finalizer.detach() is None:
            return
        if self._session is None:
            self.ordered.tell_failure(reason)
        else:
            close_at_exit(self._session, reason)
        callbacks.run(partial(_end, self.ordered, self._session, self.has_ended, reason))


def _end(group: OrderedGroup, session: Session | None, has_ended: threading.Event, failure: str) -> None:
    try:
        if session is None:
            group.close()
        else:
            close_session(session, failure, failed=bool(failure))
    finally:
        has_ended.set()


def _session_beside(process_group: Any, seconds: float) -> Session:
    ranks = dist.get_process_group_ranks(process_group)
    me = ranks.index(dist.get_rank())
    # dist.new_group would need all ranks of the job, or as many groups on each rank of the process group.
    store: Any = c10d._get_process_group_store(process_group)
    store = PrefixStore(f"hvdkit/{store.add(f'hvdkit/opened/{me}', 1)}", store)
    settings = Settings(timeout_seconds=seconds, node_memory=False, verify=0)
    session = meet(store, ranks, me, settings, seconds, MEETING)
    close_at_exit(session, LEAVING)
    return session
