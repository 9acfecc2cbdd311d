"""However a job ends, it ends as a whole: the first failure's status comes back, and no process stays."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time

import psutil
import pytest

from tests.launch.launching import PATIENCE_SECONDS, RANK, call, check_gone, marked, marker, running
from tests.waiting import until

SLEEP = "time.sleep(600)"
# A rank with a process of its own, both deaf to SIGTERM.
STUBBORN = f"""{RANK}
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", deaf, sys.argv[1]])
"""


@pytest.mark.parametrize("ending", ["exits", "exits, deaf to SIGTERM"])
def test_a_rank_that_fails_ends_the_job_with_its_status(controller, ending):
    mark = marker()
    begin = STUBBORN if "deaf" in ending else RANK
    result = call([controller, "-np", "3"], f"{begin}\nif rank == '1': time.sleep(0.2); sys.exit(3)\n{SLEEP}", mark)
    assert result.status == 3
    assert result.last_words == f"hvdkitrun: rank 1 on {socket.gethostname()} exited with code 3, which ended the job"
    check_gone(mark)


def test_a_rank_that_is_killed_ends_the_job_with_its_signal(controller):
    mark = marker()
    result = call([controller, "-np", "2"], f"{RANK}\nif rank == '0': os.kill(os.getpid(), 9)\n{SLEEP}", mark)
    assert result.status == 128 + 9
    how = "was killed by signal SIGKILL (9), which ended the job"
    assert f"hvdkitrun: rank 0 on {socket.gethostname()} {how}" in result.stderr.splitlines()
    check_gone(mark)


def test_a_rank_that_raises_shows_its_traceback_and_ends_the_job(controller):
    result = call([controller, "-np", "2"], f"{RANK}\nif rank == '1': raise KeyError('lost')\n{SLEEP}")
    assert result.status == 1
    assert "[1]<stderr>: KeyError: 'lost'" in result.stderr
    assert "exited with code 1" in result.last_words


def test_the_last_rank_to_end_is_named_too(controller):
    result = call([controller, "-np", "2"], f"{RANK}\nif rank == '1': time.sleep(1); sys.exit(5)")
    assert result.status == 5
    assert result.last_words == f"hvdkitrun: rank 1 on {socket.gethostname()} exited with code 5, which ended the job"


LEAVES_A_CHILD = f"""{RANK}
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], start_new_session=True)
"""


def test_processes_that_left_the_ranks_group_end_with_a_failed_job(controller):
    mark = marker()
    assert call([controller, "-np", "1"], f"{LEAVES_A_CHILD}\nsys.exit(5)", mark).status == 5
    check_gone(mark)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda x: str(x)
)
def test_a_signal_to_the_launcher_leaves_no_process(controller, number, status):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("this signal is ignored here, as under nohup, and a launcher started here rightly ignores it too")
    mark = marker()
    with running([controller, "-np", "2"], f"{STUBBORN}\n{SLEEP}", mark) as launcher:
        until(lambda: len(marked(mark)) >= 4, what="both ranks and their children run")
        launcher.send_signal(number)
        assert launcher.wait(PATIENCE_SECONDS) == status
        check_gone(mark)


def test_a_killed_launcher_leaves_no_process_that_is_deaf_and_left_its_ranks_group(controller):
    mark = marker()
    code = STUBBORN.replace("sys.argv[1]]", "sys.argv[1]], start_new_session=True") + SLEEP
    with running([controller, "-np", "2"], code, mark) as launcher:
        until(lambda: len(marked(mark)) >= 4, what="both ranks and their children run")
        launcher.kill()
        launcher.wait(PATIENCE_SECONDS)
        until(lambda: marked(mark) == [], what="all that a killed launcher started ends")


def test_a_killed_worker_ends_the_job():
    mark = marker()
    with running(["--gloo", "-np", "2"], f"{RANK}\n{SLEEP}", mark) as launcher:
        until(lambda: len(marked(mark)) >= 2, what="both ranks run")
        marked(mark)[0].parent().kill()
        assert launcher.wait(PATIENCE_SECONDS) == 128 + 9
        check_gone(mark)


@pytest.mark.parametrize("killed", ["mpirun", "launcher", "worker, by a second Ctrl-C"])
def test_an_mpirun_that_could_not_clean_up_leaves_no_files(killed, monkeypatch):
    monkeypatch.delenv("PRTE_MCA_prte_tmpdir_base", raising=False)
    mark = marker()
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets need a short path
        with running(["--mpi", "-np", "2"], f"{STUBBORN}\n{SLEEP}", mark, TMPDIR=folder) as launcher:
            until(lambda: len(marked(mark)) >= 4, what="both ranks and their children run")
            [scratch] = os.listdir(folder)
            assert os.listdir(os.path.join(folder, scratch)) != []
            mpirun = next(one for one in psutil.Process(launcher.pid).children(recursive=True) if mark in one.cmdline())
            if killed.startswith("worker"):
                launcher.send_signal(signal.SIGINT)
                time.sleep(0.5)
                launcher.send_signal(signal.SIGINT)
            else:
                (mpirun if killed == "mpirun" else launcher).kill()
            launcher.wait(PATIENCE_SECONDS)
            until(lambda: os.listdir(folder) == [], what="its files go")
        check_gone(mark)


def test_ranks_that_end_well_leave_no_process_in_their_group():
    # mpirun instead waits for whatever still holds a rank's standard output.
    mark = marker()
    with running(["--gloo", "-np", "1"], STUBBORN, mark) as launcher:
        assert launcher.wait(PATIENCE_SECONDS) == 0
        check_gone(mark)


def test_what_left_the_ranks_group_on_purpose_outlives_a_job_that_ends_well():
    mark = marker()
    result = call(["--gloo", "-np", "1"], LEAVES_A_CHILD, mark)
    survivors = marked(mark)
    for process in survivors:
        process.kill()
    assert (result.status, len(survivors)) == (0, 1)


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("os._exit(0)", None, "without MPI_Finalize"),
        ("MPI.COMM_WORLD.Abort(7)", 7, "exited with code 7, which ended the job"),
    ],
)
def test_a_rank_that_leaves_mpi_without_a_word_or_aborts_it_is_named(ending, status, words):
    pytest.importorskip("mpi4py")
    result = call(["--mpi", "-np", "2"], f"{RANK}\nfrom mpi4py import MPI\nif rank == '1': {ending}\n{SLEEP}")
    assert result.status == status if status else result.status != 0
    assert "rank 1 on " in result.last_words
    assert words in result.last_words
    assert not any(text in result.stdout + result.stderr for text in ("MPI_ABORT", "\0"))
