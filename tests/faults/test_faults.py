"""A rank that dies, stops, leaves or falls behind: the others learn which one it was, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from tests.ranks import TORCH, run_ranks, start_ranks
from tests.transports.shared import needs_native

WORKER = [sys.executable, "-m", "tests.faults.worker"]
channels = pytest.mark.parametrize("channel", ["named", "planned"])
LATE_SECONDS = 12  # who waits looks every so often, on a machine that runs other tests, too
NOTICED_WITHIN_SECONDS = 30  # what is asked for is 1 s and 5 s; machines that run tests may be slow


def noticed(output: str) -> dict[int, str]:
    """By rank, the error with which it learnt of the fault."""
    found = re.findall(r"RANK (\d) NOTICED ([\d.]+) (.*)", output)
    assert all(float(seconds) < NOTICED_WITHIN_SECONDS for _, seconds, _ in found), output
    return {int(rank): text for rank, _, text in found}


@pytest.mark.essential(channel="planned")
@channels
@pytest.mark.parametrize("scenario", ["raises", "exits", "exits-late"])
def test_a_rank_that_fails_ends_an_mpi_job(scenario, channel):
    status, output = run_ranks([*WORKER, scenario, channel], 3, "mpi", timeout=60, preload=TORCH)
    assert status != 0
    assert "WENT ON" not in output
    if scenario == "raises":
        assert "this rank cannot go on" in output
    else:
        assert status == 3, output


def test_an_interrupted_sum_is_an_error_on_all_ranks(transport):
    _, output = run_ranks([*WORKER, "interrupted", "planned"], 3, transport, timeout=60, preload=TORCH)
    assert "WENT ON" not in output
    assert noticed(output), output
    assert all("interrupted by KeyboardInterrupt" in text for text in noticed(output).values()), output
    if transport == "torch":  # mpirun ends the others when the first of them does
        assert sorted(noticed(output)) == [0, 1, 2], output


@pytest.mark.essential(scenario=("leaves", "killed"))
@pytest.mark.parametrize(
    ("scenario", "channel"),
    [
        *(("raises", channel) for channel in ("named", "planned")),
        pytest.param("leaves", "named", marks=pytest.mark.thorough),
        ("leaves", "planned"),
        *(("killed", channel) for channel in ("named", "planned", "polled", "joined")),
        pytest.param("killed", "repeated", marks=needs_native),
    ],
)
def test_the_others_learn_which_rank_is_gone(scenario, channel):
    _, output = run_ranks([*WORKER, scenario, channel], 3, "torch", timeout=60, preload=TORCH)
    errors = noticed(output)
    assert sorted(errors) == [0, 2], output
    assert all("rank 1" in text for text in errors.values()), output
    if scenario == "raises":
        assert any("this rank cannot go on" in text for text in errors.values()), output


@pytest.mark.essential(channel="named")
@channels
def test_a_killed_rank_ends_an_mpi_job(channel):
    status, output = run_ranks([*WORKER, "killed", channel], 3, "mpi", timeout=60, preload=TORCH)
    assert status != 0
    assert "WENT ON" not in output


@pytest.mark.essential(transport="torch")
@pytest.mark.parametrize("channel", ["planned", "polled", "joined", pytest.param("repeated", marks=needs_native)])
def test_a_stopped_rank_is_lost_after_the_timeout(channel, transport):
    processes = start_ranks([*WORKER, "stopped", channel], 3, transport, preload=TORCH, HVDKIT_TIMEOUT_SECONDS="4")
    outputs: list[str] = []
    try:
        deadline = time.monotonic() + 60
        if transport == "torch":
            outputs = [processes[rank].communicate(timeout=deadline - time.monotonic())[0] for rank in (0, 2)]
        else:
            outputs = [processes[0].communicate(timeout=deadline - time.monotonic())[0]]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()  # a stopped one too; woken first, it might still say something
                outputs.append(process.communicate()[0])
    text = "\n".join(outputs)
    stopped = re.search(r"stopping (\d+)", text)
    if stopped:
        with suppress(ProcessLookupError):  # it may have just ended
            os.kill(int(stopped[1]), signal.SIGKILL)
    errors = noticed(text)
    assert errors, text
    assert all("rank 1" in error and "HVDKIT_TIMEOUT_SECONDS" in error for error in errors.values()), text
    if transport == "torch":
        assert sorted(errors) == [0, 2], text


def test_an_mpi_job_ends_though_a_survivor_caught_the_error():
    # The lost rank can never come to MPI_Finalize, so the others must not wait for it there.
    processes = start_ranks(
        [*WORKER, "stopped-and-caught", "named"], 2, "mpi", preload=TORCH, HVDKIT_TIMEOUT_SECONDS="3"
    )
    output = processes[0].communicate(timeout=60)[0]
    assert 0 in noticed(output), output
    assert processes[0].returncode != 0


# One node; two, of which one has the rank in question and another; one a rank. With two, rank 0 watches rank 1 in the
# memory of their node, and rank 2 from another one: what the others show apart.
per_node = pytest.mark.parametrize("per_node", [3, 2, 1], ids=["node", "two nodes", "node a rank"])
GIL_SECONDS = 7


@pytest.mark.essential(transport="torch", channel="planned", per_node=2)
@needs_native
@per_node
@pytest.mark.parametrize("channel", ["named", "planned", "joined"])
def test_a_library_that_keeps_the_gil_for_longer_than_the_timeout_ends_no_job(channel, per_node, transport):
    command = [*WORKER, f"keeps the GIL {GIL_SECONDS}", channel]
    settings = {"HVDKIT_TIMEOUT_SECONDS": "2"}
    status, output = run_ranks(command, 3, transport, timeout=60, per_node=per_node, preload=TORCH, **settings)
    assert status == 0, output
    assert output.count("WENT ON") == 3, output


@pytest.mark.essential(transport="torch", per_node=2)
@needs_native
@per_node
def test_a_rank_that_keeps_the_gil_for_ever_is_lost_at_the_longer_timeout(per_node, transport):
    settings = {"HVDKIT_TIMEOUT_SECONDS": "2", "HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS": "6"}
    command = [*WORKER, "keeps the GIL 1000", "planned"]
    text = output_of_survivors(command, transport, per_node, settings)
    errors = noticed(text)
    assert errors, text
    assert all(re.search(r"rank 1 \S+ lives, but .*HVDKIT_UNRESPONSIVE_T.*HINT", told) for told in errors.values()), (
        text
    )
    seconds = [float(at) for at in re.findall(r"NOTICED ([\d.]+)", text)]
    assert min(seconds) > 4, text
    assert max(seconds) < 6 + LATE_SECONDS, text


@pytest.mark.essential(transport="mpi", per_node=(2, 1))  # the first rank that notices ends the job
@needs_native
@per_node
def test_a_stopped_rank_is_lost_after_the_timeout_wherever_it_is(per_node, transport):
    # Its memory, and the buffers of its connections, stay: only what moves is a sign of life.
    text = output_of_survivors([*WORKER, "stopped", "planned"], transport, per_node, {"HVDKIT_TIMEOUT_SECONDS": "3"})
    stopped = re.search(r"stopping (\d+)", text)
    if stopped:
        with suppress(ProcessLookupError):  # it may have just ended
            os.kill(int(stopped[1]), signal.SIGKILL)
    errors = noticed(text)
    assert errors, text
    assert all("rank 1" in error and "HVDKIT_TIMEOUT_SECONDS" in error for error in errors.values()), text
    assert max(float(at) for at in re.findall(r"NOTICED ([\d.]+)", text)) < 3 + LATE_SECONDS, text


def output_of_survivors(command: list[str], transport: str, per_node: int, settings: dict[str, str]) -> str:
    """What three ranks print of which the second does not end by itself."""
    processes = start_ranks(command, 3, transport, per_node, preload=TORCH, **settings)
    waited_for = [processes[0], processes[2]] if transport == "torch" else [processes[0]]
    outputs: list[str] = []
    deadline = time.monotonic() + 60
    try:
        outputs += [process.communicate(timeout=deadline - time.monotonic())[0] for process in waited_for]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                outputs.append(process.communicate()[0])
    return "\n".join(outputs)


INIT_WITHOUT_RANK_1 = (
    "import os, sys, time, hvdkit.torch as hvd\n"
    "if (os.environ.get('RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
    "    import mpi4py.MPI\n"
    "    time.sleep(60)\n"
    "    sys.exit(0)\n"
    "hvd.init()\n"
)


def test_init_names_the_ranks_that_did_not_come(transport):
    command = [sys.executable, "-c", INIT_WITHOUT_RANK_1]
    processes = start_ranks(command, 3, transport, preload=TORCH, HVDKIT_START_TIMEOUT_SECONDS="8")
    came = [processes[0], processes[2]] if transport == "torch" else processes
    try:
        output = "\n".join(process.communicate(timeout=50)[0] for process in came)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert all(process.returncode != 0 for process in came), output
    assert "missing: [1]" in output, output


@pytest.mark.essential(transport="torch")
@channels
def test_a_late_rank_is_waited_for_and_warned_about(channel, transport):
    settings = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HVDKIT_TIMEOUT_SECONDS": "3"}
    status, output = run_ranks([*WORKER, "late", channel], 3, transport, timeout=60, preload=TORCH, **settings)
    assert status == 0, output
    assert output.count("WENT ON") == 3
    warning = re.search(r".*(not by ranks \[1\]|waits for ranks \[1).*", output)
    assert warning, output
    assert "grad" in warning[0] if channel == "named" else "weight" in warning[0]


@pytest.mark.essential(transport="mpi")
@pytest.mark.parametrize("channel", ["named", "planned", pytest.param("repeated", marks=needs_native)])
def test_a_rank_that_is_too_late_becomes_an_error(channel, transport):
    settings = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    status, output = run_ranks([*WORKER, "late", channel], 2, transport, timeout=60, preload=TORCH, **settings)
    assert status != 0
    assert 0 in noticed(output), output
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in noticed(output)[0]


LEAVES_LATE = (
    "import time, torch, hvdkit.torch as hvd\n"
    "hvd.init()\n"
    "hvd.allreduce(torch.ones(3), name='all')\n"
    "if hvd.rank() == 1:\n"
    "    time.sleep(12)\n"  # longer than the others wait for it, and than a rank may be silent
    "    print('SAVED', flush=True)\n"
    "hvd.shutdown()\n"
    "print('LEFT', flush=True)\n"
)


@pytest.mark.essential(transport="torch")
def test_a_rank_that_leaves_late_has_the_time_it_needs(transport):
    command = [sys.executable, "-c", LEAVES_LATE]
    status, output = run_ranks(command, 3, transport, timeout=90, preload=TORCH, HVDKIT_TIMEOUT_SECONDS="3")
    assert status == 0, output
    assert "SAVED" in output
    assert output.count("LEFT") == 3, output


STOPS_WHILE_THE_OTHERS_LEAVE = LEAVES_LATE.replace("time.sleep(12)", "time.sleep(2); os.kill(os.getpid(), 19)")


def test_a_rank_that_is_stopped_while_the_others_leave_is_lost():
    command = [sys.executable, "-c", f"import os; {STOPS_WHILE_THE_OTHERS_LEAVE}"]
    processes = start_ranks(command, 3, "torch", preload=TORCH, HVDKIT_TIMEOUT_SECONDS="3")
    try:
        outputs = [processes[rank].communicate(timeout=60)[0] for rank in (0, 2)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [processes[rank].returncode for rank in (0, 2)] == [1, 1], outputs
    assert all(re.search(r"PeerLostError: rank 1 \(.*did not say goodbye", output) for output in outputs), outputs


KEEPS_THE_GIL_WHILE_THE_OTHERS_LEAVE = LEAVES_LATE.replace("time.sleep(12)", "ctypes.PyDLL(None).sleep(9)")


@pytest.mark.essential(transport="mpi")
@needs_native
def test_a_rank_that_keeps_the_gil_while_the_others_leave_has_the_time_it_needs(transport):
    command = [sys.executable, "-c", f"import ctypes; {KEEPS_THE_GIL_WHILE_THE_OTHERS_LEAVE}"]
    status, output = run_ranks(command, 3, transport, timeout=90, preload=TORCH, HVDKIT_TIMEOUT_SECONDS="2")
    assert status == 0, output
    assert output.count("LEFT") == 3, output


PAUSED_WHILE_THE_OTHERS_LEAVE = (
    "import ctypes, os, time, torch, hvdkit.torch as hvd\n"
    "hvd.init()\n"
    "print('PID', os.getpid(), flush=True)\n"
    "hvd.allreduce(torch.ones(3), name='all')\n"
    "if hvd.rank() == 1:\n"
    "    ctypes.PyDLL(None).sleep(10)\n"
    "hvd.shutdown()\n"
    "print('LEFT', flush=True)\n"
)


@pytest.mark.thorough
@needs_native
def test_a_machine_that_is_paused_while_ranks_leave_loses_none_of_them():
    command = [sys.executable, "-c", PAUSED_WHILE_THE_OTHERS_LEAVE]
    processes = start_ranks(command, 3, "torch", preload=TORCH, HVDKIT_TIMEOUT_SECONDS="4")
    try:
        pids = []
        for process in processes:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("PID "):
                assert line, "a rank ended before it was under way"
            pids.append(int(line.split()[1]))
        time.sleep(2)  # ranks 0 and 2 have asked rank 1, which keeps the GIL, and see its heart beat
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        for rank in (0, 2, 1):  # whoever runs first sees that rank 1's heart has not beaten for longer than the timeout
            os.kill(pids[rank], signal.SIGCONT)
            time.sleep(0.05)
        outputs = [process.stdout.read() for process in processes if process.stdout is not None]
        assert [process.wait() for process in processes] == [0, 0, 0], outputs
        assert all(output.count("LEFT") == 1 for output in outputs), outputs
    finally:
        for process in processes:
            process.kill()
            process.communicate()
