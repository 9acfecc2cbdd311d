"""Which tags of data messages are whose: each operation has some of its own for as long as any rank is at it."""

from __future__ import annotations

# Named operations count their tags below those of lanes.
LANE_TAG = 1 << 21
TAGS_PER_OPERATION = 8
NAMED_SEQUENCES = LANE_TAG // TAGS_PER_OPERATION
# Those of lanes: lane, then place in the lane's sequence, then phase. Places repeat after more than lane.SPAN, lanes
# after more than anybody has in flight at once.
LANES, SEQUENCE, PHASES = 2048, 128, 8


def named_tag(sequence: int) -> int:
    """The first tag of a batch of named operations."""
    return sequence % NAMED_SEQUENCES * TAGS_PER_OPERATION


def lane_tag(lane: int, sequence: int) -> int:
    """The first tag of the ``sequence``-th operation of a lane."""
    return LANE_TAG | (lane % LANES * SEQUENCE + sequence % SEQUENCE) * PHASES
