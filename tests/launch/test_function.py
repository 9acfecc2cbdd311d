"""hvdkit.run: a function on all ranks of a new job, and its results."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import psutil
import pytest

import hvdkit
from hvdkit.launch import LaunchError
from hvdkit.launch.function import RankFailedError
from tests.ranks import rank_environment
from tests.waiting import until


def rank_and_sum(scale, length=0):
    import torch

    import hvdkit.torch as hvd

    hvd.init()
    print(f"rank {hvd.rank()} runs")
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
    return hvd.rank() * scale, total.item(), b"x" * length


@pytest.mark.parametrize("controller", ["use_gloo", "use_mpi"])
def test_results_come_in_the_order_of_ranks_however_large(controller, capsys):
    results = hvdkit.run(rank_and_sum, (10,), {"length": 3_000_001}, np=3, **{controller: True})
    assert [(rank, total) for rank, total, _ in results] == [(0, 3.0), (10, 3.0), (20, 3.0)]
    assert [content == b"x" * 3_000_001 for _, _, content in results] == [True] * 3
    captured = capsys.readouterr()
    assert sorted(captured.out.splitlines()) == [f"[{rank}]<stdout>: rank {rank} runs" for rank in range(3)]
    assert "result" not in captured.err


def test_it_runs_on_any_thread_and_takes_closures():
    found = []
    offset = 5
    thread = threading.Thread(target=lambda: found.append(hvdkit.run(lambda number: number + offset, [1], np=1)))
    thread.start()
    thread.join()
    assert found == [[6]]


@pytest.mark.parametrize("controller", ["use_gloo", "use_mpi"])
def test_the_traceback_of_a_rank_that_fails_is_in_the_exception(controller):
    def fail():
        import torch

        import hvdkit.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("missing on rank 1")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(RankFailedError) as raised:
        hvdkit.run(fail, np=2, **{controller: True})
    assert raised.value.rank == 1
    assert "rank 1 failed:" in str(raised.value)
    assert "KeyError: 'missing on rank 1'" in str(raised.value)
    assert "test_function.py" in str(raised.value)  # where


def test_a_rank_without_a_result_is_an_error():
    with pytest.raises(RankFailedError, match="rank 0 ended before the function returned"):
        hvdkit.run(sys.exit, (0,), np=1)


def test_an_elastic_job_gives_the_results_of_its_last_ranks():
    def train():
        import os

        return os.environ["HOROVOD_ELASTIC"], os.environ["HOROVOD_RANK"]

    assert hvdkit.run(train, np=2, min_np=1) == [("1", "0"), ("1", "1")]


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="both hosts and hostfile"):
        hvdkit.run(print, hosts="a:1", hostfile="b")
    with pytest.raises(ValueError, match="both use_gloo and use_mpi"):
        hvdkit.run(print, use_gloo=True, use_mpi=True)
    with pytest.raises(LaunchError, match="more processes than there are slots"):
        hvdkit.run(print, np=2, hosts="localhost:1")


def test_ctrl_c_ends_all_ranks():
    code = "import hvdkit, time; hvdkit.run(time.sleep, (600,), np=2, use_gloo=True)"
    caller = subprocess.Popen([sys.executable, "-c", code], env=rank_environment(), stderr=subprocess.PIPE)

    def ranks():
        found = psutil.Process(caller.pid).children(recursive=True)
        lines = [process.cmdline() for process in found]
        return [line for line in lines if line[-1:] == ["hvdkit.launch.function"] and "hvdkit.launch" not in line]

    until(lambda: len(ranks()) == 2, 30, lambda: "two ranks")
    left = psutil.Process(caller.pid).children(recursive=True)
    caller.send_signal(signal.SIGINT)
    _, text = caller.communicate(timeout=30)
    assert b"KeyboardInterrupt" in text
    assert caller.returncode == -signal.SIGINT
    until(lambda: not any(process.is_running() for process in left), 5, lambda: f"the end of {left}")
