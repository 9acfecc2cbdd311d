"""Whether a codec pays: what it was measured to cost, against what the same gradients would cost as they are.

After a few steps all ranks exchange, by bucket, what they measured, and decide by the largest of it. What the codec
kept is then sent with the next gradients, and the bucket travels as it is from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.choice import AUTO
from hvdkit.collectives.group import Group, Steps
from hvdkit.collectives.hierarchical import sent_share
from hvdkit.compression import CASTS, LossyCodec, Tally
from hvdkit.engine.buckets import Buckets
from hvdkit.engine.plan import Bucket, Slot
from hvdkit.engine.schedule import Piece
from hvdkit.kernels import ReduceOp

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine

logger = logging.getLogger("hvdkit")

# The step, counted from 0 or from the end of a warm-up, at whose end ranks decide. Of the first one nothing is counted:
# memory is touched for the first time, and thresholds are not known yet.
WEIGHED_STEP = 5
# What was measured is noisy, and what was asked for stays if in doubt.
CLEARLY_SLOWER = 1.1
# By bucket: microseconds to encode and decode, to send that, and to send the gradients as they are.
NUMBERS = 3

Costs = npt.NDArray[np.int64]


def too_slow(costs: Costs) -> dict[int, str]:
    """The buckets whose codec is to be switched off, by number, and why; ``costs`` has NUMBERS of each bucket.

    Zeros stand for a bucket that is not to be judged.
    """
    found = {}
    for number, (codec, wire, dense) in enumerate(costs.reshape(-1, NUMBERS).tolist()):
        if codec + wire > CLEARLY_SLOWER * dense:
            found[number] = (
                f"encode and decode {codec * 1e-3:.1f} ms + wire {wire * 1e-3:.1f} ms, as it is {dense * 1e-3:.1f} ms"
            )
    return found


class Weighing:
    """What the codecs of a lane cost on this rank, and what all ranks make of it."""

    def __init__(self, engine: Engine, group: Group, home: Buckets) -> None:
        self._engine, self._group, self._home = engine, group, home
        self._measured: dict[tuple[tuple[int, ...], int], tuple[float, float]] = {}  # by slots of a bucket, and piece
        self._costs: Costs = np.zeros(0, dtype=np.int64)
        self._after = 0  # the steps of the longest warm-up

    def due(self, step: int, buckets: int) -> bool:
        """Whether ranks decide at the end of this step; the same on all of them."""
        # What codecs take on a device is not measured.
        if self._engine.settings.compression != "auto" or self._group.size == 1 or self._home.on_device:
            return False
        judged = [codec for codec in map(self._judged, range(buckets)) if codec is not None]
        self._after = max((codec.warmup_steps for codec in judged), default=0)
        return bool(judged) and step == self._after + WEIGHED_STEP

    def _judged(self, bucket: int) -> LossyCodec | None:
        """The codec of a bucket, if it may be switched off."""
        codec = self._home.memories.codec(bucket)
        lossy = isinstance(codec, LossyCodec) and self._home.memories.encodes(bucket) and not codec.trains
        return codec if lossy and isinstance(codec, LossyCodec) else None

    def count(self, step: int, bucket: Bucket, piece: Piece, tally: Tally) -> None:
        """An operation on ``piece`` is through. Of several its least seconds count: the others were disturbed."""
        if 0 < step - self._after <= WEIGHED_STEP:
            key = (bucket.slots, piece.begin)
            seconds, sent = tally.encode_seconds + tally.decode_seconds, tally.bytes_after
            before = self._measured.get(key, (seconds, sent))
            self._measured[key] = min(seconds, before[0]), min(sent, before[1])

    def exchange(self, buckets: Sequence[Bucket], tag: int) -> Steps[None]:
        """The steps after which all ranks know what each codec costs where that is most."""
        share = 2 * sent_share(self._group.size, self._home.layout)
        per_byte = self._seconds_per_byte()
        costs = np.zeros((len(buckets), NUMBERS), dtype=np.int64)
        for number, bucket in enumerate(buckets):
            measured = [one for (slots, _), one in self._measured.items() if slots == bucket.slots]
            if measured and self._judged(number) is not None:
                seconds, sent = (sum(column) for column in zip(*measured, strict=True))
                costs[number] = [1e6 * one for one in (seconds, sent * per_byte, bucket.nbytes * share * per_byte)]
        self._costs = costs.reshape(-1)
        yield from allreduce(self._group, self._costs, ReduceOp.MAX, 1.0, CASTS["none"], tag, AUTO)

    def _seconds_per_byte(self) -> float:
        """Of a host's wire, which the ranks that send from there share, if there are several hosts."""
        nodes, layout, per_byte = self._engine.topology.nodes, self._home.layout, self._engine.network.seconds_per_byte
        if len(nodes) == 1:
            return per_byte
        node = next(node for node in nodes if self._engine.transport.rank in node)
        return per_byte * (len(set(node) & set(self._group.members)) if layout is None else layout.carriers)

    def act(self, name: str, slots: Sequence[Slot], buckets: Sequence[Bucket]) -> None:
        """From the next step on the buckets whose codec is too slow travel as they are."""
        reasons = too_slow(self._costs)
        self._home.switch_off(reasons)
        if reasons and self._group.rank == 0:
            first, reason = next(iter(reasons.items()))
            logger.warning(
                "optimizer '%s': %d parameters are no longer compressed, since that is slower here (%s, '%s': %s).\n"
                "HINT: HVDKIT_COMPRESSION=always compresses them all the same.",
                name, sum(len(buckets[number].slots) for number in reasons),
                self._home.memories.asked_codec(first).told, slots[buckets[first].slots[0]].name, reason,
            )  # fmt: skip

    def told(self, bucket: int) -> dict[str, Any]:
        """For the timeline: why a bucket's codec is switched off, if it is."""
        reason = self._home.memories.switched_off(bucket)
        return {"switched_off": f"{self._home.memories.asked_codec(bucket).told}: {reason}"} if reason else {}
