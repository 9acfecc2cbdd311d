"""With which exit code a job ends."""

from __future__ import annotations

import pytest

from hvdkit.engine.session import ending
from hvdkit.engine.session.ending import LONGEST_FACT, Ending, exit_status, raised
from hvdkit.environments.failure_record import ANOTHER
from hvdkit.errors import MismatchError, PayloadError, PeerFailedError, PeerLostError, StallError


@pytest.mark.parametrize(
    ("code", "status"),
    [(None, 0), (0, 0), (False, 0), (3, 3), (True, 1), ("text", 1), (-1, 255), (256, 1), (2**40, 1), (0x103, 3)],
)
def test_no_failure_becomes_a_success(code, status):
    assert exit_status(code) == status


def test_what_others_are_told_of_an_exception_is_one_line_which_says_where_it_was_cut():
    assert (
        raised(ValueError, ValueError("rank 1 has joined.\nHINT: wait for it."))
        == "it raised ValueError: rank 1 has joined"
    )
    assert raised(KeyboardInterrupt, KeyboardInterrupt()) == "it raised KeyboardInterrupt"
    long = raised(ValueError, ValueError("x" * LONGEST_FACT + "y"))
    assert long == f"it raised ValueError: {'x' * LONGEST_FACT} ... (cut off here)"


@pytest.mark.parametrize(
    ("code", "first_code", "peer_lost", "aborts_with"),
    [(7, 3, False, 3), (7, 0, False, 7), (0, 0, True, 1), (0, 3, True, 3), (0, 3, False, None), (0, 0, False, None)],
)
def test_a_job_ends_with_the_code_of_who_failed_first(monkeypatch, code, first_code, peer_lost, aborts_with):
    monkeypatch.setattr(ending, "AFTER_ANOTHER_SECONDS", 0)
    aborted: list[int] = []
    mine = Ending()
    mine._watched = lambda: None
    mine.abort = aborted.append
    mine.code, mine.first_code, mine.peer_lost, mine.another_left = code, first_code, peer_lost, True
    mine._at_exit()
    assert aborted == ([] if aborts_with is None else [aborts_with])


def test_only_who_is_told_of_a_peer_fails_because_of_another_rank():
    mine = Ending()
    mine._first_gone = lambda: 5
    cause = PeerLostError("gone", 3)
    try:
        raise RuntimeError("training failed") from cause
    except RuntimeError as error:
        of_three: BaseException = error
    own = ValueError("mine")
    own.__cause__ = own
    hidden = RuntimeError("mine")
    hidden.__context__, hidden.__suppress_context__ = cause, True
    others = [None, own, hidden, MismatchError("apart"), StallError("late"), PayloadError(3, "damaged")]
    causes = [cause, of_three, PeerLostError("somebody"), PeerFailedError("its codec raised", 4)]
    assert [mine._blamed(one) for one in causes] == [3, 3, 5, 4]
    assert [mine._blamed(one) for one in others] == [None] * len(others)
    mine.renumbered = True
    assert mine._blamed(cause) == ANOTHER
