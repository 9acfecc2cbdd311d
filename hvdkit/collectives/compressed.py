"""Allreduce with codecs: payloads travel, sums are in float32, and all ranks decode the same bytes.

A lossy codec chooses one of three ways. ``two_phase``: chunk p of each rank goes to rank p, its owner, which sums,
encodes the sum and sends it to all. ``gather``: the payload of all elements goes from each rank to each. ``sums``:
plain sums of vectors that stand for the elements.

With error feedback each rank keeps what it did not send to an element's owner, and the owner what it did not send on
(Tang et al., 2019, "DoubleSqueeze: parallel stochastic gradient descent with double-pass error-compensated
compression"). The result plus all residuals is the sum of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, cast

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.exchange import scale_in_place
from hvdkit.collectives.group import Array, Group, Runs, Steps, partition, two_phase_bytes
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS, Cast, Codec, CodecState, LossyCodec, PayloadCodec, PowerSGD, Tally, frames
from hvdkit.compression.codec import converted
from hvdkit.compression.state import TURN
from hvdkit.errors import PayloadError
from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.base import Bytes, Transfer


def allreduce_encoded(
    group: Group, flat: Array, op: ReduceOp, scale: Scale, codec: Codec, tag: int, state: CodecState | None
) -> Steps[None]:
    """Replace ``flat`` by ``scale * (op over all ranks)``, by the algorithm of the codec.

    Uses ``tag`` and ``tag + 1``, lossy codecs four tags. Lossy codecs need SUM, and the state of these elements if they
    keep anything; they convert other floating types to float32 and back. On one rank nothing is encoded. Raises
    PayloadError where a payload does not arrive as it was sent.
    """
    if codec.encodes:
        assert op == ReduceOp.SUM, op
        return _allreduce_lossy(group, flat, scale, cast("LossyCodec", codec), tag, state)
    return _allreduce_cast(group, flat, op, scale, cast("Cast", codec), tag, state)


def _allreduce_cast(
    group: Group, flat: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int, state: CodecState | None
) -> Steps[None]:
    if state is None or not codec.room_bytes(flat) or group.size == 1:
        yield from allreduce(group, flat, op, scale, codec, tag)
        return
    with _counted(group, two_phase_bytes(flat.nbytes, group.size), state.tally) as wire:
        yield from allreduce(wire, flat, op, scale, codec, tag)


@contextmanager
def _counted(group: Group, nbytes: float, tally: Tally) -> Iterator[Group]:
    """Yield a group that counts the bytes of one operation, which would send ``nbytes`` bytes without a codec."""
    wire = Group(group.transport, group.members, group.choice)
    yield wire
    tally.bytes_before += nbytes
    tally.bytes_after += wire.bytes_sent
    group.bytes_sent += wire.bytes_sent


def _allreduce_lossy(
    group: Group, flat: Array, scale: Scale, codec: LossyCodec, tag: int, state: CodecState | None
) -> Steps[None]:
    if group.size == 1 or not flat.size:
        scale_in_place(flat, scale)
        return
    state = state or CodecState(flat.size)
    values = flat if flat.dtype == np.float32 else converted(flat, np.float32)
    state.turn, state.salt = int(state.recall(TURN) or state.turn), 2 * group.rank
    started = perf_counter()
    codec.prepare(values, state, group.size)
    state.tally.encode_seconds += perf_counter() - started
    way, _ = codec.way(flat.size, group.size)
    with _counted(group, two_phase_bytes(flat.nbytes, group.size), state.tally) as wire:
        yield from _WAYS[way](wire, values, scale, codec, tag, state)
    if values is not flat:
        kernels.convert_into(flat, values)
    state.keep(TURN, state.turn + 1)


def _two_phase(
    group: Group, values: Array, scale: Scale, codec: PayloadCodec, tag: int, state: CodecState
) -> Steps[None]:
    me, bounds = group.rank, partition(values.size, group.size, values.itemsize)
    chunks = [values[begin:end] for begin, end in bounds]
    wire = _Wire(group, codec, state)
    yield from _sum_own(wire, values, bounds, tag, state)
    own, sends, sums = chunks[me], [], {}
    if own.size:
        of_sum = state.part(*bounds[me])
        of_sum.salt += 1
        sums[me] = wire.encode(own, of_sum)
        sends = wire.send(sums[me], own.size, group.peers, tag + 2)
    incoming = yield from wire.receive({peer: chunks[peer].size for peer in group.peers}, sends, tag + 2)
    for peer, frame in {**sums, **incoming}.items():
        wire.decode(peer, frame, chunks[peer], scale, False)
    wire.give_back()


def _sum_own(wire: _Wire, values: Array, bounds: Runs, tag: int, state: CodecState) -> Steps[None]:
    """Send each rank its chunk, and add the others' payloads to this rank's own chunk, in rank order."""
    sends, group = [], wire.group
    for peer in group.peers:
        begin, end = bounds[peer]
        if begin < end:
            sends += wire.send(wire.encode(values[begin:end], state.part(begin, end)), end - begin, [peer], tag)
    own = values[slice(*bounds[group.rank])]
    incoming = yield from wire.receive(dict.fromkeys(group.peers, own.size), sends, tag)
    for peer in sorted(incoming):
        wire.decode(peer, incoming[peer], own, ONE, True)
    wire.give_back()


def compressed_reduce_scatter(
    group: Group, flat: Array, bounds: Runs, scale: Scale, codec: PayloadCodec, tag: int, state: CodecState
) -> Steps[Array]:
    """Return this rank's part of ``scale`` times the sum of ``flat``, in float32. Uses ``tag`` and ``tag + 1``.

    The first of two phases: each rank's own part is added as it is, and no residual is kept.
    """
    values = flat if flat.dtype == np.float32 else converted(flat, np.float32)
    state.salt = 2 * group.rank
    if group.size > 1:
        with _counted(group, two_phase_bytes(flat.nbytes, group.size) / 2, state.tally) as wire:
            yield from _sum_own(_Wire(wire, codec, state), values, bounds, tag, state)
    own = values[slice(*bounds[group.rank])]
    scale_in_place(own, scale)
    return own


def reduce_scatter_encoded(
    group: Group, source: Array, target: Array, scale: Scale, codec: PayloadCodec, state: CodecState, tag: int
) -> Steps[None]:
    """Replace ``target`` by this rank's part, of equal parts, of ``scale`` times the sum of ``source``."""
    each, values = target.size, source.astype(np.float32)
    bounds = [(rank * each, (rank + 1) * each) for rank in range(group.size)]
    total = yield from compressed_reduce_scatter(group, values, bounds, scale, codec, tag, state)
    state.turn += 1
    kernels.convert_into(target, total)


def _gather(group: Group, values: Array, scale: Scale, codec: PayloadCodec, tag: int, state: CodecState) -> Steps[None]:
    wire = _Wire(group, codec, state)
    own = wire.encode(values, state)
    sends = wire.send(own, values.size, group.peers, tag)
    incoming = yield from wire.receive(dict.fromkeys(group.peers, values.size), sends, tag)
    incoming[group.rank] = own
    wire.decode_sum([incoming[peer] for peer in range(group.size)], values, scale)
    wire.give_back()


def _sums(group: Group, values: Array, scale: Scale, codec: PowerSGD, tag: int, state: CodecState) -> Steps[None]:
    vectors, tally = codec.sums(values, scale, state), state.tally
    while True:
        started = perf_counter()
        vector = next(vectors, None)
        seconds = perf_counter() - started
        if vector is None:
            tally.decode_seconds += seconds
            return
        tally.encode_seconds += seconds
        yield from allreduce(group, vector, ReduceOp.SUM, ONE, CASTS["none"], tag)
        tag += 2


_Way = Callable[[Group, Array, Scale, Any, int, CodecState], Steps[None]]
_WAYS: dict[str, _Way] = {"two_phase": _two_phase, "gather": _gather, "sums": _sums}  # by LossyCodec.way


class _Wire:
    """Exchange of frames in scratch memory. Of a frame of variable length, bytes that all ranks know travel first."""

    def __init__(self, group: Group, codec: PayloadCodec, state: CodecState) -> None:
        self.group, self._codec, self._tally = group, codec, state.tally
        self._identity = frames.identity(codec.summary)
        self._scratch: list[Bytes] = []
        self._rests: list[Transfer] = []  # of frames that were sent

    def _room(self, nbytes: int) -> Bytes:
        scratch = SCRATCH.take(nbytes)
        self._scratch.append(scratch)
        return scratch[:nbytes]

    def _most(self, elements: int) -> int:
        return frames.HEADER_BYTES + self._codec.most_bytes(elements)

    def _first(self, elements: int) -> int:
        """Return the bytes of a frame that travel first."""
        usual = self._codec.most_bytes(elements) if self._codec.fixed else self._codec.usual_bytes(elements)
        return min(self._most(elements), frames.HEADER_BYTES + usual)

    def give_back(self) -> None:
        """Give back the memory of all frames."""
        while self._scratch:
            SCRATCH.give_back(self._scratch.pop())

    def encode(self, values: Array, state: CodecState) -> Bytes:
        """Return the frame of some values plus their residual, in memory for the largest frame."""
        started = perf_counter()
        frame = self._room(self._most(values.size))
        nbytes = self._codec.encode_into(frame[frames.HEADER_BYTES :], values, state)
        frames.seal(frame, nbytes, values.size, self._identity)
        self._tally.encode_seconds += perf_counter() - started
        return frame

    def decode(self, sender: int, frame: Bytes, out: Array, scale: Scale, add: bool) -> None:
        """Check a frame and decode it into ``out``, or add it, with scale ONE. Raises PayloadError."""
        started = perf_counter()
        self._decode(sender, self._unseal(sender, frame, out.size), out, scale, add)
        self._tally.decode_seconds += perf_counter() - started

    def decode_sum(self, frames_of: Sequence[Bytes], out: Array, scale: Scale) -> None:
        """Compute ``scale`` times the sum of the frames of all ranks. Raises PayloadError."""
        started = perf_counter()
        payloads = [self._unseal(sender, frame, out.size) for sender, frame in enumerate(frames_of)]
        with kernels.DefaultFloats():
            is_done = self._codec.decode_sum_into(payloads, out, scale)
        if not is_done:
            for sender, payload in enumerate(payloads):
                self._decode(sender, payload, out, ONE, sender > 0)
            scale_in_place(out, scale)
        self._tally.decode_seconds += perf_counter() - started

    def _unseal(self, sender: int, frame: Bytes, elements: int) -> Bytes:
        rank = self.group.members[sender]
        return frames.unseal(frame[: frames.nbytes_of(frame, rank)], elements, self._identity, rank)

    def _decode(self, sender: int, payload: Bytes, out: Array, scale: Scale, add: bool) -> None:
        factor = scale.as_factor()
        try:
            with kernels.DefaultFloats():  # all ranks decode the same payloads
                self._codec.decode_into(payload, out, 1.0 if factor is None else factor, add)
        except ValueError as error:
            raise PayloadError(self.group.members[sender], str(error)) from error
        if factor is None:
            kernels.scale_into(out, out, scale)

    def send(self, frame: Bytes, elements: int, peers: Sequence[int], tag: int) -> list[Transfer]:
        """Send a frame of ``elements`` elements to some ranks. Uses ``tag`` and ``tag + 1``."""
        first, nbytes = self._first(elements), frames.nbytes_of(frame, self.group.members[self.group.rank])
        if nbytes > first:
            self._rests += [self.group.isend(frame[first:nbytes], peer, tag + 1) for peer in peers]
        return [self.group.isend(frame[:first], peer, tag) for peer in peers]

    def receive(self, elements: dict[int, int], sends: list[Transfer], tag: int) -> Steps[dict[int, Bytes]]:
        """Return a frame from each rank that has elements to send, after all sends have ended."""
        group, late, rests = self.group, [], self._rests
        incoming = {peer: self._room(self._first(count)) for peer, count in elements.items() if count}
        yield [*(group.irecv(frame, peer, tag) for peer, frame in incoming.items()), *sends]
        for peer, first in incoming.items():
            nbytes, most = frames.nbytes_of(first, group.members[peer]), self._most(elements[peer])
            if not frames.HEADER_BYTES <= nbytes <= most:
                problem = f"by its header it has {nbytes} bytes, but only {frames.HEADER_BYTES} to {most} are possible"
                raise PayloadError(group.members[peer], problem)
            if nbytes > first.nbytes:
                incoming[peer] = whole = self._room(nbytes)
                whole[: first.nbytes] = first
                late.append(group.irecv(whole[first.nbytes :], peer, tag + 1))
        self._rests = []
        if late or rests:
            yield [*late, *rests]
        return incoming
