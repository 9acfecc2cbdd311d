"""What is said of a codec, from what one rank measured."""

from __future__ import annotations

from hvdkit.compression import Tally
from hvdkit.engine.codec_advice import Measured, advice


def measured(before: float, after: float, encode: float, decode: float, step: float = 0.4) -> Measured:
    return Measured(step, 0.035, Tally(before, after, encode, decode))


def test_the_rate_at_which_a_codec_stops_to_pay_is_that_of_the_bytes_it_saves() -> None:
    thought, reason = advice(measured(82e6, 2e6, 0.03, 0.01))
    assert thought
    assert reason == (
        "took 40.0 ms of a step of 400.0 ms and sent 2 MB instead of 82 MB, while training waited 35.0 ms: "
        "that pays where the rank can send less than about 16 Gb/s"
    )


def test_a_codec_that_saves_nothing_is_told_of_even_if_it_costs_nothing() -> None:
    thought, reason = advice(measured(10e3, 12e3, 0.0, 0.0))
    assert thought
    assert reason.endswith("sent 12 KB instead of 10 KB, while training waited 35.0 ms: that saves nothing")


def test_a_codec_that_costs_little_is_worth_no_thought() -> None:
    thought, reason = advice(measured(82e6, 20e6, 0.002, 0.001))
    assert not thought
    assert reason.endswith("that costs little")


def test_no_seconds_at_all_are_little() -> None:
    assert advice(measured(82e6, 20e6, 0.0, 0.0))[1].endswith("that costs little")
