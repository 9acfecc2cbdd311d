"""What is chosen for a tensor, and the reason that is told: how its chunks are handed over, how many pieces it has."""

import itertools

import pytest

from hvdkit.collectives.hierarchical import MOST_PIECES, PIECE_BYTES, Layout, choose_pieces, whole_shares
from hvdkit.collectives.staging import FAR_SECONDS, MEASURED_BYTES, choose_handover

NEAR, FAR = 0.3 * FAR_SECONDS, 1.6 * FAR_SECONDS


@pytest.mark.parametrize(
    ("nbytes", "line_seconds", "past_cache", "reason"),
    [
        (MEASURED_BYTES, [0.0, NEAR], [False, False], "takes 15 ns: handed over in the cache"),
        (
            MEASURED_BYTES,
            [FAR, 0.0],
            [True, False],
            "takes 80 ns: handed over through memory, for 1 of 1 others to sum",
        ),
        (MEASURED_BYTES, [0.0, NEAR, FAR, FAR], [False, False, True, True], "through memory, for 2 of 3 others to sum"),
        (MEASURED_BYTES, [0.0, FAR_SECONDS], [False, False], "in the cache"),
        (MEASURED_BYTES, [0.0, 0.0], [False, False], "not measured yet: handed over in the cache"),
        (MEASURED_BYTES - 1, [0.0, FAR], [False, False], f"less than {MEASURED_BYTES} bytes: handed over in the cache"),
    ],
)
def test_far_readers_get_their_chunks_through_memory(nbytes, line_seconds, past_cache, reason):
    chosen, reason_given = choose_handover(nbytes, line_seconds)
    assert chosen == past_cache
    assert reason_given.endswith(reason)


@pytest.mark.parametrize(
    ("nbytes", "nodes", "asked", "pieces", "reason"),
    [
        (0, 2, "auto", 1, "too small to be cut"),
        (2 * PIECE_BYTES - 1, 2, "auto", 1, "too small to be cut"),
        (2 * PIECE_BYTES, 2, "auto", 2, f"in 2 pieces of at least {PIECE_BYTES} bytes"),
        (3 * PIECE_BYTES + 1, 5, "two_phase", 3, "in 3 pieces"),
        (100 * PIECE_BYTES, 2, "auto", MOST_PIECES, f"in {MOST_PIECES} pieces"),
        (100 * PIECE_BYTES, 1, "auto", 1, "nothing goes between nodes"),
        (100 * PIECE_BYTES, 2, "ring", 1, "HVDKIT_ALLREDUCE"),
    ],
)
def test_large_tensors_go_between_nodes_in_pieces(nbytes, nodes, asked, pieces, reason):
    count, reason_given = choose_pieces(nbytes, nodes, asked)
    assert count == pieces
    assert reason in reason_given


def test_shares_of_whole_tensors_begin_where_tensors_do_and_cover_all():
    layout = Layout([[0, 1, 2], [3, 4, 5]], None)
    assert whole_shares([0, 100, 200, 900], 1000, layout, 3) == [(0, 200), (200, 900), (900, 1000)]
    assert whole_shares([0], 1000, layout, 3) == [(0, 0), (0, 1000), (1000, 1000)]
    assert whole_shares([0, 500], 1000, Layout([[0, 1], [2]], None), 2) == [(0, 1000), (1000, 1000)]
    for begins in ([0, 16, 32], [0, 990], [0, 10, 20, 30, 40, 995]):
        shares = whole_shares(begins, 1000, layout, 4)
        assert shares[0][0] == 0
        assert shares[-2][1] == 1000
        assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
        assert all(begin in [*begins, 1000] for begin, _ in shares)
