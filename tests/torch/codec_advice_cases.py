"""A codec that was asked for is used in every step, whatever it costs, and what it costs is said once."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdkit.engine import runtime
from hvdkit.engine.codec_advice import MEASURED_STEPS, SETTLING_STEPS
from tests.torch.compression_cases import EverySecond, compress, make, mean_gradient, take_steps
from tests.torch.optimizer_support import assert_close, assert_identical

STEPS = SETTLING_STEPS + MEASURED_STEPS + 1
SAID = re.compile(
    r"optimizer '.*', 20 steps: compression \((.*)\) on rank 0 \(.*\) took [\d.]+ ms of a step of [\d.]+ ms and sent "
    r"([\d.]+) KB instead of ([\d.]+) KB, while training waited [\d.]+ ms: that (costs little|pays where .* [GM]b/s); "
)


@dataclass(frozen=True)
class Costly(EverySecond):
    """Sorts many numbers for each value that it saves: no wire is slow enough for that."""

    name: ClassVar[str] = "costly"

    def encode(self, values: np.ndarray) -> np.ndarray:
        np.sort(np.resize(values, 200_000))
        return super().encode(values)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What hvdkit logs, whatever the level."""
    logger, said = logging.getLogger("hvdkit"), []
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def advised(hvd: Any) -> bool:
    """Whether this rank is the one that speaks."""
    return hvd.rank() == 0 and hvd.size() > 1 and runtime.engine().settings.compression == "auto"


def case_a_codec_that_costs_much_is_used_in_every_step(hvd: Any) -> None:
    runs = []
    for _ in range(2):
        net, optimizer = make(hvd, Costly(compress=compress(hvd)))
        before, encoded = 0, []
        for _ in range(STEPS):
            take_steps(net, optimizer, 1)
            after = sum(one.bytes_after for one in hvd.compression_stats().by_parameter.values())
            encoded.append(after - before)
            before = after
        assert any(hvd.allgather_object(encoded[0])), "nothing is encoded"
        assert encoded == [encoded[0]] * STEPS, encoded
        assert_identical(hvd, net)
        runs.append([parameter.detach().numpy().tobytes() for parameter in net.parameters()])
        hvd.barrier()
        del net, optimizer
    assert runs[0] == runs[1], "another run gave other bits"


def case_what_a_codec_took_and_saved_is_said_once_on_rank_0(hvd: Any) -> None:
    with heard() as said:
        net, optimizer = make(hvd, {"large": Costly(compress=compress(hvd)), "wide": hvd.Compression.int8()})
        take_steps(net, optimizer, STEPS - 1)
        assert not said, "said before it was measured"
        start = hvd.compression_stats().by_parameter.values()
        take_steps(net, optimizer, STEPS)
    if not advised(hvd):
        assert not said, said
        return
    (line,) = said
    found = SAID.match(line)
    assert found is not None, line
    assert found[1] == "costly, int8", line
    for number, place in ((2, "bytes_after"), (3, "bytes_before")):
        per_step = sum(getattr(one, place) for one in start) / (STEPS - 1)
        assert abs(float(found[number]) * 1e3 - per_step) < 0.01 * per_step, (line, per_step)


def case_a_warm_up_is_waited_for(hvd: Any) -> None:
    with heard() as said:
        net, optimizer = make(hvd, hvd.Compression.topk(0.05, compress=compress(hvd), warmup_epochs=5))
        take_steps(net, optimizer, STEPS + 4)
        assert not said
        take_steps(net, optimizer, 1)
    assert len(said) == advised(hvd), said


def case_of_what_is_not_encoded_nothing_is_said(hvd: Any) -> None:
    alone = hvd.local_size() == hvd.size()  # the ranks of one node sum as they are
    for codec in (hvd.Compression.none, hvd.Compression.fp16, *((hvd.Compression.int8,) if alone else ())):
        with heard() as said:
            net, optimizer = make(hvd, codec)
            take_steps(net, optimizer, STEPS)
            assert_close(-net.bias.detach(), STEPS * mean_gradient(hvd, "bias"), 0.01)
        assert not said, said
