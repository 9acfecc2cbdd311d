"""Codecs that cost more than they save are switched off after a few steps, on all ranks and with nothing lost."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from hvdkit.compression import Memory
from hvdkit.engine.weighing import WEIGHED_STEP
from tests.torch.compression_cases import EverySecond, check_nothing_lost, compress, make, owed, take_steps
from tests.torch.optimizer_support import assert_identical

# By far more than gradients of some kilobytes take on any wire, so that what is decided does not depend on the machine.
SLOW_SECONDS = 0.1
WARMUP_STEPS = 8


@dataclass(frozen=True)
class Slow(EverySecond):
    """Takes its time, if not on one rank only."""

    name: ClassVar[str] = "slow"

    on_rank: str = "any"

    def encode(self, values: np.ndarray) -> np.ndarray:
        if self.on_rank in ("any", os.environ.get("RANK_OF_TEST")):
            time.sleep(SLOW_SECONDS)
        return super().encode(values)


@dataclass(frozen=True)
class Always(Slow):
    """Must not be switched off, since training changes without it."""

    name: ClassVar[str] = "always"
    trains: ClassVar[bool] = True


@dataclass(frozen=True)
class WarmingUp(EverySecond):
    """Slow as long as it warms up."""

    name: ClassVar[str] = "warming up"

    @property
    def warmup_steps(self) -> int:
        return WARMUP_STEPS

    def encode_into(self, payload: np.ndarray, values: np.ndarray, memory: Memory) -> int:
        if memory.turn < WARMUP_STEPS:
            time.sleep(SLOW_SECONDS)
        return super().encode_into(payload, values, memory)


def milliseconds(reason: str) -> float:
    """What a codec took, of the reason why it is off."""
    found = re.match(r"encode and decode ([\d.]+) ms", reason)
    assert found is not None, reason
    return float(found.group(1))


def stats_of(hvd: Any, name: str) -> Any:
    return hvd.compression_stats().by_parameter[name]


def case_a_slow_codec_is_switched_off_and_nothing_is_lost(hvd: Any) -> None:
    net, optimizer = make(hvd, Slow(compress=compress(hvd)))
    take_steps(net, optimizer, WEIGHED_STEP)
    before = stats_of(hvd, "large")
    assert not before.switched_off
    check_nothing_lost(hvd, net, optimizer, WEIGHED_STEP)
    take_steps(net, optimizer, 1)
    check_nothing_lost(hvd, net, optimizer, WEIGHED_STEP + 1)
    decided = stats_of(hvd, "large")
    assert "encode and decode" in decided.switched_off, decided
    assert "off for 2 of 2 parameters" in str(hvd.compression_stats()), str(hvd.compression_stats())
    assert decided.residual_norm == 0
    take_steps(net, optimizer, 3)
    after = stats_of(hvd, "large")
    assert (after.bytes_after, after.encode_seconds) == (decided.bytes_after, decided.encode_seconds)
    check_nothing_lost(hvd, net, optimizer, WEIGHED_STEP + 4)
    assert not any(one.any() for one in owed(hvd, optimizer)), "what was kept did not go with the first dense step"
    assert_identical(hvd, net)


def case_one_slow_rank_is_enough(hvd: Any) -> None:
    os.environ["RANK_OF_TEST"] = str(hvd.rank())
    net, optimizer = make(hvd, Slow(on_rank="0", compress=compress(hvd)))
    take_steps(net, optimizer, WEIGHED_STEP + 3)
    assert stats_of(hvd, "large").switched_off
    check_nothing_lost(hvd, net, optimizer, WEIGHED_STEP + 3)


def case_a_codec_that_warms_up_is_judged_afterwards(hvd: Any) -> None:
    net, optimizer = make(hvd, {"large": WarmingUp(compress=compress(hvd)), "wide": Slow(compress=compress(hvd))})
    steps = WARMUP_STEPS + WEIGHED_STEP
    take_steps(net, optimizer, steps)
    assert stats_of(hvd, "wide").switched_off, "one that does not warm up was not decided on before"
    assert not stats_of(hvd, "large").switched_off
    take_steps(net, optimizer, 1)
    # So small gradients never pay; what counts is what it took after the warm-up.
    assert milliseconds(stats_of(hvd, "large").switched_off) < 1e3 * SLOW_SECONDS
    check_nothing_lost(hvd, net, optimizer, steps + 1)


def case_a_warm_up_that_begins_again_is_waited_for_again(hvd: Any) -> None:
    net, optimizer = make(hvd, WarmingUp(compress=compress(hvd)))
    take_steps(net, optimizer, WARMUP_STEPS)
    optimizer.synchronize()
    optimizer.reset_compression()
    take_steps(net, optimizer, WEIGHED_STEP + 1)
    assert not stats_of(hvd, "large").switched_off
    take_steps(net, optimizer, WARMUP_STEPS)
    assert milliseconds(stats_of(hvd, "large").switched_off) < 1e3 * SLOW_SECONDS


def case_a_rank_that_saved_nothing_does_not_warm_up_again(hvd: Any) -> None:
    net, optimizer = make(hvd, WarmingUp(compress=compress(hvd)))
    take_steps(net, optimizer, WARMUP_STEPS)
    optimizer.synchronize()
    saved = hvd.broadcast_object(optimizer.state_dict())  # of rank 0 alone
    net, optimizer = make(hvd, WarmingUp(compress=compress(hvd)))
    optimizer.load_state_dict(saved)
    take_steps(net, optimizer, WEIGHED_STEP + 1)
    assert milliseconds(stats_of(hvd, "large").switched_off) < 1e3 * SLOW_SECONDS


def case_buckets_are_judged_one_by_one(hvd: Any) -> None:
    where = compress(hvd)
    policy = {"large": Slow(compress=where), "wide": Always(compress=where)}
    net, optimizer = make(hvd, policy)
    take_steps(net, optimizer, WEIGHED_STEP + 2)
    assert stats_of(hvd, "large").switched_off
    assert not stats_of(hvd, "wide").switched_off
    check_nothing_lost(hvd, net, optimizer, WEIGHED_STEP + 2)


def case_a_checkpoint_from_before_is_taken_after(hvd: Any) -> None:
    net, optimizer = make(hvd, Slow(compress=compress(hvd)))
    take_steps(net, optimizer, 3)
    optimizer.synchronize()
    saved, weights = optimizer.state_dict(), {name: one.detach().clone() for name, one in net.named_parameters()}
    take_steps(net, optimizer, WEIGHED_STEP)
    assert stats_of(hvd, "large").switched_off
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(weights[name])
    take_steps(net, optimizer, 2)
    check_nothing_lost(hvd, net, optimizer, 5)


def case_a_rank_that_has_joined_decides_alike(hvd: Any) -> None:
    net, optimizer = make(hvd, Slow(compress=compress(hvd)))
    take_steps(net, optimizer, WEIGHED_STEP + 3 if hvd.rank() else WEIGHED_STEP - 2)
    hvd.join()
    # The step that rank 0 does not take with the others any more would wait for ever if ranks had decided differently.
    take_steps(net, optimizer, 1)
    assert stats_of(hvd, "large").switched_off


def case_the_reason_is_told(hvd: Any) -> None:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdkit").addHandler(handler)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        hvd.start_timeline(str(path))
        net, optimizer = make(hvd, Slow(compress=compress(hvd)))
        take_steps(net, optimizer, WEIGHED_STEP + 2)
        hvd.stop_timeline()
        if hvd.rank() == 0:
            (warning,) = warnings
            assert "2 parameters are no longer compressed" in warning, warning
            assert "HINT: HVDKIT_COMPRESSION=always" in warning, warning
            events = json.loads(path.read_text())
            reasons = [event["args"]["switched_off"] for event in events if "switched_off" in event.get("args", {})]
            assert reasons, "the timeline does not say that the codec is off"
            assert all(reason.startswith("slow(") and "encode and decode" in reason for reason in reasons), reasons
        else:
            assert not warnings
