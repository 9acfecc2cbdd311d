"""Collectives on tensors of one kind of device, over a torch process group that nobody else uses (NCCL for CUDA).

A collective is launched as a whole, copies and arithmetic included, on a stream of the group's own: so a process group
sees its operations in the order in which the engine started them, which is the same on all ranks. Nothing here blocks.
An operation is done when the host has seen the stream pass its end; whoever reads a result then needs no more care.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hvdkit.compression import LossyCodec
from hvdkit.errors import PeerLostError
from hvdkit.kernels import ReduceOp, Scale
from hvdkit.transports.base import DeviceCollectives, Transfer
from hvdkit.transports.gpu.device_compression import DeviceMemory, Exchange, Wait, reduce_encoded
from hvdkit.transports.gpu.device_scale import rescale_

_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
_LOCAL_OPS: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}
_HALVES = (torch.float16, torch.bfloat16)
CAPTURED = (
    "a CUDA graph cannot capture an operation of hvdkit, in which threads of the host take part: each replay would use "
    "gradients of this rank alone.\n"
    "HINT: capture the model by torch.cuda.make_graphed_callables or torch.compile(mode='reduce-overhead'), and leave "
    "operations, backward() and optimizer.step() outside of graphs of your own."
)


class End(Protocol):
    """The end of what was launched."""

    def query(self) -> bool:
        """Whether it has been reached. Raises RuntimeError where what was launched failed."""
        ...

    def synchronize(self) -> None:
        """Block until it has been reached or failed."""
        ...


class Stream(Protocol):
    """Runs launched work in order, beside the threads of the training script."""

    def mark(self, device: torch.device) -> Any:
        """A point in the present thread's work on ``device``."""
        ...

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Work) -> End:
        """Run ``work`` behind the marks ``after``. ``tensors`` belong to others and must outlive it."""
        ...


class Work(Protocol):
    """Launches collectives and arithmetic; ``wait`` puts what follows on the stream behind a collective's work."""

    def __call__(self, wait: Wait) -> None: ...


def cuda_mark(device: torch.device) -> Any:
    """Return an event behind the calling thread's work on a GPU.

    Raises:
        ValueError: that work is being captured in a CUDA graph.
    """
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(CAPTURED)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class CudaEnd:
    """An event behind the last kernel, and the collectives before it, any of which may have been given up."""

    def __init__(self, event: Any, works: list[Any]) -> None:
        self._event = event
        self._works = works

    def query(self) -> bool:
        if not self._event.query():
            return False
        for work in self._works:
            # NCCL's watchdog notes a failure here before it aborts the kernel, so a wrong result is never taken.
            result = work.get_future_result() if hasattr(work, "get_future_result") else None
            if result is not None and result.done() and result.value() != 0:
                raise RuntimeError(f"NCCL gave the operation up (result {result.value()})")
        self._works.clear()
        return True

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A stream for each CUDA device that is used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def mark(self, device: torch.device) -> Any:
        return cuda_mark(device)

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Work) -> End:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        works: list[Any] = []

        def wait(one: Any) -> None:
            one.wait()  # the stream waits, not this thread
            works.append(one)

        with torch.cuda.stream(stream):  # selects the device as well
            for mark in after:
                stream.wait_event(mark)
            for tensor in tensors:
                tensor.record_stream(stream)
            work(wait)
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaEnd(event, works)


class DeviceTransfer:
    """What was launched last on a stream: all ranks are waited for, so the peer is -1."""

    __slots__ = ("_kept", "end", "peer")

    def __init__(self, end: End, kept: list[Tensor]) -> None:
        self.peer = -1
        self.end = end
        self._kept = kept  # kernels read or write these until the end

    def done(self) -> bool:
        try:
            return self.end.query()
        except RuntimeError as error:
            raise _lost(error) from error

    def wait(self) -> None:
        """Block until done, on a waiter thread. An error shows in ``done()``."""
        try:
            self.end.synchronize()
        except RuntimeError:
            return


class TorchDeviceCollectives(DeviceCollectives):
    """The ranks of ``group``, a process group of ours, on ``device``. Results are those of the host's algorithms:
    halves (and what the fp16 codec makes of floats) are summed in fp32, in rank order, and rounded once at the end.
    """

    def __init__(self, group: Any, device: torch.device, stream: Stream) -> None:
        self._group = group
        self._rank, self._size = int(group.rank()), int(group.size())
        self._device = device
        self._stream = stream
        self._coalesces = hasattr(group, "allreduce_coalesced")

    def allocate(self, elements: int, dtype: str) -> Tensor:
        return torch.zeros(elements, dtype=getattr(torch, dtype), device=self._device)

    def mark(self) -> Any:
        return self._stream.mark(self._device)

    def allreduce(
        self,
        buffers: Sequence[Tensor],
        op: ReduceOp,
        prescale: float,
        scale: Scale,
        codec: str,
        after: Sequence[Any],
        memory: DeviceMemory | None = None,
        debtors: Sequence[tuple[int, Tensor]] = (),
    ) -> Transfer:
        def work(wait: Wait) -> None:
            before = prescale if memory is None else memory.pay(debtors, prescale)
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for buffer in buffers:
                by_dtype.setdefault(buffer.dtype, []).append(buffer.view(-1))
            for dtype, flats in by_dtype.items():
                there = [flat for flat in flats if flat.numel()]
                apart = len({flat.data_ptr() for flat in there}) == len(there)  # one may be there twice
                if len(there) > 1 and apart and dtype not in _HALVES and codec == "none" and self._coalesces:
                    self._reduce(there, op, before, scale, codec, wait)
                    continue
                fused = flats[0] if len(flats) == 1 else torch.cat(flats)
                if fused.numel():
                    self._reduce([fused], op, before, scale, codec, wait)
                if len(flats) > 1:
                    for flat, part in zip(
                        flats, torch.split_with_sizes(fused, [flat.numel() for flat in flats]), strict=True
                    ):
                        flat.copy_(part)

        kept = [] if memory is None else memory.tensors()
        return self._launch(after, [*buffers, *kept], work)

    def memory(self, elements: int, names: Sequence[str], gaps: Sequence[tuple[int, int]]) -> DeviceMemory:
        return DeviceMemory(elements, names, gaps, self._device)

    def allreduce_encoded(
        self,
        buffer: Tensor,
        parts: Sequence[tuple[int, Tensor]],
        prescale: float,
        scale: Scale,
        codec: LossyCodec,
        way: str,
        memory: DeviceMemory,
        matrices: Sequence[tuple[int, int, int]],
        turn: int,
        after: Sequence[Any],
        debtors: Sequence[tuple[int, Tensor]] = (),
    ) -> Transfer:
        def work(wait: Wait) -> None:
            before = memory.pay(debtors, prescale)
            for begin, tensor in parts:
                buffer[begin : begin + tensor.numel()].copy_(tensor)
            rescale_(buffer, Scale(before))
            exchange = Exchange(self._group, self._rank, self._size, scale, codec, way, turn, matrices, wait)
            reduce_encoded(exchange, buffer, memory)
            for begin, tensor in parts:
                tensor.copy_(buffer[begin : begin + tensor.numel()])

        return self._launch(after, [buffer, *(tensor for _, tensor in parts), *memory.tensors()], work)

    def broadcast(self, buffers: Sequence[Tensor], root: int, after: Sequence[Any]) -> Transfer:
        def work(wait: Wait) -> None:
            options: Any = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            for buffer in buffers:
                if buffer.numel():
                    wait(self._group.broadcast([_bytes(buffer)], options))

        return self._launch(after, list(buffers), work)

    def allgather(
        self, buffers: Sequence[Tensor], rows: Sequence[Sequence[int]], after: Sequence[Any]
    ) -> tuple[list[Tensor], Transfer]:
        # Results are made by the calling thread, of memory that it may write: the stream begins behind this mark.
        outputs = [
            torch.empty((sum(counts), *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
            for buffer, counts in zip(buffers, rows, strict=True)
        ]

        def work(wait: Wait) -> None:
            for buffer, output, counts in zip(buffers, outputs, rows, strict=True):
                if output.numel():
                    self._gather(buffer, output, counts, wait)

        return outputs, self._launch([*after, self.mark()], [*buffers, *outputs], work)

    def close(self) -> None:
        """Give the communicator back without a word to the others; what is in flight is lost."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _launch(self, after: Sequence[Any], tensors: list[Tensor], work: Work) -> Transfer:
        if self._group is None:
            raise PeerLostError("the communicator of this operation was closed on this rank")
        marks = [mark for mark in after if mark is not None]
        device = tensors[0].device if tensors else self._device
        try:
            # Both are the launching thread's, which may be anyone's.
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                return DeviceTransfer(self._stream.launch(device, marks, tensors, work), tensors)
        except RuntimeError as error:
            raise _lost(error) from error

    def _reduce(self, flats: list[Tensor], op: ReduceOp, prescale: float, scale: Scale, codec: str, wait: Wait) -> None:
        """Each where it lies; several, which are no halves, as one operation of the process group."""
        for flat in flats:
            rescale_(flat, Scale(prescale))
        flat, several = flats[0], len(flats) > 1
        wire = torch.float16 if codec == "fp16" and flat.dtype in (torch.float32, torch.float64) else flat.dtype
        if wire in _HALVES:
            self._reduce_halves(flat, wire, op, scale, wait)
            return
        options: Any = dist.AllreduceCoalescedOptions() if several else dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        wait((self._group.allreduce_coalesced if several else self._group.allreduce)(flats, options))
        for flat in flats:
            rescale_(flat, scale)

    def _reduce_halves(self, flat: Tensor, wire: torch.dtype, op: ReduceOp, scale: Scale, wait: Wait) -> None:
        """Two phases as on the host: exchange chunks, reduce the own one in fp32 (fp64 for doubles), gather.

        The process group's own allreduce would round to 16 bits after each addition.
        """
        count = flat.numel()
        chunk = -(-count // self._size)
        mine = torch.zeros(chunk * self._size, dtype=wire, device=flat.device)
        mine[:count].copy_(flat)
        theirs = torch.empty_like(mine)
        wait(self._group.alltoall_base(theirs, mine, [], []))
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        parts = theirs.view(self._size, chunk)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = _LOCAL_OPS[op](total, part.to(wide))
        own = rescale_(total, scale).to(wire)
        wait(self._group._allgather_base(mine, own))
        flat.copy_(mine[:count])

    def _gather(self, buffer: Tensor, output: Tensor, counts: Sequence[int], wait: Wait) -> None:
        """Every rank's rows padded to the longest, since process groups gather blocks of one length."""
        row_bytes = prod(buffer.shape[1:]) * buffer.element_size()
        longest = max(counts) * row_bytes
        own = _bytes(buffer)
        if own.numel() < longest:
            own = torch.cat([own, own.new_zeros(longest - own.numel())])
        even = min(counts) == max(counts)
        blocks = _bytes(output) if even else own.new_empty(longest * self._size)
        wait(self._group._allgather_base(blocks, own))
        if not even:
            parts = [block[: rows * row_bytes] for block, rows in zip(blocks.view(-1, longest), counts, strict=True)]
            _bytes(output).copy_(torch.cat(parts))


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, so that every type can travel."""
    return tensor.view(-1).view(torch.uint8)


def _lost(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"the device's collective failed: {str(error).splitlines()[0]}")
