"""Collectives on tensors of one kind of device, over a torch process group that hvdkit alone uses (NCCL for CUDA).

A collective is launched as a whole, copies and arithmetic included, on a stream of the group's own, behind the marks of
the threads that wrote its inputs: in the order in which the engine starts it, the same on all ranks. An operation is
done when the host has seen the stream pass its end, so that its results may be read on any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdkit.compression import LossyCodec
from hvdkit.errors import PeerLostError
from hvdkit.kernels import ReduceOp, Scale
from hvdkit.transports.base import Transfer
from hvdkit.transports.gpu.device_codecs import rescale_
from hvdkit.transports.gpu.device_compression import DeviceMemory, Exchange, reduce_encoded
from hvdkit.transports.gpu.streams import DeviceTransfer, Launch, Stream, Wait, collective_failed

# The operations of a process group and of torch.
_OPS: dict[ReduceOp, tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = {
    ReduceOp.SUM: (dist.ReduceOp.SUM, torch.add),
    ReduceOp.MIN: (dist.ReduceOp.MIN, torch.minimum),
    ReduceOp.MAX: (dist.ReduceOp.MAX, torch.maximum),
    ReduceOp.PRODUCT: (dist.ReduceOp.PRODUCT, torch.mul),
}
_HALVES = (torch.float16, torch.bfloat16)


class DeviceCollectives:
    """Collectives of the ranks of ``group``, a process group of hvdkit's own, which call them in the same order.

    Buffers are contiguous tensors on ``device``. The work waits for the marks ``after``, of which some may be None.

    Halves, and floats that the fp16 codec encodes, are summed in fp32, in rank order, and rounded once at the end, as
    on the host. NCCL sums floats and doubles in its own order: all ranks hold the same bits, but not those of the host.
    """

    def __init__(self, group: Any, device: torch.device, stream: Stream) -> None:
        self._group, self._device, self._stream = group, device, stream
        self._rank, self._size = int(group.rank()), int(group.size())
        self._coalesces = hasattr(group, "allreduce_coalesced")

    def allocate(self, elements: int, dtype: str) -> Tensor:
        """Return a flat tensor of zeros."""
        return torch.zeros(elements, dtype=getattr(torch, dtype), device=self._device)

    def mark(self) -> Any:
        """Return a mark behind the work that the calling thread has given the device so far."""
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
        """Replace each buffer by ``scale * (prescale * rank 0's op prescale * rank 1's op ...)``.

        ``debtors`` are buffers to which the residual at an offset of ``memory`` is added, behind the prescale.
        """

        def work(wait: Wait) -> None:
            before = prescale if memory is None else memory.pay(debtors, prescale)
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for buffer in buffers:
                by_dtype.setdefault(buffer.dtype, []).append(buffer.view(-1))
            for dtype, flats in by_dtype.items():
                filled = [flat for flat in flats if flat.numel()]
                distinct = len({flat.data_ptr() for flat in filled}) == len(filled)  # a tensor may come twice
                if len(filled) > 1 and distinct and dtype not in _HALVES and codec == "none" and self._coalesces:
                    self._reduce(filled, op, before, scale, codec, wait)
                    continue
                fused = flats[0] if len(flats) == 1 else torch.cat(flats)
                if fused.numel():
                    self._reduce([fused], op, before, scale, codec, wait)
                if len(flats) > 1:
                    sizes = [flat.numel() for flat in flats]
                    for flat, part in zip(flats, torch.split_with_sizes(fused, sizes), strict=True):
                        flat.copy_(part)

        return self._launch(after, [*buffers, *([] if memory is None else memory.tensors())], work)

    def memory(self, elements: int, names: Sequence[str], gaps: Sequence[tuple[int, int]]) -> DeviceMemory:
        """Return a codec's arrays of these names on the device, zeros at first, without the elements ``gaps``.

        The result can ``pull`` the arrays into a CodecState of the host, and ``push`` them to the device.
        """
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
        """Replace tensors by ``scale * prescale`` times their sums, as far as the codec transmits them.

        ``parts`` has each flat tensor with its offset in ``buffer``, whose content is lost. ``way`` is the codec's
        algorithm (two_phase, gather, sums), ``matrices`` has the offset, rows and columns of matrices, and ``turn``
        counts earlier reductions of the buffer; these three are the same on all ranks. ``debtors``: see ``allreduce``.
        """

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
        """Replace each buffer by the buffer of the member ``root``."""

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
        """Return new buffers with all members' rows; ``rows[i][p]`` is the first dimension of member p's buffer i."""
        # The calling thread allocates the results, in memory that it may still write: the stream begins behind a mark.
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
        """Abort the communicator without telling the other ranks; operations in flight are lost."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()

    def _launch(self, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> Transfer:
        if self._group is None:
            raise PeerLostError("the communicator of this operation was closed on this rank")
        marks = [mark for mark in after if mark is not None]
        device = tensors[0].device if tensors else self._device
        try:
            # Gradient and autocast modes belong to the launching thread, which may be a thread of the user's.
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                return DeviceTransfer(self._stream.launch(device, marks, tensors, work), tensors)
        except RuntimeError as error:
            raise collective_failed(error) from error

    def _reduce(self, flats: list[Tensor], op: ReduceOp, prescale: float, scale: Scale, codec: str, wait: Wait) -> None:
        """Reduce tensors in place; several, which are no halves, by one operation of the process group."""
        for flat in flats:
            rescale_(flat, Scale(prescale))
        flat, several = flats[0], len(flats) > 1
        wire = torch.float16 if codec == "fp16" and flat.dtype in (torch.float32, torch.float64) else flat.dtype
        if wire in _HALVES:
            self._reduce_halves(flat, wire, op, scale, wait)
            return
        options: Any = dist.AllreduceCoalescedOptions() if several else dist.AllreduceOptions()
        options.reduceOp = _OPS[op][0]
        wait((self._group.allreduce_coalesced if several else self._group.allreduce)(flats, options))
        for flat in flats:
            rescale_(flat, scale)

    def _reduce_halves(self, flat: Tensor, wire: torch.dtype, op: ReduceOp, scale: Scale, wait: Wait) -> None:
        """Reduce as on the host: exchange chunks, reduce one in fp32 (fp64 for doubles), gather all, rounded once."""
        count = flat.numel()
        chunk = -(-count // self._size)
        outgoing = torch.zeros(chunk * self._size, dtype=wire, device=flat.device)
        outgoing[:count].copy_(flat)
        incoming = torch.empty_like(outgoing)
        wait(self._group.alltoall_base(incoming, outgoing, [], []))
        wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
        parts = incoming.view(self._size, chunk)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = _OPS[op][1](total, part.to(wide))
        wait(self._group._allgather_base(outgoing, rescale_(total, scale).to(wire)))
        flat.copy_(outgoing[:count])

    def _gather(self, buffer: Tensor, output: Tensor, counts: Sequence[int], wait: Wait) -> None:
        """Gather every rank's rows, padded to the largest block, since process groups gather blocks of one length."""
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
    """Return the memory of a contiguous tensor, so that every type can travel."""
    return tensor.view(-1).view(torch.uint8)
