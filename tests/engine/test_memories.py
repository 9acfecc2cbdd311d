"""What codecs keep of a lane's gradients, and what is owed to the next ones."""

from __future__ import annotations

import numpy as np

from hvdkit.compression import CASTS
from hvdkit.engine.memories import Memories
from hvdkit.engine.plan import Slot, lay_out
from hvdkit.engine.schedule import Piece


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
    memories.pay(piece, [(0, gradient)])
    assert gradient[4] == 1.0, "a gradient that overflowed is skipped, and what were added to it lost"
    gradient[5] = 1.0
    memories.pay(piece, [(0, gradient)])
    assert gradient[4] == 1.25
    assert gradient[3] == 65000.0
    gradient[...] = 0
    memories.pay(piece, [(0, gradient)])
    assert gradient[4] == 0
    assert gradient[3] == np.float16(65000.0)
