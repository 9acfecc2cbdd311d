"""What counts as the right end of a job that a fault has struck: a judge that could not say no would be none."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.injection import KINDS, MOMENTS, Fault, Outcome, judge, random_faults

DEADLINES = (3.0, 8.0)  # of a silent rank, and of the start
KILLED = Fault("killed", "allreduce", 1, 0.01)
SLOW = Fault("slow", "allreduce", 1, 0.01)
NOTICED = "RANK {} NOTICED {} PeerLostError: rank 1 (here) is lost"
KILLED_OUTPUT = "\n".join(["STRIKES 100.0", NOTICED.format(0, 100.2), NOTICED.format(2, 100.5)])
WELL = "\n".join(f"RANK {rank} ENDED WELL 103.0" for rank in range(3))


def test_every_kind_comes_at_every_moment_and_the_same_seed_gives_the_same_faults():
    faults = list(itertools.islice(random_faults(7, 3), len(KINDS) * len(MOMENTS)))
    assert {(fault.kind, fault.moment) for fault in faults} == set(itertools.product(KINDS, MOMENTS))
    assert faults == list(itertools.islice(random_faults(7, 3), len(faults)))
    assert faults != list(itertools.islice(random_faults(8, 3), len(faults)))
    assert all(Fault.loads(fault.dumps()) == fault for fault in faults)


@pytest.mark.parametrize(
    ("output", "seconds"),
    [
        (KILLED_OUTPUT, 0.5),
        ("STRIKES 100.0\nhvdkitrun: rank 1 on here was killed by signal SIGKILL (9)", 1.0),
    ],
)
def test_survivors_or_a_launcher_that_name_the_rank_are_right(output, seconds):
    verdict = judge(KILLED, Outcome(137, output, 101.0), 3, *DEADLINES)
    assert verdict.problems == ()
    assert verdict.noticed_after == pytest.approx(seconds)
    assert "rank 1" in verdict.message


@pytest.mark.parametrize(
    ("fault", "status", "said", "wrong"),
    [
        (
            Fault("stopped", "init", 1, 0.01),
            1,
            "AuthenticationError: not all ranks proved to rank 2 in 8 s that they are ranks, missing: [0, 1]",
            ("[0, 1]", "[0]"),
        ),
        (
            Fault("stopped", "init", 1, 0.01),
            1,
            "TransportUnavailableError: rank 0 could not connect to all ranks within 8 s: "
            "rank 1 did not say where it listens; wait timeout after 8000ms, keys: /gloo/0/1",
            ("rank 1", "rank 2"),
        ),
        (
            Fault("raises", "allreduce", 1, 0.01),
            7,
            "RANK 2 NOTICED 100.2 PeerLostError: it cannot go on without rank 1, which has left the job; the first to "
            "leave was rank 1 (here)",
            ("first to leave was rank 1", "first to leave was rank 0"),
        ),
    ],
    ids=["not proved", "not connected", "first to leave"],
)
def test_who_waits_for_the_rank_must_name_it(fault, status, said, wrong):
    assert judge(fault, Outcome(status, f"STRIKES 100.0\n{said}", 108.0), 3, *DEADLINES).problems == ()
    other = Outcome(status, f"STRIKES 100.0\n{said.replace(*wrong)}", 108.0)
    assert "nobody named rank 1" in judge(fault, other, 3, *DEADLINES).problems


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome(None, KILLED_OUTPUT, 101.0), "did not end"),
        (Outcome(0, KILLED_OUTPUT, 101.0), "all was well"),
        (Outcome(137, KILLED_OUTPUT, 131.0), "ended 31.0 s after"),
        (Outcome(137, f"{KILLED_OUTPUT}\nWRONG step 2", 101.0), "a sum was wrong"),
        (Outcome(137, KILLED_OUTPUT, 101.0, ["123 python"]), "left behind: 123 python"),
        (Outcome(137, "STRIKES 100.0\nit is gone", 101.0), "nobody named rank 1"),
        (Outcome(137, "RANK 0 NOTICED 1.0 rank 1", 101.0), "did not strike"),
        (
            Outcome(137, "STRIKES 1.0\nRANK 0 NOTICED 2.0 rank 2 (b) is lost: its connection to rank 1 (a) broke", 3.0),
            "named",
        ),
        (Outcome(137, "STRIKES 1.0\nRANK 0 NOTICED 2.0 rank 0 (b) gave rank 1 (a) no sign of life", 3.0), "named"),
        (Outcome(137, "STRIKES 1.0\nhvdkitrun: rank 0 on here exited with code 7, which ended the job", 3.0), "named"),
        (Outcome(137, f"{KILLED_OUTPUT}\nRANK 2 ENDED WELL 101.0", 102.0), "ranks [2] ended as if nothing"),
    ],
)
def test_what_is_wrong_after_a_kill_is_said(outcome, problem):
    assert any(problem in one for one in judge(KILLED, outcome, 3, *DEADLINES).problems)


@pytest.mark.parametrize(
    ("kind", "moment", "limit"),
    [
        ("killed", "init", 10),
        ("raises", "allreduce", 10),
        ("cut", "shutdown", 11),
        ("stopped", "init", 16),
        ("launcher killed", "broadcast", 10),
    ],
)
def test_what_is_noticed_too_late_is_said(kind, moment, limit):
    fault = Fault(kind, moment, 1, 0.01)
    for seconds, is_late in ((limit - 0.1, False), (limit + 0.1, True)):
        output = f"STRIKES 100.0\n{NOTICED.format(0, 100 + seconds)}"
        problems = judge(fault, Outcome(137, output, 100 + seconds), 3, *DEADLINES).problems
        assert any(f"later than {limit} s" in one for one in problems) == is_late


def test_a_slow_rank_is_waited_for_and_warned_about():
    warning = "weight was submitted by ranks [0, 2], but not by ranks [1] for 1 s"
    good = judge(SLOW, Outcome(0, f"STRIKES 100.0\n{warning}\n{WELL}", 104.0), 3, *DEADLINES)
    assert good.problems == ()
    assert good.noticed_after is None
    assert "nobody was warned" in judge(SLOW, Outcome(0, f"STRIKES 100.0\n{WELL}", 104.0), 3, *DEADLINES).problems
    assert judge(SLOW, Outcome(7, f"STRIKES 100.0\n{warning}\n{NOTICED}", 104.0), 3, *DEADLINES).problems
