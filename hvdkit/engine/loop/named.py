"""Named operations, as adapters call them: arrays, a signature that all ranks must share, and details of this rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.compression import CASTS, Codec
from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.negotiation import Negotiation
from hvdkit.engine.loop.waiting import WaitingThreads
from hvdkit.engine.ops import KINDS, tensor_kinds
from hvdkit.engine.ops.batch import DeviceArray, Handle, Submission
from hvdkit.engine.ops.requests import Call, Key, ReduceRequest, Signature, automatic_name
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import DuplicateNameError, HorovodInternalError, PeerFailedError, PeerLostError
from hvdkit.kernels import NAMES


def _duplicate_name(kind: str, other: str, name: str) -> DuplicateNameError:
    return DuplicateNameError(
        f"Requested to {kind} a tensor with the same name as another tensor that is currently "
        f"being processed: {other} '{name}'.\n"
        "HINT: synchronize() the first one, or give each tensor a name of its own."
    )


class NamedOperations:
    """The named operations of one engine.

    Arrays are numpy arrays, C-contiguous. Where allreduce, broadcast and allgather take DeviceArrays, the result's
    arrays are tensors of the device or, if these ranks have no collectives of it, numpy arrays. ``submissions``:
    operations of this rank that do not run yet; only the driver removes them.
    """

    def __init__(
        self,
        groups: Groups,
        submissions: dict[Key, Submission],
        driver: Driver,
        negotiation: Negotiation,
        waiting: WaitingThreads,
        telemetry: Telemetry,
    ) -> None:
        self.groups = groups
        self._submissions, self._driver, self._negotiation = submissions, driver, negotiation
        self._waiting, self._telemetry = waiting, telemetry
        self.submitting: Callable[[], None] | None = None  # called for each operation
        self._mailbox, self._rank = negotiation.mailbox, negotiation.mailbox.topology.rank
        self._counts: dict[tuple[str, int], int] = {}  # of operations without a name, by kind and process set
        self._lock = threading.Lock()

    def fail(self, error: HorovodInternalError) -> None:
        """End all submissions with ``error``."""
        with self._lock:
            for submission in self._submissions.values():
                submission.handle.fail(error)
            self._submissions.clear()

    def restart_counting(self) -> None:
        """Number the global set's operations without a name from 0 again, of which ranks made different numbers."""
        self._counts = {counted: count for counted, count in self._counts.items() if counted[1] != 0}

    def count(self, kind: str, process_set_id: int) -> int:
        """Return the next number of operations of ``kind`` that have no name, from 0; see ``restart_counting``."""
        with self._lock:
            number = self._counts[kind, process_set_id] = self._counts.get((kind, process_set_id), -1) + 1
        return number

    def check_usable(self) -> None:
        """Raise an error, of the class of the first, if this engine cannot communicate any more."""
        if (error := self._mailbox.error) is None:
            return
        hint = "HINT: call hvd.shutdown() and hvd.init() on all ranks that are left, or restart the job."
        text = f"hvdkit cannot communicate any more: {error}\n{hint}"
        if isinstance(error, PeerLostError | PeerFailedError):
            raise type(error)(text, error.rank) from error
        raise HorovodInternalError(text) from error

    def submit(
        self,
        kind: str,
        arrays: Sequence[Array | DeviceArray],
        fields: Signature,
        call: Call,
        detail: Any = None,
        sources: Sequence[Array] | None = None,
        codec: Codec = CASTS["none"],
    ) -> Handle:
        """Announce an operation, of a kind in ``ops``, to all ranks of a process set.

        ``fields`` must match on all ranks; ``detail`` is sent to the coordinator and may differ. Raises
        DuplicateNameError if an operation of that name is in flight.
        """
        if self._mailbox.error is not None:
            self.check_usable()
        if self.submitting is not None:
            self.submitting()
        name, process_set_id = call.name, call.process_set_id
        members = self.groups.ranks.get(process_set_id)
        if members is None or self._rank not in members:
            fact = "does not exist" if members is None else f"has the ranks {members}"
            raise ValueError(
                f"{kind}: rank {self._rank} is not in process set {process_set_id}, which {fact}.\n"
                "HINT: call it only where process_set.included() is true."
            )
        if name is None:
            name = automatic_name(kind, self.count(kind, process_set_id) if call.number is None else call.number)
        key = Key(process_set_id, kind, name)
        handle = Handle(key, call.name, self._waiting)
        signature = {"kind": kind, "ps": process_set_id, **fields}
        values = None if sources is None else list(sources)
        submission = Submission(key, signature, list(arrays), detail, handle, values, codec)
        with self._lock:
            if self._submissions:
                for other in tensor_kinds() if KINDS[kind].carries_tensors else (kind,):
                    if key._replace(kind=other) in self._submissions:
                        raise _duplicate_name(kind, other, name)
            self._submissions[key] = submission
        if arrays and isinstance(arrays[0], DeviceArray):
            self.groups.device = arrays[0].device
        self._waiting.submitters.add(get_ident())
        if self._telemetry.timeline is not None:
            self._telemetry.begin(key, f"NEGOTIATE_{kind.upper()}")
        self._driver.inbox.append(partial(self._negotiation.announce, submission))
        if call.wake or self._driver.looks_at_once:
            self._driver.wake()
        return handle

    def allreduce(
        self,
        arrays: Sequence[Array | DeviceArray],
        request: ReduceRequest,
        call: Call,
        sources: Sequence[Array] | None = None,
    ) -> Handle:
        """Reduce each array in place over the ranks of a process set; several arrays are one operation.

        ``sources``: arrays of the same shapes that hold the values until the operation is done, if not ``arrays``.
        """
        small, turn_call, turn = self.groups.small_reductions.get(call.process_set_id), None, None
        if small is not None and len(arrays) == 1:
            turn_call = small.turn_call(arrays[0], request, call)
        if small is not None and turn_call is not None and isinstance(arrays[0], np.ndarray):
            if call.name is None:
                call = call._replace(number=self.count("allreduce", call.process_set_id))
            elif call.name in small.under_way:
                raise _duplicate_name("allreduce", "allreduce", call.name)
            # An operation in flight may have the same name, which is an error.
            is_busy = bool(self._submissions) or self._mailbox.error is not None
            negotiates = call.wake or is_busy or self._telemetry.timeline is not None
            self._waiting.submitters.add(get_ident())
            began, source = perf_counter(), None if sources is None else sources[0]
            turn = small.reduce(arrays[0], source, turn_call, call, negotiates)
            self._telemetry.statistics.waited(perf_counter() - began)
            if turn is None:
                if self.submitting is not None:
                    self.submitting()
                handle = Handle("an allreduce", call.name, self._waiting)
                handle.finish(arrays)
                return handle
        fields = {**_described(arrays, call), **request.signature()}
        return self.submit("allreduce", arrays, fields, call, turn, sources, request.codec)

    def allgather(self, arrays: Sequence[Array | DeviceArray], call: Call) -> Handle:
        """Concatenate each array over the ranks along its first dimension; the result is a list of new arrays."""
        fields = _described(arrays, call, any_rows=True)
        return self.submit("allgather", arrays, fields, call, [array.shape[0] for array in arrays])

    def broadcast(self, arrays: Sequence[Array | DeviceArray], root_rank: int, call: Call) -> Handle:
        """Replace each array in place by that of ``root_rank`` (a global rank)."""
        return self.submit("broadcast", arrays, {**_described(arrays, call), "root": int(root_rank)}, call)

    def alltoall(self, array: Array, splits: list[int] | str | None, call: Call) -> Handle:
        """Send ``splits[p]`` rows to rank p; the result is (rows received, rows that came from each rank).

        A text as ``splits`` describes what is wrong with the user's: the operation fails on all ranks at once.
        """
        detail = splits if isinstance(splits, str) else [array.shape[0], splits]
        return self.submit("alltoall", [array], _described([array], call, any_rows=True), call, detail)

    def reducescatter(self, arrays: Sequence[Array], request: ReduceRequest, call: Call) -> Handle:
        """Reduce each array (its contents are used up); the result is this rank's rows of each."""
        fields = {**_described(arrays, call), **request.signature()}
        return self.submit("reducescatter", arrays, fields, call, codec=request.codec)

    def barrier(self, process_set_id: int) -> Handle:
        """Return a handle that is done when every rank of the process set has called this."""
        return self.submit("barrier", [], {}, Call(None, process_set_id, wake=False))

    def gather_details(self, detail: Any, call: Call, for_plan: bool = False) -> tuple[bool, list[Any]]:
        """Return whether no rank has joined, and the details of all other ranks, any JSON, in rank order. Blocks.

        ``for_plan``: where a rank has joined, note that ranks agree on their plans anew when all have.
        """
        is_complete, details = self.submit("details", [], {"for_plan": for_plan}, call, detail).wait()
        return bool(is_complete), details

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Return the id of a new process set, or None if a set of these ranks exists. Collective over all ranks."""
        call = Call(None, wake=False)
        return self.submit("add_process_set", [], {"ranks": list(ranks)}, call).wait()  # type: ignore[no-any-return]

    def remove_process_set(self, process_set_id: int) -> bool:
        """Remove a process set; return False if there was none. Collective over all ranks."""
        return bool(self.submit("remove_process_set", [], {"id": process_set_id}, Call(None, wake=False)).wait())


def _described(arrays: Sequence[Array | DeviceArray], call: Call, any_rows: bool = False) -> Signature:
    """Return the fields that describe arrays. ``any_rows``: first dimensions may differ between ranks."""
    fields: Signature = {"dtype": [], "shape": [], "device": call.device}
    for array in arrays:
        fields["dtype"].append(array.dtype if isinstance(array.dtype, str) else NAMES[array.dtype])
        fields["shape"].append(["*", *array.shape[1:]] if any_rows else list(array.shape))
    if arrays and isinstance(arrays[0], DeviceArray):
        fields["direct"] = True
    return fields
