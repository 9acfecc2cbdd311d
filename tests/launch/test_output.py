"""However the bytes are cut on their way, each rank's lines come out whole and under its own name."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from hvdkit.launch.mpirun_output import MpirunStream, RankFailure, find_failure
from hvdkit.launch.output import LineSplitter
from tests.ranks import ROOT

DASHES = b"-" * 74 + b"\n"
EXITED = (
    DASHES
    + b"prterun detected that one or more processes exited with non-zero status,\n"
    + b"thus causing the job to be terminated. The first process to do so was:\n\n"
    + b"   Process name: [prterun-host-1234@1,1]\n   Exit code:    3\n"
    + DASHES
)
KILLED = DASHES + b"prterun noticed that process rank 2 with PID 55 on node h1 exited on\nsignal 9 (Killed).\n" + DASHES
ABORTED = DASHES + b'prterun has exited due to process rank 1 with PID 0 on node h1 calling\n"abort". This\n' + DASHES
LEFT = DASHES + b"prterun has exited due to process rank 1 with PID 5 on node h1 exiting\nimproperly. \n" + DASHES
ABORTING = (
    DASHES
    + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[1,1],1]\n  Errorcode: 7\n"
    + DASHES
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\r\n", b"\xc3\xa4"])), st.lists(st.integers(0, 60)))
def test_lines_do_not_depend_on_where_the_stream_was_cut(parts, places):
    data = b"".join(parts)
    whole, pieces = LineSplitter(), LineSplitter()
    expected = whole.feed(data) + whole.flush()
    found = [line for piece in cut(data, places) for line in pieces.feed(piece)] + pieces.flush()
    assert found == expected
    assert b"".join(found).rstrip(b"\r\n") == data.rstrip(b"\r\n")
    assert all(line.endswith((b"\n", b"\r")) for line in found)


@given(st.lists(st.integers(0, 900)))
def test_mpiruns_tags_are_taken_apart_wherever_the_stream_was_cut(places):
    data = (
        b"[1,0]<stderr>: one\ntwo\n[1,1]<stderr>: \rbar 1[1,0]<stderr>: [3,4] three[1,1]<stderr>: \rbar 2"
        + EXITED
        + b"[1,12]<stderr>: -----\n[1,0]<stderr>:  [1,"
    )
    ranks: dict[int, bytes] = {}

    def write(rank, stream, text):
        assert stream == "stderr"
        ranks[rank] = ranks.get(rank, b"") + text

    stream = MpirunStream(write)
    for piece in cut(data, places):
        stream.feed(piece)
    stream.close()
    assert ranks == {0: b"one\ntwo\n[3,4] three [1,", 1: b"\rbar 1\rbar 2", 12: b"-----\n"}
    assert stream.own_words == EXITED


@given(st.lists(st.integers(0, 900)), st.sampled_from([b"", b"\0"]))
def test_what_mpi_says_of_its_end_in_a_ranks_name_is_left_out(places, end):
    begin = b"[1,1]<stderr>: "
    almost = DASHES + b"MPI_ABORT is what\n"
    data = begin + b"before\n" + almost + begin + ABORTING + end + begin + b"after\n-" + begin + DASHES
    written = []
    stream = MpirunStream(lambda rank, name, text: written.append(text))
    for piece in cut(data, places):
        stream.feed(piece)
    stream.close()
    assert stream.aborting
    assert b"".join(written) == b"before\n" + almost + b"after\n-" + DASHES


def test_mpiruns_reports_name_the_first_rank_that_failed():
    assert find_failure(EXITED, 3) == RankFailure(1, 3)
    assert find_failure(KILLED, 137) == RankFailure(2, -9, "h1")
    assert find_failure(ABORTED, 7) == RankFailure(1, 7, "h1", "aborted")
    assert find_failure(LEFT, 1) == RankFailure(1, 1, "h1", "left without MPI_Finalize")
    assert find_failure(b"something else went wrong", 1) is None


WRITES_WHILE_SIGNALS_COME = """
import signal
from hvdkit.launch.output import Output
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
output = Output(1)
for _ in range(100):
    output.write(0, "stdout", b"x" * 100_000 + b"\\n")
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_nothing_is_lost_where_signals_interrupt_a_write():
    with subprocess.Popen(
        [sys.executable, "-c", WRITES_WHILE_SIGNALS_COME], stdout=subprocess.PIPE, cwd=ROOT
    ) as writer:
        assert writer.stdout is not None
        said = []
        for _ in range(200):  # of a slow reader, whose pipe is full when a signal comes
            said.append(os.read(writer.stdout.fileno(), 1 << 13))
            time.sleep(0.001)
        lines = b"".join([*said, writer.stdout.read()]).splitlines()
    assert writer.returncode == 0
    assert set(lines) == {b"[0]<stdout>: " + b"x" * 100_000}
    assert len(lines) == 100


@given(st.lists(st.integers(0, 400)))
def test_that_a_rank_has_called_for_the_end_of_the_job_is_seen(places):
    for data, aborted in (
        (b"[1,0]<stdout>: MPI_ABORT was invoked on rank 1 in communicator\n", None),
        (ABORTING.replace(b"MPI_COMM_WORLD", b"MPI COMMUNICATOR 3 SPLIT FROM 0"), None),  # no rank of the job
        (ABORTING, RankFailure(1, 7, how="aborted")),
    ):
        stream = MpirunStream(lambda rank, name, data: None)
        for piece in cut(data, places):
            stream.feed(piece)
        assert stream.aborting == data.startswith(DASHES)
        assert stream.aborted == aborted
