"""Which codecs are switched off, from what all ranks measured."""

from __future__ import annotations

import numpy as np

from hvdkit.compression import CASTS
from hvdkit.engine.memories import Memories
from hvdkit.engine.plan import Slot, lay_out
from hvdkit.engine.schedule import Piece
from hvdkit.engine.weighing import NUMBERS, too_slow


def test_only_what_is_clearly_slower_is_switched_off() -> None:
    costs = np.array(
        [
            *(9_000, 2_000, 10_000, 0),  # as quick as without, within what may be noise
            *(9_500, 2_000, 10_000, 0),
            *(0, 10_000, 10_000, 0),  # saves nothing, costs nothing
            *(50_000, 1, 0, 0),
            *(1_000, 100, 100_000, 0),
            *(50_000, 1, 0, 3),  # still warms up
        ]
    )
    assert too_slow(costs) == {
        1: "encode and decode 9.5 ms + wire 2.0 ms, as it is 10.0 ms",
        3: "encode and decode 50.0 ms + wire 0.0 ms, as it is 0.0 ms",
    }


def test_what_was_not_measured_stays_as_it_is() -> None:
    assert too_slow(np.zeros(2 * NUMBERS, dtype=np.int64)) == {}


def test_what_is_owed_waits_for_a_gradient_that_has_room_for_it() -> None:
    slot = Slot("p", (64,), np.dtype(np.float16))
    memories = Memories([slot], [CASTS["none"]])
    (bucket,) = lay_out([slot], [0], 1 << 20)
    memories.lay_out([bucket])
    owed = np.full(64, 0.25, dtype=np.float32)
    owed[3] = 65000.0
    memories.owe_gradient(0, owed, 1.0, [1.0], 1.0)
    piece = Piece(0, 0, bucket.elements, 0, 1)
    gradient = np.ones(bucket.elements, dtype=np.float16)
    gradient[3] = 65000.0
    gradient[5] = np.inf
    memories.prepare(piece, gradient)
    assert gradient[4] == 1.0, "a gradient that overflowed is skipped, and what were added to it lost"
    gradient[5] = 1.0
    memories.prepare(piece, gradient)
    assert gradient[4] == 1.25
    assert gradient[3] == 65000.0
    gradient[...] = 0
    memories.prepare(piece, gradient)
    assert gradient[4] == 0
    assert gradient[3] == np.float16(65000.0)
