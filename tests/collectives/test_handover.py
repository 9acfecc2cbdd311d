"""How chunks reach the other ranks of a node follows from what reading a line that they have just written takes."""

from __future__ import annotations

import pytest

from hvdkit.collectives.staging import FAR_SECONDS, MEASURED_BYTES, choose_handover

NEAR, FAR = 0.3 * FAR_SECONDS, 1.6 * FAR_SECONDS


@pytest.mark.parametrize(
    ("nbytes", "line_seconds", "past_cache", "reason"),
    [
        (MEASURED_BYTES, [0.0, NEAR], [False, False], "takes 15 ns: handed over in the cache"),
        (MEASURED_BYTES, [FAR, 0.0], [True, False], "takes 80 ns: handed over through memory to 1 of 1 others"),
        (MEASURED_BYTES, [0.0, NEAR, FAR, FAR], [False, False, True, True], "through memory to 2 of 3 others"),
        (MEASURED_BYTES, [0.0, FAR_SECONDS], [False, False], "in the cache"),
        (MEASURED_BYTES, [0.0, 0.0], [False, False], "not measured yet: handed over in the cache"),
        (MEASURED_BYTES - 1, [0.0, FAR], [False, False], f"less than {MEASURED_BYTES} bytes: handed over in the cache"),
    ],
)
def test_far_readers_get_their_chunks_through_memory(nbytes, line_seconds, past_cache, reason):
    chosen, told = choose_handover(nbytes, line_seconds)
    assert chosen == past_cache
    assert told.endswith(reason)
