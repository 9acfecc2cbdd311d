"""A Gloo connection of our own beside a process group of the user's: blocking, ordered, with a deadline for each wait.

Nobody else sends on it, so what one thread of each rank does on it cannot cross what the process group does.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from hvdkit.collectives.group import Group, Steps
from hvdkit.errors import HorovodInternalError, PayloadError, PeerLostError
from hvdkit.transports.base import Bytes, Transfer, Transport

logger = logging.getLogger("hvdkit")
T = TypeVar("T")

AGREE_TAG = 1 << 20  # above every tag of a collective
UNUSED_TAG = AGREE_TAG + 2
POLL_SECONDS = 0.002


class GroupTransfer:
    """One send or receive."""

    __slots__ = ("_buffer", "_work", "peer")

    def __init__(self, work: Any, buffer: Any, peer: int) -> None:
        self.peer = peer
        self._work = work
        self._buffer = buffer  # Gloo reads or writes it until the work is done

    def wait(self, timeout: timedelta) -> None:
        """Block until done. Raises PeerLostError where that takes longer, or the connection broke."""
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            reason = first_line(error)
            if "imed out" in reason:
                raise PeerLostError(
                    f"waited {timeout.total_seconds():g} s for rank {self.peer}.\n"
                    "HINT: see what that rank does; raise the timeout if it is only slow.",
                    self.peer,
                ) from error
            raise PeerLostError(
                f"the connection to rank {self.peer} broke: {reason}\nHINT: see what that rank printed.", self.peer
            ) from error

    def done(self) -> bool:
        return bool(self._work.is_completed())


class GroupTransport(Transport):
    """Connects the ranks of ``process_group``, whatever its backend; construction is collective among them.

    Ranks are those of the job, as in the process group's own messages. Raises PeerLostError where not all ranks come
    within ``timeout``. It is no part of what ``torch.distributed`` knows, and goes with the last reference to it.
    """

    name = "process_group"
    polling = False

    def __init__(self, process_group: Any, timeout: timedelta) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank()
        self.size = len(self.ranks)
        me = self.ranks.index(self.rank)
        # Not dist.new_group: for a part of the ranks that needs equally many groups on each of them, or all ranks.
        store: Any = c10d._get_process_group_store(process_group)
        turn = store.add(f"hvdkit/opened/{me}", 1)
        store = PrefixStore(f"hvdkit/{turn}", store)
        self._meet(store, me, timeout)
        gloo: Any = dist.ProcessGroupGloo  # its point-to-point calls are missing from the stubs
        try:
            self._group = gloo(store, me, self.size, timeout)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self.rank} could not connect to ranks {self.ranks}: {first_line(error)}\n"
                "HINT: see whether a rank died, and whether hosts reach each other (GLOO_SOCKET_IFNAME, firewalls)."
            ) from error

    def _meet(self, store: Any, me: int, timeout: timedelta) -> None:
        keys = [f"here/{place}" for place in range(self.size)]
        deadline = monotonic() + timeout.total_seconds()
        store.set(keys[me], b"1")
        # Asked again and again: a waiting call would keep the store from the other threads of this process.
        while not store.check(keys):
            if monotonic() > deadline:
                missing = [rank for rank, key in zip(self.ranks, keys, strict=True) if not store.check([key])]
                raise PeerLostError(
                    f"rank {self.rank} waited {timeout.total_seconds():g} s for ranks {missing} to use a ddp_hook.\n"
                    "HINT: all ranks of the model's process group must use one, in the same order if it is several."
                )
            sleep(POLL_SECONDS)

    def isend(self, buffer: Bytes, peer: int, tag: int) -> GroupTransfer:
        return self._posted(self._group.send, buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> GroupTransfer:
        return self._posted(self._group.recv, buffer, peer, tag)

    def _posted(self, call: Any, buffer: Bytes, peer: int, tag: int) -> GroupTransfer:
        try:
            return GroupTransfer(call([torch.from_numpy(buffer)], self.ranks.index(peer), tag), buffer, peer)
        except RuntimeError as error:
            raise PeerLostError(f"the connection to rank {peer} broke: {first_line(error)}", peer) from error

    def send_control(self, peer: int, payload: bytes) -> NoReturn:
        raise NotImplementedError("nothing is negotiated here")

    def poll_control(self) -> list[tuple[int, bytes]]:
        return []

    def break_connections(self) -> None:
        """Let all that is in flight fail, here and on the other ranks, so that none waits for this one any more."""
        nothing = torch.empty(1, dtype=torch.uint8)
        for place, rank in enumerate(self.ranks):
            if rank == self.rank:
                continue
            try:  # Gloo has no call for it, but it closes a connection on which a wait has timed out.
                self._group.recv([nothing], place, UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                logger.debug("closed the connection to rank %d: %s", rank, first_line(error))

    def close(self, graceful: bool) -> None:
        """Connections are closed with the last reference; what is in flight is not waited for."""
        if not graceful:
            self.break_connections()

    def abort(self, code: int) -> None:
        """There is no job-wide end to call for."""


def first_line(error: BaseException) -> str:
    """Of its text; C++ puts a stack below."""
    return (str(error).splitlines() or [repr(error)])[0]


def timeout_of(process_group: Any) -> timedelta:
    """The time limit of a process group's operations."""
    for device in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
        except (RuntimeError, AttributeError):
            continue
    return c10d.default_pg_timeout


def drive(steps: Steps[T], timeout: timedelta) -> T:
    """Run an algorithm to its end on this thread, and return its result. Raises what it raises, and PeerLostError."""
    while True:
        try:
            transfers: Sequence[Transfer] = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        for transfer in transfers:
            assert isinstance(transfer, GroupTransfer)
            transfer.wait(timeout)


# What ranks compare is some hundred bytes for each parameter.
MOST_FACTS_BYTES = 1 << 28


class MismatchError(HorovodInternalError):
    """Ranks use a hook in different ways. All of them know."""


def agree(group: Group, facts: dict[str, Any]) -> Steps[None]:
    """Compare ``facts`` (of what JSON can say) with those of all ranks. Uses ``AGREE_TAG`` and the next.

    Raises MismatchError on every rank where they differ, with the first that does.
    """
    mine = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    length, told = np.array([mine.size], dtype=np.int64), np.empty(group.size, dtype=np.int64)
    transfers = [group.irecv(told[peer : peer + 1], peer, AGREE_TAG) for peer in group.peers()]
    transfers += [group.isend(length, peer, AGREE_TAG) for peer in group.peers()]
    yield transfers
    for peer in group.peers():
        if not 0 < told[peer] <= MOST_FACTS_BYTES:
            raise PayloadError(group.members[peer], f"it shall have {told[peer]} bytes")
    words = {peer: np.empty(int(told[peer]), dtype=np.uint8) for peer in group.peers()}
    transfers = [group.irecv(words[peer], peer, AGREE_TAG + 1) for peer in words]
    # A copy, since json's bytes cannot be written and torch warns of such memory.
    transfers += [group.isend(mine.copy(), peer, AGREE_TAG + 1) for peer in words]
    yield transfers
    everyones = {peer: _facts(group.members[peer], word) for peer, word in words.items()}
    everyones[group.rank] = json.loads(mine.tobytes())
    first = everyones[0]
    for peer in range(1, group.size):
        if everyones[peer] != first:
            raise MismatchError(_difference(group, first, peer, everyones[peer]))


def _facts(rank: int, words: Bytes) -> dict[str, Any]:
    try:
        facts = json.loads(words.tobytes())
    except (ValueError, RecursionError) as error:
        raise PayloadError(rank, str(error)) from error
    if not isinstance(facts, dict):
        raise PayloadError(rank, "it is no JSON object")
    return facts


def _difference(group: Group, first: dict[str, Any], peer: int, other: dict[str, Any]) -> str:
    what = next(key for key in {**first, **other} if first.get(key) != other.get(key))
    ours, theirs = first.get(what), other.get(what)
    if isinstance(ours, list) and isinstance(theirs, list):
        place = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            ours, theirs = f"{len(ours)} of them", f"{len(theirs)} of them"
        else:
            what, ours, theirs = f"{what}, number {place}", ours[place], theirs[place]
    return (
        f"ranks differ in the {what}: rank {group.members[0]} has {ours}, rank {group.members[peer]} has {theirs}\n"
        "HINT: give all ranks the same model, DistributedDataParallel's same arguments, the same codec, and load "
        "state_dicts of one moment on all ranks or on none."
    )
