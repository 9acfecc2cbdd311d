"""Which codecs are switched off, from what all ranks measured."""

from __future__ import annotations

import numpy as np

from hvdkit.engine.weighing import too_slow


def test_only_what_is_clearly_slower_is_switched_off() -> None:
    costs = np.array(
        [
            *(9_000, 2_000, 10_000),  # as quick as without, within what may be noise
            *(9_500, 2_000, 10_000),
            *(0, 10_000, 10_000),  # saves nothing, costs nothing
            *(50_000, 1, 0),
            *(1_000, 100, 100_000),
        ]
    )
    assert too_slow(costs) == {
        1: "encode and decode 9.5 ms + wire 2.0 ms, as it is 10.0 ms",
        3: "encode and decode 50.0 ms + wire 0.0 ms, as it is 0.0 ms",
    }


def test_what_was_not_measured_stays_as_it_is() -> None:
    assert too_slow(np.zeros(6, dtype=np.int64)) == {}
