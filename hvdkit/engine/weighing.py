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

# The step, counted from 0, at whose end ranks decide, by so many steps: not by the first, in which memory is touched
# for the first time and thresholds are not known yet. Buckets that warm up then are decided on so many steps later.
WEIGHED_STEP = 5
# What was measured is noisy, and what was asked for stays if in doubt.
CLEARLY_SLOWER = 1.1
# By bucket: microseconds to encode and decode, to send that, to send the gradients as they are, and how many steps are
# left of a warm-up.
NUMBERS = 4

Costs = npt.NDArray[np.int64]


def too_slow(costs: Costs) -> dict[int, str]:
    """The buckets whose codec is to be switched off, by number, and why; ``costs`` has NUMBERS of each bucket.

    Zeros stand for a bucket that is not to be judged; one that warms up on any rank is not judged yet.
    """
    found = {}
    for number, (codec, wire, dense, warming_up) in enumerate(costs.reshape(-1, NUMBERS).tolist()):
        if codec + wire > CLEARLY_SLOWER * dense and not warming_up:
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
        self._due = WEIGHED_STEP
        self._decided: set[tuple[int, ...]] = set()  # by slots of a bucket

    def due(self, step: int, buckets: Sequence[Bucket]) -> bool:
        """Whether ranks decide at the end of this step; the same on all of them."""
        asked = step == self._due and self._engine.settings.compression == "auto" and self._group.size > 1
        # What codecs take on a device is not measured.
        return asked and not self._home.on_device and any(self._to_judge(*one) for one in enumerate(buckets))

    def _to_judge(self, number: int, bucket: Bucket) -> bool:
        codec = self._home.memories.codec(number)
        lossy = isinstance(codec, LossyCodec) and not codec.trains and self._home.memories.encodes(number)
        return lossy and bucket.slots not in self._decided

    def count(self, step: int, bucket: Bucket, piece: Piece, tally: Tally) -> None:
        """An operation on ``piece`` is through. Of several its least seconds count: the others were disturbed."""
        if self._due - WEIGHED_STEP < step <= self._due:
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
            if measured and self._to_judge(number, bucket):
                seconds, sent = (sum(column) for column in zip(*measured, strict=True))
                spent = [1e6 * one for one in (seconds, sent * per_byte, bucket.nbytes * share * per_byte)]
                costs[number] = [*spent, self._home.memories.warmup_left(number)]
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
        warming_up = self._costs.reshape(-1, NUMBERS)[:, -1]
        self._decided |= {bucket.slots for bucket, left in zip(buckets, warming_up, strict=True) if not left}
        self._due += int(warming_up.max()) + 1 + WEIGHED_STEP
        self._measured.clear()
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
