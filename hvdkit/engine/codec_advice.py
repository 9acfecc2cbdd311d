"""What an optimizer's codecs were measured to take and to save, said once: it changes nothing.

How quick the wire is for whole steps of dense gradients is not known while a codec is used: a probe, or the few bytes
that are sent, may be carried at another rate (a token bucket lets bursts through). So the advice says below which rate
the codecs pay, and leaves it to people to know their wire.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from hvdkit.collectives.group import Group
from hvdkit.compression import Codec, Tally
from hvdkit.engine.buckets import Buckets

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine

logger = logging.getLogger("hvdkit")

# The steps that are measured, after some in which memory is touched for the first time and caches fill, and after a
# warm-up, in which more is sent.
SETTLING_STEPS, MEASURED_STEPS = 10, 20
# The part of a step below which nobody need think about a codec.
LITTLE = 0.02


@dataclass(frozen=True)
class Measured:
    """One rank's average step."""

    step_seconds: float
    waited_seconds: float  # in which the training thread waited for communication, or encoded meanwhile
    codec: Tally  # of all of an optimizer's codecs


def advice(measured: Measured) -> tuple[bool, str]:
    """Whether the codecs are worth a thought, and why, in words."""
    before, after = measured.codec.bytes_before, measured.codec.bytes_after
    seconds = measured.codec.encode_seconds + measured.codec.decode_seconds
    found = (
        f"took {seconds * 1e3:.1f} ms of a step of {measured.step_seconds * 1e3:.1f} ms and sent {_bytes(after)} "
        f"instead of {_bytes(before)}, while training waited {measured.waited_seconds * 1e3:.1f} ms: "
    )
    if after >= before:
        return True, found + "that saves nothing"
    if seconds < LITTLE * measured.step_seconds:
        return False, found + "that costs little"
    bits = 8 * (before - after) / seconds
    rate = f"{bits * 1e-9:.3g} Gb/s" if bits >= 1e9 else f"{bits * 1e-6:.3g} Mb/s"
    return True, found + f"that pays where the rank can send less than about {rate}"


def _bytes(number: float) -> str:
    return f"{number * 1e-6:.3g} MB" if number >= 1e6 else f"{number * 1e-3:.3g} KB"


class CodecAdvice:
    """Measures some steps of a lane on the first of its ranks, and says once what came of it."""

    def __init__(self, engine: Engine, name: str, group: Group, home: Buckets, codecs: Sequence[Codec]) -> None:
        self._engine, self._name, self._home = engine, name, home
        lossy = [codec for codec in codecs if codec.encodes]
        self._codecs = ", ".join(sorted({codec.name for codec in lossy}))
        # What codecs take on a device is not measured.
        asked = engine.settings.compression == "auto" and group.rank == 0 and group.size > 1 and not home.on_device
        self._wanted = asked and bool(lossy)
        self._settling = SETTLING_STEPS + max((codec.warmup_steps for codec in lossy), default=0)
        self._times: list[tuple[float, float]] = []  # at the ends of steps: the clock, and what was waited so far
        self._before = Tally()

    def step_over(self) -> None:
        """A step is over on the training thread; what it reduced is counted."""
        if not self._wanted:
            return
        if self._settling > 0:
            self._settling -= 1
            return
        if not self._times:
            self._before = self._home.memories.total()
        self._times.append((perf_counter(), self._engine.communication_statistics().seconds))
        if len(self._times) > MEASURED_STEPS:
            self._wanted = False
            self._say()

    def _say(self) -> None:
        difference = self._home.memories.total()
        difference.add(self._before, -1.0)
        if not difference.bytes_before:  # nothing is encoded on this rank
            return
        codec = Tally()
        codec.add(difference, 1 / MEASURED_STEPS)
        # Between two steps of many somebody evaluates the model, or saves it.
        step, waited = (
            median(after - before for before, after in pairwise(column)) for column in zip(*self._times, strict=True)
        )
        thought, reason = advice(Measured(step, waited, codec))
        logger.log(
            logging.WARNING if thought else logging.INFO,
            "optimizer '%s', %d steps: compression (%s) on %s %s; nothing was changed, and "
            "HVDKIT_COMPRESSION=always leaves this line out",
            self._name, MEASURED_STEPS, self._codecs, self._engine.told(), reason,
        )  # fmt: skip
