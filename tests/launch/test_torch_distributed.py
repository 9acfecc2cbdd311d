"""Ranks of mpirun and srun meet in ``init_process_group`` without torch's variables; elsewhere in torch's own way."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys

import pytest
from torch.distributed import HashStore

from hvdkit.environments import World, world_for_torch
from hvdkit.errors import TransportUnavailableError
from hvdkit.torch.distributed import rendezvous
from tests.launch.launching import outputs_of, run_to_end
from tests.launch.test_launchers import srun_environment
from tests.ranks import free_port, mpirun
from tests.told import told

SUM = """
import os, sys, torch, torch.distributed as dist
def total(backend):
    dist.init_process_group(backend)
    tensor = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return int(tensor)
"""
TOTALS = SUM + "print(*map(total, ('hvdkit', 'gloo', 'hvdkit')))"


def under_mpirun(code: str, **extra: str):
    pytest.importorskip("mpi4py")
    return run_to_end([*mpirun(2), sys.executable, "-c", code], **extra)


def started_by_hand(environments: list[dict[str, str]], code: str = TOTALS) -> list[str]:
    """Run a rank in each environment, and return what each prints."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) for environment in environments
    ]
    ended = outputs_of(processes)
    assert [process.returncode for process in processes] == [0] * len(processes), ended
    return [out for out, _ in ended]


def test_ranks_of_mpirun_meet_one_group_after_the_other():
    result = under_mpirun(TOTALS)
    assert (result.status, result.stdout) == (0, "3 3 3\n" * 2), result.stderr


@pytest.mark.parametrize("first", ["hvd.init()", "number = total('gloo')"])
def test_hvdkits_own_job_and_a_process_group_start_in_either_order(first):
    steps = ["hvd.init()", "number = total('gloo')"]
    steps = steps if first == steps[0] else steps[::-1]
    check = "print(number, int(hvd.allreduce(torch.ones(1), op=hvd.Sum)))"
    result = under_mpirun("\n".join([SUM, "import hvdkit.torch as hvd", *steps, check]), HVDKIT_TRANSPORT="torch")
    assert (result.status, result.stdout) == (0, "3 2\n" * 2), result.stderr


def test_a_rank_of_mpirun_that_fails_ends_the_job():
    result = under_mpirun(SUM + "total('gloo'); assert os.environ['OMPI_COMM_WORLD_RANK'] == '0', 'failed here'")
    assert result.status != 0
    assert "failed here" in result.stderr


def free_slurm_job() -> int:
    """Return the number of a job for which nobody uses the port where ranks of torch.distributed meet."""
    while True:
        job = random.randrange(1, 1_000_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", world_for_torch(environ=srun_environment(0, job)).rendezvous.port))
            return job


@pytest.mark.parametrize(
    "more", [{}, {"PMIX_RANK": "0"}, {"MASTER_ADDR": "127.0.0.1"}], ids=["srun", "PMIx", "address"]
)
def test_tasks_of_srun_meet(more):
    job = free_slurm_job()
    if "MASTER_ADDR" in more:
        more = {**more, "MASTER_PORT": str(free_port())}
    assert started_by_hand([srun_environment(rank, job, **more) for rank in (0, 1)]) == ["3 3 3\n"] * 2


def test_a_rank_and_a_size_may_also_be_arguments():
    job, code = (
        free_slurm_job(),
        "import os; import torch.distributed as dist; rank = int(os.environ['SLURM_PROCID'])\n",
    )
    code += "dist.init_process_group('gloo', rank=rank, world_size=2); dist.barrier(); print(dist.get_rank())"
    assert started_by_hand([srun_environment(rank, job) for rank in (0, 1)], code) == ["0\n", "1\n"]


@pytest.mark.parametrize(
    ("environment", "missing"),
    [({}, "RANK"), ({"RANK": "0"}, "WORLD_SIZE"), ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR")],
)
def test_without_a_launcher_torch_says_what_is_missing(environment, missing):
    result = run_to_end([sys.executable, "-c", TOTALS], **environment)
    assert result.stderr.endswith(f"rendezvous: environment variable {missing} expected, but not set\n")


def test_importing_torch_imports_only_the_registration():
    code = "import sys, torch; print([name for name in sys.modules if name.partition('.')[0] == 'hvdkit'])"
    assert run_to_end([sys.executable, "-c", code]).stdout == "['hvdkit', 'hvdkit.autoload']\n"


def test_ranks_that_can_only_meet_by_mpi_are_told_what_to_install(monkeypatch):
    monkeypatch.setattr(rendezvous, "is_installed", lambda name: False)
    with told(
        TransportUnavailableError,
        "rank 1: openmpi started 2 ranks, which can meet by MPI, but mpi4py is not installed.",
        "HINT: pip install mpi4py, or set MASTER_ADDR and MASTER_PORT on every rank: rank 0's host, a free port.",
    ):
        next(rendezvous.rendezvous(World("openmpi", 1, 2, mpi=True)))


def test_ranks_of_mpirun_meet_once(monkeypatch):
    monkeypatch.setitem(rendezvous._stores, None, HashStore())
    meetings = rendezvous.rendezvous(World("openmpi", 1, 2, mpi=True))
    assert next(meetings)[1:] == (1, 2)
    with told(RuntimeError, "ranks of mpirun and srun cannot meet again"):
        next(meetings)
