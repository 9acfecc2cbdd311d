"""Named operations, as adapters call them: arrays, a signature that all ranks must share, and details of this rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any

from hvdkit.collectives.group import Array
from hvdkit.compression import CASTS, Codec
from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.negotiation import Negotiation
from hvdkit.engine.loop.waiting import WaitingThreads
from hvdkit.engine.ops import KINDS, tensor_kinds
from hvdkit.engine.ops.batch import DeviceArray, Handle, Submission
from hvdkit.engine.ops.requests import Call, Key, ReduceRequest, Signature, automatic_key
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import DuplicateNameError, HorovodInternalError, PeerFailedError, PeerLostError
from hvdkit.kernels import NAMES


class Submissions(dict[Key, Submission]):
    """The operations that this rank has submitted and that do not run yet. Only the driver removes entries."""

    def __init__(self) -> None:
        super().__init__()
        self._automatic: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def key_for(self, kind: str, call: Call) -> Key:
        """Return the key of an operation. An operation without a name gets a number unless ``call`` has one."""
        if call.name is not None:
            return Key(call.process_set_id, kind, call.name)
        number = self.count(kind, call.process_set_id) if call.number is None else call.number
        return automatic_key(call.process_set_id, kind, number)

    def count(self, kind: str, process_set_id: int) -> int:
        """Return the next number for an operation without a name."""
        with self._lock:
            number = self._automatic[kind, process_set_id] = self._automatic.get((kind, process_set_id), -1) + 1
        return number

    def enter(self, submission: Submission) -> None:
        """Add a submission. Raises DuplicateNameError if an operation of that name is in flight."""
        key = submission.key
        with self._lock:
            for other in () if not self else tensor_kinds() if KINDS[key.kind].carries_tensors else (key.kind,):
                if key._replace(kind=other) in self:
                    raise _duplicate_name(key.kind, other, key.name)
            self[key] = submission

    def fail(self, error: HorovodInternalError) -> None:
        """End all submissions with ``error``."""
        with self._lock:
            for submission in self.values():
                submission.handle.fail(error)
            self.clear()

    def restart_counting(self) -> None:
        """Number the global set's operations without a name from 0 again, of which ranks made different numbers."""
        self._automatic = {counted: count for counted, count in self._automatic.items() if counted[1] != 0}


def _duplicate_name(kind: str, other: str, name: str) -> DuplicateNameError:
    return DuplicateNameError(
        f"Requested to {kind} a tensor with the same name as another tensor that is currently "
        f"being processed: {other} '{name}'.\n"
        "HINT: synchronize() the first one, or give each tensor a name of its own."
    )


class NamedOperations:
    """The named operations of one engine.

    Arrays are numpy arrays, C-contiguous. Where allreduce, broadcast and allgather take DeviceArrays, the result's
    arrays are tensors of the device or, if these ranks have no collectives of it, numpy arrays.
    ``submitting`` is called for each operation.
    """

    def __init__(
        self,
        groups: Groups,
        submissions: Submissions,
        driver: Driver,
        negotiation: Negotiation,
        waiting: WaitingThreads,
        telemetry: Telemetry,
        submitting: Callable[[], None] | None,
    ) -> None:
        self.groups = groups
        self._submissions, self._driver, self._negotiation = submissions, driver, negotiation
        self._waiting, self._telemetry, self._submitting = waiting, telemetry, submitting
        self._mailbox, self._rank = negotiation.mailbox, negotiation.mailbox.topology.rank

    def check_usable(self) -> None:
        """Raise HorovodInternalError if this engine cannot communicate any more.

        PeerLostError and PeerFailedError keep their class: the loss may have been noticed between two operations.
        """
        error = self._mailbox.error
        if error is None:
            return
        text = (
            f"hvdkit cannot communicate any more: {error}\n"
            "HINT: call hvd.shutdown() and hvd.init() on all ranks that are left, or restart the job."
        )
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

        ``fields`` must match on all ranks; ``detail`` is sent to the coordinator and may differ.
        """
        self.check_usable()
        if self._submitting is not None:
            self._submitting()
        members = self.groups.ranks.get(call.process_set_id)
        if members is None or self._rank not in members:
            fact = "does not exist" if members is None else f"has the ranks {members}"
            raise ValueError(
                f"{kind}: rank {self._rank} is not in process set {call.process_set_id}, which {fact}.\n"
                "HINT: call it only where process_set.included() is true."
            )
        key = self._submissions.key_for(kind, call)
        signature = {"kind": kind, "ps": call.process_set_id, **fields}
        handle = Handle(key, call.name, self._waiting)
        values = None if sources is None else list(sources)
        submission = Submission(key, signature, list(arrays), detail, handle, values, codec)
        self._submissions.enter(submission)
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

        ``sources``: arrays of the same shapes that hold the values, where the arrays only take the results. They must
        not change until the operation is done.
        """
        repetitions = self.groups.repetitions.get(call.process_set_id)
        if repetitions and len(arrays) == 1 and self._mailbox.error is None:
            if call.name is None:
                call = call._replace(number=self._submissions.count("allreduce", call.process_set_id))
            elif call.name in repetitions.under_way:
                raise _duplicate_name("allreduce", "allreduce", call.name)
            # An operation in flight may have the same name, which is an error.
            negotiates = call.wake or bool(self._submissions) or self._telemetry.timeline is not None
            self._waiting.submitters.add(get_ident())
            began = perf_counter()
            source = None if sources is None else sources[0]
            done = repetitions.reduce(arrays[0], source, request, call, negotiates)
            self._telemetry.statistics.waited(perf_counter() - began)
            if done:
                if self._submitting is not None:
                    self._submitting()
                handle = Handle("an allreduce", call.name, self._waiting)
                handle.finish(arrays)
                return handle
        fields = {**_described(arrays), **request.signature(), **_device_fields(arrays, call)}
        return self.submit("allreduce", arrays, fields, call, None, sources, request.codec)

    def allgather(self, arrays: Sequence[Array | DeviceArray], call: Call) -> Handle:
        """Concatenate each array over the ranks along its first dimension; the result is a list of new arrays."""
        fields = {
            "dtype": [_dtype_name(array) for array in arrays],
            "shape": [["*", *array.shape[1:]] for array in arrays],
            **_device_fields(arrays, call),
        }
        return self.submit("allgather", arrays, fields, call, [array.shape[0] for array in arrays])

    def broadcast(self, arrays: Sequence[Array | DeviceArray], root_rank: int, call: Call) -> Handle:
        """Replace each array in place by that of ``root_rank`` (a global rank)."""
        fields = {**_described(arrays), "root": int(root_rank), **_device_fields(arrays, call)}
        return self.submit("broadcast", arrays, fields, call)

    def alltoall(self, array: Array, splits: list[int] | str | None, call: Call) -> Handle:
        """Send ``splits[p]`` rows to rank p; the result is (rows received, rows that came from each rank).

        Pass a text as ``splits`` to describe what is wrong with the user's splits: this rank cannot take part, and the
        operation fails on all ranks at once.
        """
        fields = {"dtype": [_dtype_name(array)], "shape": [["*", *array.shape[1:]]], "device": call.device}
        detail = splits if isinstance(splits, str) else [array.shape[0], splits]
        return self.submit("alltoall", [array], fields, call, detail)

    def reducescatter(self, arrays: Sequence[Array], request: ReduceRequest, call: Call) -> Handle:
        """Reduce each array (its contents are used up); the result is this rank's rows of each."""
        fields = {**_described(arrays), **request.signature(), "device": call.device}
        return self.submit("reducescatter", arrays, fields, call, codec=request.codec)

    def barrier(self, process_set_id: int) -> Handle:
        """Return a handle that is done when every rank of the process set has called this."""
        return self.submit("barrier", [], {}, Call(None, process_set_id, wake=False))

    def gather_details(self, detail: Any, call: Call) -> tuple[bool, list[Any]]:
        """Return whether no rank has joined, and the details of all other ranks, any JSON, in rank order. Blocks."""
        is_complete, details = self.submit("details", [], {}, call, detail).wait()
        return bool(is_complete), details

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Return the id of a new process set, or None if a set of these ranks exists. Collective over all ranks."""
        handle = self.submit("add_process_set", [], {"ranks": list(ranks)}, Call(None, wake=False))
        result: int | None = handle.wait()
        return result

    def remove_process_set(self, process_set_id: int) -> bool:
        """Remove a process set; return False if there was none. Collective over all ranks."""
        handle = self.submit("remove_process_set", [], {"id": process_set_id}, Call(None, wake=False))
        return bool(handle.wait())


def _described(arrays: Sequence[Array | DeviceArray]) -> Signature:
    dtypes, shapes = [], []
    for array in arrays:
        dtypes.append(_dtype_name(array))
        shapes.append(list(array.shape))
    return {"dtype": dtypes, "shape": shapes}


def _dtype_name(array: Array | DeviceArray) -> str:
    return array.dtype if isinstance(array.dtype, str) else NAMES[array.dtype]


def _device_fields(arrays: Sequence[Array | DeviceArray], call: Call) -> Signature:
    """Return the device, and "direct" if the tensors stay there."""
    return {"device": call.device, **({"direct": True} if isinstance(arrays[0], DeviceArray) else {})}
