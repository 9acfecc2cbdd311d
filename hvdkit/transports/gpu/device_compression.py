"""Encoded sums of tensors of a device, with the error feedback of hvdkit.collectives.compressed.

All ranks know the sizes of payloads in advance, so the host reads nothing from the device. Where a value is not finite,
a value near it is decoded as not finite, and the residual stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hvdkit.compression import DGC, CodecState, LossyCodec, PowerSGD
from hvdkit.compression.dgc import VELOCITY
from hvdkit.compression.state import OWED, RESIDUAL, Key
from hvdkit.kernels import Scale
from hvdkit.transports.gpu.device_codecs import CODERS, Coder, lacks, rescale_
from hvdkit.transports.gpu.streams import Wait


class DeviceMemory:
    """The arrays that a codec keeps of a bucket on the device. The first operation makes them, on its stream."""

    def __init__(
        self, elements: int, names: Sequence[str], gaps: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self.elements = elements
        self._device = device
        self.arrays: dict[str, Tensor | None] = dict.fromkeys(names)
        self.vectors: dict[Key, Tensor] = {}  # of PowerSGD: [rank, columns]
        self._gaps = torch.tensor([index for begin, end in gaps for index in range(begin, end)], dtype=torch.int64)
        self._is_paid = torch.zeros((), dtype=torch.bool, pin_memory=device.type == "cuda")

    def array(self, name: str) -> Tensor | None:
        """Return a kept array, zeros at first; None if the codec keeps no array of that name."""
        if name not in self.arrays:
            return None
        array = self.arrays[name]
        if array is None:
            array = self.arrays[name] = torch.zeros(self.elements, dtype=torch.float32, device=self._device)
        return array

    def clear_gaps(self, flat: Tensor) -> None:
        """Zero the elements between tensors: values decoded there would be encoded again."""
        if self._gaps.device != flat.device:
            self._gaps = _sent_to(self._gaps, flat.device)
        if self._gaps.numel():
            for tensor in (flat, *(array for array in self.arrays.values() if array is not None)):
                tensor.index_fill_(0, self._gaps, 0.0)

    def sent(self, values: Tensor) -> None:
        """Clear the velocity, if the codec keeps it, where this rank has sent values."""
        if (velocity := self.array(VELOCITY)) is not None:
            velocity.masked_fill_(torch.isfinite(values) & (values != 0), 0.0)

    def pay(self, debtors: Sequence[tuple[int, Tensor]], prescale: float) -> float:
        """Multiply flat gradients by ``prescale`` and add what is owed to them, by the rules of ``Residuals.pay``.

        ``debtors`` has each gradient with its offset. Returns the factor that all gradients still need: ``prescale``,
        or 1.0 if there are debtors (other gradients are zeros then).
        """
        owed = self.array(OWED) if debtors else None
        if owed is None:
            return prescale
        for begin, gradient in debtors:
            debt = owed[begin : begin + gradient.numel()]
            rescale_(gradient, Scale(prescale))
            total = (gradient + debt).to(gradient.dtype)
            fits = torch.isfinite(total) & torch.isfinite(gradient).all()
            gradient.copy_(torch.where(fits, total, gradient))
            debt.masked_fill_(fits, 0.0)
        self._is_paid.copy_(~owed.any(), non_blocking=True)
        return 1.0

    def forget_paid(self, memory: CodecState) -> None:
        """Drop the array of what is owed, here and in a memory of the host, once all is paid."""
        if self._is_paid:
            for arrays in (self.arrays, memory.arrays):
                arrays.pop(OWED, None)
            self._is_paid.fill_(False)

    def tensors(self) -> list[Tensor]:
        """Return all tensors on the device."""
        return [*(array for array in self.arrays.values() if array is not None), *self.vectors.values()]

    def pull(self, memory: CodecState) -> None:
        """Copy the arrays into a memory of the host. Waits for the device."""
        for name, array in [*self.arrays.items()]:  # a copy of the list: forget_paid() may remove an array meanwhile
            target = memory.arrays.get(name)
            if array is not None and target is not None:
                target[...] = array.cpu().numpy()
        memory.shared.vectors = {
            key: vectors.reshape(-1).cpu().numpy().copy() for key, vectors in [*self.vectors.items()]
        }

    def push(self, memory: CodecState) -> None:
        """Copy the arrays of a memory of the host to the device."""
        self.arrays = {
            name: torch.from_numpy(array.copy()).to(self._device) if array.any() else None
            for name, array in memory.arrays.items()
        }
        self.vectors = {
            key: torch.from_numpy(vectors.copy()).to(self._device) for key, vectors in memory.shared.vectors.items()
        }


@dataclass(frozen=True)
class Exchange:
    """An operation on a bucket: its ranks and the arguments that all ranks share. ``way`` is the codec's."""

    group: Any  # a torch process group
    rank: int
    size: int
    scale: Scale
    codec: LossyCodec
    way: str
    turn: int  # the number of earlier reductions of these elements
    matrices: Sequence[tuple[int, int, int]]  # of each tensor: its offset, rows and columns
    wait: Wait

    def coder(self) -> Coder:
        """Return the encoder of payloads."""
        coder = CODERS.get(type(self.codec))
        assert coder is not None, f"{self.codec.summary} has no twin on devices, though it says so"
        return coder(self.codec, self.turn, self.rank)

    def gather(self, own: Tensor) -> Tensor:
        """Return the payloads of all ranks: [ranks, bytes]."""
        payloads = own.new_empty(self.size * own.numel())
        self.wait(self.group._allgather_base(payloads, own.contiguous()))
        return payloads.view(self.size, -1)

    def swap(self, payloads: Tensor) -> Tensor:
        """Send each rank its payload, and return the payloads for this rank; both [ranks, bytes]."""
        incoming = torch.empty_like(payloads)
        self.wait(self.group.alltoall_base(incoming, payloads.contiguous(), [], []))
        return incoming

    def sum(self, flat: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self.wait(self.group.allreduce([flat], options))


def reduce_encoded(exchange: Exchange, buffer: Tensor, memory: DeviceMemory) -> None:
    """Replace a flat tensor by ``scale`` times its encoded sum over all ranks. Only launches work."""
    if not buffer.numel():
        return
    flat = buffer if buffer.dtype == torch.float32 else buffer.to(torch.float32)
    memory.clear_gaps(flat)
    if isinstance(exchange.codec, DGC):
        _add_to_velocity(exchange.codec, flat, memory, exchange.size)
    if exchange.way == "sums":
        _low_rank(exchange, flat, memory)
    elif (coder := exchange.coder()).sends_all:
        _all(exchange, flat, memory)
    elif exchange.way == "gather":
        _gather(exchange, coder, flat, memory)
    else:
        _two_phase(exchange, coder, flat, memory)
    if flat is not buffer:
        buffer.copy_(flat)


def _all(exchange: Exchange, flat: Tensor, memory: DeviceMemory) -> None:
    """Sum a tensor as it is, for a codec that would send a value for each element."""
    residual = memory.array(RESIDUAL)
    sent = flat.clone() if residual is None else flat + residual
    if residual is not None:
        residual.copy_(lacks(sent, sent, residual))
    flat.copy_(sent)
    exchange.sum(flat)
    rescale_(flat, exchange.scale)
    memory.sent(sent)


def _gather(exchange: Exchange, coder: Coder, flat: Tensor, memory: DeviceMemory) -> None:
    """Send the payload of all elements to all ranks."""
    residual, count = memory.array(RESIDUAL), flat.numel()
    payload, sent, left = coder.encode_rest(flat[None], None if residual is None else residual[None], count, 0)
    payloads = exchange.gather(payload[0])
    flat.zero_()
    for rank_payload in payloads:
        coder.add_to(flat, rank_payload)
    rescale_(flat, exchange.scale)
    if left is not None:
        memory.arrays[RESIDUAL] = left[0]
    if sent is not None:
        memory.sent(sent[0])


def _two_phase(exchange: Exchange, coder: Coder, flat: Tensor, memory: DeviceMemory) -> None:
    """Send chunk p of all ranks to rank p, which sums the chunks, encodes the sum and sends it to all ranks."""
    residual = memory.array(RESIDUAL)
    count, size, me = flat.numel(), exchange.size, exchange.rank
    chunk = -(-count // (size * coder.step)) * coder.step
    rows = pad(flat, (0, size * chunk - count)).view(size, chunk)
    kept = None if residual is None else pad(residual, (0, size * chunk - count)).view(size, chunk)
    payloads, sent, left = coder.encode_rest(rows, kept, count, 0)
    incoming = coder.decode(exchange.swap(payloads), chunk)
    own, valid = rows[me : me + 1].clone(), min(chunk, max(0, count - me * chunk))
    for peer in range(size):
        if peer != me:
            own += incoming[peer]
    own[0, valid:] = 0.0  # some codecs, such as signs, decode the padding as other values
    payload, own_sent, own_left = coder.encode_rest(own, None if kept is None else kept[me : me + 1], valid, 1)
    sums = coder.decode(exchange.gather(payload[0]), chunk)
    rescale_(flat.copy_(sums.view(-1)[:count]), exchange.scale)
    if residual is not None and left is not None and own_left is not None:
        left[me] = own_left[0]
        residual.copy_(left.view(-1)[:count])
    if sent is not None and own_sent is not None:
        sent[me] = own_sent[0]
        memory.sent(sent.view(-1)[:count])


def _add_to_velocity(codec: DGC, flat: Tensor, memory: DeviceMemory, ranks: int) -> None:
    """Add the gradient to the velocity, and the velocity to the residual; keep only non-finite values in ``flat``."""
    velocity, residual = memory.array(VELOCITY), memory.array(RESIDUAL)
    if velocity is None or residual is None:  # this rank has closed its plan and gives zeros
        return
    if codec.clip is not None:
        norm, most = torch.linalg.vector_norm(flat), codec.clip / ranks**0.5
        flat.mul_(torch.where(torch.isfinite(norm) & (norm > most), most / norm, 1.0))
    finite = torch.isfinite(flat)
    velocity.copy_(torch.where(finite, codec.momentum * velocity + flat, velocity))
    residual.add_(torch.where(finite, velocity, 0.0))
    flat.masked_fill_(finite, 0.0)


def _low_rank(exchange: Exchange, flat: Tensor, memory: DeviceMemory) -> None:
    """Sum the matrices times the last step's vectors, then times the orthonormalised sum, as PowerSGD does."""
    codec, residual = exchange.codec, memory.array(RESIDUAL)
    assert isinstance(codec, PowerSGD), f"{codec.summary} has no twin on devices, though it says so"
    host = CodecState(flat.numel())
    host.turn = exchange.turn
    products = [shape for shape in exchange.matrices if codec.vectors(*shape[1:])]
    plain = [shape for shape in exchange.matrices if not codec.vectors(*shape[1:])]
    gradients = {begin: _matrix(flat, begin, rows, cols) for begin, rows, cols in products}
    if residual is not None:
        gradients = {at: gradient + _matrix(residual, at, *gradient.shape) for at, gradient in gradients.items()}
    rights = {}
    for begin, rows, cols in products:
        key = codec.key(host, begin, rows, cols)
        if key not in memory.vectors:
            start = torch.from_numpy(codec.start(host, begin, rows, cols))
            memory.vectors[key] = _sent_to(start.view(-1, cols), flat.device)
        rights[begin] = memory.vectors[key].view(-1, cols)
    # Tensors that are too small to be products go with the first sum.
    lefts = [(gradients[begin] @ rights[begin].T).view(-1) for begin, _, _ in products]
    first = torch.cat([*lefts, *(flat[begin : begin + rows * cols] for begin, rows, cols in plain)])
    exchange.sum(first)
    sizes = [codec.vectors(rows, cols) * rows for _, rows, cols in products] + [rows * cols for _, rows, cols in plain]
    begins = [begin for begin, _, _ in (*products, *plain)]
    summed = dict(zip(begins, torch.split(first, sizes), strict=True))
    bases = {begin: torch.linalg.qr(summed[begin].view(rows, -1)).Q for begin, rows, _ in products}
    own = {begin: bases[begin].T @ gradients[begin] for begin, _, _ in products}
    if products:
        second = torch.cat([right.reshape(-1) for right in own.values()])
        exchange.sum(second)
        sums = dict(zip(own, torch.split(second, [right.numel() for right in own.values()]), strict=True))
    for begin, rows, cols in products:
        right = sums[begin].view(-1, cols)
        finite = torch.isfinite(right).all() & torch.isfinite(summed[begin]).all()
        memory.vectors[codec.key(host, begin, rows, cols)] = torch.where(finite, right, rights[begin])
        if residual is not None:
            target = _matrix(residual, begin, rows, cols)
            target.copy_(torch.where(finite, gradients[begin] - bases[begin] @ own[begin], target))
        _matrix(flat, begin, rows, cols).copy_(torch.where(finite, bases[begin] @ right, torch.nan))
        rescale_(flat[begin : begin + rows * cols], exchange.scale)
    for begin, rows, cols in plain:
        rescale_(flat[begin : begin + rows * cols].copy_(summed[begin]), exchange.scale)


def _sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor of the host to a device, page-locked, so that the host does not wait for the stream."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _matrix(flat: Tensor, begin: int, rows: int, cols: int) -> Tensor:
    return flat[begin : begin + rows * cols].view(rows, cols)
