"""Encoded sums of tensors of a device, and what is kept of them: launched without waiting for any result.

Payloads have a size that all ranks know beforehand, so nothing of the device is read by the host. Error feedback is
that of hvdkit.collectives.compressed: of what a rank did not send to an element's owner, and on the owner, of what it
did not hand on. Where a value is not finite, something near it is decoded as not finite, and what is kept stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from hvdkit.compression import DGC, Codec, CodecState, LossyCodec, PowerSGD
from hvdkit.compression.dgc import VELOCITY
from hvdkit.compression.state import OWED, RESIDUAL, Key
from hvdkit.kernels import Scale
from hvdkit.transports.gpu.device_codecs import CODERS, Coder, lacks
from hvdkit.transports.gpu.device_scale import rescale_

Wait = Callable[[Any], None]


class DeviceMemory:
    """What a codec keeps of a bucket on the device, and where the bucket's tensors are.

    ``gaps``: the elements that belong to no tensor. Arrays are made by the first operation, on its stream.
    """

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
        """A kept array, zeros at first; None if the codec keeps none of that name."""
        if name not in self.arrays:
            return None
        array = self.arrays[name]
        if array is None:
            array = self.arrays[name] = torch.zeros(self.elements, dtype=torch.float32, device=self._device)
        return array

    def clear_gaps(self, flat: Tensor) -> None:
        """Zero what lies between tensors: what was decoded there would be encoded again."""
        if self._gaps.device != flat.device:
            self._gaps = _sent_to(self._gaps, flat.device)
        if self._gaps.numel():
            for tensor in (flat, *(array for array in self.arrays.values() if array is not None)):
                tensor.index_fill_(0, self._gaps, 0.0)

    def sent(self, values: Tensor) -> None:
        """What this rank sent leaves the velocity, if one is kept."""
        velocity = self.array(VELOCITY)
        if velocity is not None:
            velocity.masked_fill_(torch.isfinite(values) & (values != 0), 0.0)

    def pay(self, debtors: Sequence[tuple[int, Tensor]], prescale: float) -> float:
        """Multiply flat gradients with ``prescale`` and add what is owed to them, by the rules of ``Residuals.pay``.

        ``debtors`` are where each begins, and the gradient. Returns what is left for all gradients to be multiplied
        with: 1.0, which leaves zeros of others as they are, if there are any debtors.
        """
        owed = self.array(OWED) if debtors else None
        if owed is None:
            return prescale
        for begin, gradient in debtors:
            mine = owed[begin : begin + gradient.numel()]
            rescale_(gradient, Scale(prescale))
            total = (gradient + mine).to(gradient.dtype)
            fits = torch.isfinite(total) & torch.isfinite(gradient).all()
            gradient.copy_(torch.where(fits, total, gradient))
            mine.masked_fill_(fits, 0.0)
        self._is_paid.copy_(~owed.any(), non_blocking=True)
        return 1.0

    def forget_paid(self, memory: CodecState) -> None:
        """After a payment: if all was paid, nothing is owed here any more, nor in a memory of the host."""
        if self._is_paid:
            for arrays in (self.arrays, memory.arrays):
                arrays.pop(OWED, None)
            self._is_paid.fill_(False)

    def tensors(self) -> list[Tensor]:
        """All that lies on the device."""
        return [*(array for array in self.arrays.values() if array is not None), *self.vectors.values()]

    def pull(self, memory: CodecState) -> None:
        """Copy what is kept into a memory of the host. Waits for the device."""
        for name, array in [*self.arrays.items()]:  # what is paid meanwhile goes
            ours = memory.arrays.get(name)
            if array is not None and ours is not None:
                ours[...] = array.cpu().numpy()
        memory.shared.vectors = {key: one.reshape(-1).cpu().numpy().copy() for key, one in [*self.vectors.items()]}

    def push(self, memory: CodecState) -> None:
        """Take over what a memory of the host holds."""
        self.arrays = {
            name: torch.from_numpy(array.copy()).to(self._device) if array.any() else None
            for name, array in memory.arrays.items()
        }
        self.vectors = {
            key: torch.from_numpy(one.copy()).to(self._device) for key, one in memory.shared.vectors.items()
        }


@dataclass(frozen=True)
class Exchange:
    """An operation on a bucket: its ranks, and what is the same on all of them. ``way`` is the codec's."""

    group: Any  # a torch process group
    rank: int
    size: int
    scale: Scale
    codec: LossyCodec
    way: str
    turn: int  # how often these elements were reduced before
    matrices: Sequence[tuple[int, int, int]]  # where each tensor begins, its rows and its columns
    wait: Wait

    def coder(self) -> Coder:
        """What encodes payloads."""
        coder = CODERS.get(type(self.codec))
        assert coder is not None, f"{self.codec.summary} has no twin on devices, though it says so"
        return coder(self.codec, self.turn, self.rank)

    def gather(self, own: Tensor) -> Tensor:
        """Everyone's payload: [ranks, bytes]."""
        everyones = own.new_empty(self.size * own.numel())
        self.wait(self.group._allgather_base(everyones, own.contiguous()))
        return everyones.view(self.size, -1)

    def swap(self, payloads: Tensor) -> Tensor:
        """From each rank its payload for this one; both [ranks, bytes]."""
        incoming = torch.empty_like(payloads)
        self.wait(self.group.alltoall_base(incoming, payloads.contiguous(), [], []))
        return incoming

    def sum(self, flat: Tensor) -> None:
        """Replace a tensor by its sum over all ranks."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        self.wait(self.group.allreduce([flat], options))


def reduce_encoded(exchange: Exchange, buffer: Tensor, memory: DeviceMemory) -> None:
    """Launch what replaces a flat tensor by ``scale`` times its sum over all ranks, as the codec lets it through."""
    if not buffer.numel():
        return
    flat = buffer if buffer.dtype == torch.float32 else buffer.to(torch.float32)
    memory.clear_gaps(flat)
    codec = exchange.codec
    if (prepare := _PREPARE.get(type(codec))) is not None:
        prepare(codec, flat, memory, exchange.size)
    _WAYS[exchange.way](exchange, flat, memory)
    if flat is not buffer:
        buffer.copy_(flat)


def _all(exchange: Exchange, flat: Tensor, memory: DeviceMemory) -> None:
    """A plain sum, where as many values as elements would be sent."""
    residual = memory.array(RESIDUAL)
    sent = flat.clone() if residual is None else flat + residual
    if residual is not None:
        residual.copy_(lacks(sent, sent, residual))
    flat.copy_(sent)
    exchange.sum(flat)
    rescale_(flat, exchange.scale)
    memory.sent(sent)


def _gather(exchange: Exchange, flat: Tensor, memory: DeviceMemory) -> None:
    """Everyone's payload of all elements to everyone."""
    residual, coder, count = memory.array(RESIDUAL), exchange.coder(), flat.numel()
    if coder.sends_all:
        _all(exchange, flat, memory)
        return
    kept = None if residual is None else residual[None]
    payload, sent, now_kept = coder.encode_rest(flat[None], kept, count, 0)
    everyones = exchange.gather(payload[0])
    flat.zero_()
    for everyone in everyones:
        coder.add_to(flat, everyone)
    rescale_(flat, exchange.scale)
    if now_kept is not None:
        memory.arrays[RESIDUAL] = now_kept[0]
    if sent is not None:
        memory.sent(sent[0])


def _two_phase(exchange: Exchange, flat: Tensor, memory: DeviceMemory) -> None:
    """Chunk p of everyone to rank p, which sums, encodes the sum and hands it to all."""
    residual, coder = memory.array(RESIDUAL), exchange.coder()
    if coder.sends_all:
        _all(exchange, flat, memory)
        return
    count, size, me = flat.numel(), exchange.size, exchange.rank
    chunk = -(-count // (size * coder.step)) * coder.step
    rows = pad(flat, (0, size * chunk - count)).view(size, chunk)
    kept = None if residual is None else pad(residual, (0, size * chunk - count)).view(size, chunk)
    payloads, sent, now_kept = coder.encode_rest(rows, kept, count, 0)
    incoming = coder.decode(exchange.swap(payloads), chunk)
    own, valid = rows[me : me + 1].clone(), min(chunk, max(0, count - me * chunk))
    for peer in range(size):
        if peer != me:
            own += incoming[peer]
    own[0, valid:] = 0.0  # signs, for one, stand for something there too
    payload, own_sent, own_kept = coder.encode_rest(own, None if kept is None else kept[me : me + 1], valid, 1)
    everyones = exchange.gather(payload[0])
    rescale_(flat.copy_(coder.decode(everyones, chunk).view(-1)[:count]), exchange.scale)
    if residual is not None and now_kept is not None and own_kept is not None:
        now_kept[me] = own_kept[0]
        residual.copy_(now_kept.view(-1)[:count])
    if sent is not None and own_sent is not None:
        sent[me] = own_sent[0]
        memory.sent(sent.view(-1)[:count])


def _add_to_velocity(codec: DGC, flat: Tensor, memory: DeviceMemory, ranks: int) -> None:
    """Add the gradient to the velocity and that to what is kept; of the gradient stays what is not finite."""
    velocity, residual = memory.array(VELOCITY), memory.array(RESIDUAL)
    if velocity is None or residual is None:  # of a rank that has closed its plan and gives zeros
        return
    if codec.clip is not None:
        norm, most = torch.linalg.vector_norm(flat), codec.clip / ranks**0.5
        flat.mul_(torch.where(torch.isfinite(norm) & (norm > most), most / norm, 1.0))
    finite = torch.isfinite(flat)
    velocity.copy_(torch.where(finite, codec.momentum * velocity + flat, velocity))
    residual.add_(torch.where(finite, velocity, 0.0))
    flat.masked_fill_(finite, 0.0)


def _low_rank(exchange: Exchange, flat: Tensor, memory: DeviceMemory) -> None:
    """Two plain sums: of what each matrix is on the vectors of the step before, then on these, made orthonormal."""
    codec, residual = exchange.codec, memory.array(RESIDUAL)
    assert isinstance(codec, PowerSGD), f"{codec.summary} has no twin on devices, though it says so"
    host = CodecState(flat.numel())
    host.turn = exchange.turn
    products = [one for one in exchange.matrices if codec.vectors(*one[1:])]
    plain = [one for one in exchange.matrices if not codec.vectors(*one[1:])]
    gradients = {begin: _matrix(flat, begin, rows, cols) for begin, rows, cols in products}
    if residual is not None:
        gradients = {at: one + _matrix(residual, at, *one.shape) for at, one in gradients.items()}
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
    summed = dict(
        zip([one[0] for one in (*products, *plain)], torch.split(first, _sizes(codec, products, plain)), strict=True)
    )
    bases = {begin: torch.linalg.qr(summed[begin].view(rows, -1)).Q for begin, rows, _ in products}
    own = {begin: bases[begin].T @ gradients[begin] for begin, _, _ in products}
    if products:
        second = torch.cat([one.reshape(-1) for one in own.values()])
        exchange.sum(second)
        sums = dict(zip(own, torch.split(second, [one.numel() for one in own.values()]), strict=True))
    for begin, rows, cols in products:
        right = sums[begin].view(-1, cols)
        finite = torch.isfinite(right).all() & torch.isfinite(summed[begin]).all()
        key = codec.key(host, begin, rows, cols)
        memory.vectors[key] = torch.where(finite, right, rights[begin])
        if residual is not None:
            target = _matrix(residual, begin, rows, cols)
            target.copy_(torch.where(finite, gradients[begin] - bases[begin] @ own[begin], target))
        result = torch.where(finite, bases[begin] @ right, torch.nan)
        _matrix(flat, begin, rows, cols).copy_(result)
        rescale_(flat[begin : begin + rows * cols], exchange.scale)
    for begin, rows, cols in plain:
        rescale_(flat[begin : begin + rows * cols].copy_(summed[begin]), exchange.scale)


# By LossyCodec.way.
_WAYS = {"gather": _gather, "two_phase": _two_phase, "sums": _low_rank}
# What a codec's ``prepare`` is here, where it has one.
_PREPARE: dict[type[Codec], Callable[[Any, Tensor, DeviceMemory, int], None]] = {DGC: _add_to_velocity}


def _sent_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device; the host might wait for the stream if it were not page-locked."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _matrix(flat: Tensor, begin: int, rows: int, cols: int) -> Tensor:
    return flat[begin : begin + rows * cols].view(rows, cols)


def _sizes(
    codec: PowerSGD, products: Sequence[tuple[int, int, int]], plain: Sequence[tuple[int, int, int]]
) -> list[int]:
    return [codec.vectors(rows, cols) * rows for _, rows, cols in products] + [rows * cols for _, rows, cols in plain]
