"""What codecs keep of a lane's gradients, and what is owed to the next ones."""

from __future__ import annotations

import numpy as np
import pytest

from hvdkit.compression import CASTS, DGC, TopK
from hvdkit.compression.dgc import VELOCITY
from hvdkit.compression.state import OWED, RESIDUAL, CodecState
from hvdkit.engine.steps.plan import Slot, lay_out
from hvdkit.engine.steps.residuals import Residuals
from hvdkit.engine.steps.schedule import Piece


def test_what_is_owed_waits_for_a_gradient_that_has_room_for_it():
    slot = Slot("p", (64,), np.dtype(np.float16))
    residuals = Residuals([slot], [CASTS["none"]])
    (bucket,) = lay_out([slot], [0], 1 << 20)
    residuals.lay_out([bucket])
    owed = np.full(64, 0.25, dtype=np.float32)
    owed[3] = 65000.0
    residuals.owe(0, owed, 1.0)
    piece = Piece(0, 0, bucket.elements, 0, 1)
    gradient = np.ones(bucket.elements, dtype=np.float16)
    gradient[3] = 65000.0
    gradient[5] = np.inf
    residuals.pay(piece, [(0, gradient)])
    assert gradient[4] == 1.0, "a gradient that overflowed is skipped, and what were added to it lost"
    gradient[5] = 1.0
    residuals.pay(piece, [(0, gradient)])
    assert gradient[4] == 1.25
    assert gradient[3] == 65000.0
    gradient[...] = 0
    residuals.pay(piece, [(0, gradient)])
    assert gradient[4] == 0
    assert gradient[3] == np.float16(65000.0)


SLOTS = [Slot("p", (40,), np.dtype(np.float32)), Slot("q", (9,), np.dtype(np.float32))]
KEYS = ["p", "q"]
UNITS = [{RESIDUAL: 0.5, OWED: 0.25}] * 2


def made() -> Residuals:
    """With a bucket for each slot."""
    residuals = Residuals(SLOTS, [TopK(0.1)])
    residuals.lay_out(lay_out(SLOTS, [0, 1], 1))
    return residuals


def test_buckets_that_are_laid_out_anew_keep_what_is_owed_and_kept_of_each_tensor():
    residuals = made()
    residuals.of_slot(0)[RESIDUAL][...] = np.arange(40)
    residuals.owe(1, np.full(9, 3.0, dtype=np.float32), 1.0)
    residuals.lay_out(lay_out(SLOTS, [1, 0], 1 << 20))
    assert residuals.of_slot(0)[RESIDUAL].tolist() == list(range(40))
    assert residuals.of_slot(1)[OWED].tolist() == [3.0] * 9
    gradient = np.zeros(9, dtype=np.float32)
    residuals.pay(Piece(0, 0, 64, 0, 1), [(0, gradient)])
    assert gradient.tolist() == [3.0] * 9
    assert not residuals.owes(0), "a debt is paid once"


def test_a_state_goes_on_at_its_place_and_is_one_debt_elsewhere():
    residuals = made()
    residuals.of_slot(0)[RESIDUAL][...] = 2.0
    residuals.owe(0, np.full(40, 3.0, dtype=np.float32), 0.25)
    residuals.of_bucket(0).keep("number", 5.0)
    state = residuals.checkpoint("here", UNITS, KEYS)
    assert state.owed("p").tolist() == [2.0 * 0.5 + 3.0] * 40
    assert state.owed("q") is None
    same, moved = made(), made()
    same.restore(state, "here", UNITS, KEYS)
    assert same.of_slot(0)[RESIDUAL].tolist() == [2.0] * 40
    assert same.of_slot(0)[OWED].tolist() == [12.0] * 40
    assert same.of_bucket(0).recall("number") == 5.0
    for _ in range(2):  # of two ranks that left
        moved.restore(state, "there", [{RESIDUAL: 1.0, OWED: 0.5}] * 2, KEYS)
    assert not moved.of_slot(0)[RESIDUAL].any()
    assert moved.of_slot(0)[OWED].tolist() == [2 * 4.0 / 0.5] * 40
    assert moved.of_bucket(0).recall("number") is None


def test_what_dgc_owes_does_what_its_arrays_would_have_done():
    """Without another gradient, as many turns hand on as much, whether it was kept or is owed."""
    codec = DGC(0.5, 0.75)
    kept, moved = CodecState(16, codec.keeps), CodecState(16, codec.keeps)
    kept.residual[...] = draw = np.random.default_rng(0).normal(size=16).astype(np.float32)
    kept.arrays[VELOCITY][...] = draw[::-1]
    gradient = sum(part * kept.arrays[name] for name, part in codec.owes.items())
    for _ in range(80):
        codec.prepare(np.zeros(16, dtype=np.float32), kept, 1)
        codec.prepare(gradient, moved, 1)
        gradient = np.zeros(16, dtype=np.float32)
    np.testing.assert_allclose(moved.residual, kept.residual, rtol=1e-5, atol=1e-6)


def test_what_is_too_large_for_a_debt_is_told_and_not_owed():
    residuals = made()
    residuals.owe(0, np.ones(40, dtype=np.float32), 0.0)
    assert not residuals.owes(0), "what is no sum owes nothing"
    values = np.ones(9, dtype=np.float32)
    values[4] = 1e38
    text = "Values that compression kept for 'q' are not finite when scaled to its gradient here, and are lost: 1"
    with pytest.warns(UserWarning, match=f"^{text}$"):
        residuals.owe(1, values, 1e-3)
    assert residuals.of_slot(1)[OWED].tolist() == pytest.approx([1e3] * 4 + [0.0] + [1e3] * 4)
