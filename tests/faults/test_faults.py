"""A rank that dies, stops, leaves or falls behind: the others learn which one it was, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
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
@pytest.mark.parametrize("scenario", ["raises", "exits", "exits-late", "killed"])
def test_a_rank_that_fails_ends_an_mpi_job(scenario, channel):
    status, output = run_ranks([*WORKER, scenario, channel], 3, "mpi", timeout=60, preload=TORCH)
    assert status == 3 if scenario.startswith("exits") else status != 0, output
    assert "WENT ON" not in output
    assert scenario != "raises" or "this rank cannot go on" in output


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


def errors_of_survivors(
    scenario: str, channel: str, transport: str, per_node: int | None, words: str, seconds: int, **settings: str
) -> None:
    """Check that the errors of ranks 0 and 2 hold ``words`` and come in time; rank 1 does not end by itself."""
    command = [*WORKER, scenario, channel]
    text = output_of_survivors(start_ranks(command, 3, transport, per_node, preload=TORCH, **settings), transport)
    for stopped in re.findall(r"stopping (\d+)", text):
        with suppress(ProcessLookupError):  # it may have just ended
            os.kill(int(stopped), signal.SIGKILL)
    errors = noticed(text)
    assert errors, text
    assert transport == "mpi" or sorted(errors) == [0, 2], text  # mpirun ends the job with the first that notices
    assert all(re.search(words, error) for error in errors.values()), text
    assert max(float(at) for at in re.findall(r"NOTICED ([\d.]+)", text)) < seconds + LATE_SECONDS, text
    if "GIL" in scenario:
        assert min(float(at) for at in re.findall(r"NOTICED ([\d.]+)", text)) > seconds - 2, text


def output_of_survivors(processes: list[subprocess.Popen[str]], transport: str) -> str:
    """What three ranks print of which the second does not end by itself."""
    waited_for = [processes[0], processes[2]] if transport == "torch" else [processes[0]]
    outputs: list[str] = []
    deadline = time.monotonic() + 60
    try:
        outputs += [process.communicate(timeout=deadline - time.monotonic())[0] for process in waited_for]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()  # a stopped one too; woken first, it might still say something
                outputs.append(process.communicate()[0])
    return "\n".join(outputs)


GAVE_NO_ANSWER = (
    "rank 1 (",
    ") is alive, but its Python interpreter gave rank ",
    " no answer for 6 s (HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS)",
    "HINT: see what the rank is doing (py-spy dump): a library keeps Python's lock (GIL), or threads wait for each "
    "other; raise the variable if such a call may take longer.",
)


@pytest.mark.essential(transport="torch", per_node=2)
@needs_native
@per_node
def test_a_rank_that_keeps_the_gil_for_ever_is_lost_at_the_longer_timeout(per_node, transport):
    settings = {"HVDKIT_TIMEOUT_SECONDS": "2", "HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS": "6"}
    words = ".*".join(map(re.escape, GAVE_NO_ANSWER))
    errors_of_survivors("keeps the GIL 1000", "planned", transport, per_node, words, 6, **settings)


STOPPED = r"^(?=.*rank 1).*HVDKIT_TIMEOUT_SECONDS"


@pytest.mark.essential(transport="mpi", per_node=(2, 1))  # the first rank that notices ends the job
@needs_native
@per_node
def test_a_stopped_rank_is_lost_after_the_timeout_wherever_it_is(per_node, transport):
    # Its memory, and the buffers of its connections, stay: only what moves is a sign of life.
    errors_of_survivors("stopped", "planned", transport, per_node, STOPPED, 3, HVDKIT_TIMEOUT_SECONDS="3")


@pytest.mark.essential(transport="torch")
@pytest.mark.parametrize("channel", ["polled", "joined", pytest.param("repeated", marks=needs_native)])
def test_a_stopped_rank_is_lost_after_the_timeout_whatever_waits_for_it(channel, transport):
    errors_of_survivors("stopped", channel, transport, None, STOPPED, 4, HVDKIT_TIMEOUT_SECONDS="4")


INIT_WITHOUT_RANK_1 = (
    "import os, sys, time, hvdkit.torch as hvd\n"
    "if (os.environ.get('RANK') or os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
    "    import mpi4py.MPI\n"
    "    time.sleep(60)\n"
    "    sys.exit(0)\n"
    "hvd.init()\n"
)


DID_NOT_COME = {
    "mpi": " waited 8 s for all 3 ranks to call hvd.init(); missing: [1]\n"
    "HINT: see what these ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS if starting takes long.",
    "torch": " waited 8 s for all 3 ranks; missing: [1]\n"
    "HINT: see what these ranks printed; raise HVDKIT_START_TIMEOUT_SECONDS on a cluster that starts slowly.",
}


def test_init_names_the_ranks_that_did_not_come(transport):
    command = [sys.executable, "-c", INIT_WITHOUT_RANK_1]
    processes = start_ranks(command, 3, transport, preload=TORCH, HVDKIT_START_TIMEOUT_SECONDS="8")
    output = output_of_survivors(processes, transport)
    assert all(process.returncode for process in (processes[0], processes[-1])), output
    assert DID_NOT_COME[transport] in output, output


@pytest.mark.essential(transport="torch")
@channels
def test_a_late_rank_is_waited_for_and_warned_about(channel, transport):
    settings = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HVDKIT_TIMEOUT_SECONDS": "3"}
    status, output = run_ranks([*WORKER, "late", channel], 3, transport, timeout=60, preload=TORCH, **settings)
    assert status == 0, output
    assert output.count("WENT ON") == 3
    warning = re.search(r".*(not by ranks \[1\]|has waited for ranks \[1).*", output)
    assert warning, output
    assert "grad" in warning[0] if channel == "named" else "weight" in warning[0]
    hint = (
        "HINT: see what the late ranks are doing (py-spy dump --pid): they are slower, for example with more data or a "
        "slower disk, or take another path through the script, for example under 'if hvd.rank() == 0'."
    )
    assert f"{warning[0]}\n{hint}" in output, output


@pytest.mark.essential(transport="mpi")
@pytest.mark.parametrize("channel", ["named", "planned", pytest.param("repeated", marks=needs_native)])
def test_a_rank_that_is_too_late_becomes_an_error(channel, transport):
    settings = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    status, output = run_ranks([*WORKER, "late", channel], 2, transport, timeout=60, preload=TORCH, **settings)
    assert status != 0
    assert 0 in noticed(output), output
    assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in noticed(output)[0]


LEAVES_LATE = (
    "import ctypes, os, time, torch, hvdkit.torch as hvd\n"
    "hvd.init()\n"
    "hvd.allreduce(torch.ones(3), name='all')\n"
    "if hvd.rank() == 1:\n"
    "    {waits}\n"
    "hvd.shutdown()\n"
    "print('LEFT', flush=True)\n"
)
LATE = {
    "sleeps": "time.sleep(12)",  # longer than the others wait for it, and than a rank may be silent
    "keeps the GIL": "ctypes.PyDLL(None).sleep(9)",
}


@pytest.mark.essential(transport="torch")
@pytest.mark.parametrize("how", ["sleeps", pytest.param("keeps the GIL", marks=needs_native)])
def test_a_rank_that_leaves_late_has_the_time_it_needs(how, transport):
    command = [sys.executable, "-c", LEAVES_LATE.format(waits=LATE[how])]
    status, output = run_ranks(command, 3, transport, timeout=90, preload=TORCH, HVDKIT_TIMEOUT_SECONDS="3")
    assert status == 0, output
    assert output.count("LEFT") == 3, output


def test_a_rank_that_is_stopped_while_the_others_leave_is_lost():
    command = [sys.executable, "-c", LEAVES_LATE.format(waits="time.sleep(2); os.kill(os.getpid(), 19)")]
    processes = start_ranks(command, 3, "torch", preload=TORCH, HVDKIT_TIMEOUT_SECONDS="3")
    output = output_of_survivors(processes, "torch")
    assert [processes[rank].returncode for rank in (0, 2)] == [1, 1], output
    assert len(re.findall(r"PeerLostError: rank 1 \(.*did not announce its exit", output)) >= 2, output
