"""Every launcher's variables give the World they mean; what does not fit together is refused, with names and values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdkit import environments
from hvdkit.environments import Rendezvous, World, detect, world_for_torch
from hvdkit.environments.launchers import expand_counts, expand_hosts
from hvdkit.errors import EnvironmentConflictError


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


HVDKITRUN = variables(
    "HVDKIT_RANK=0 HVDKIT_SIZE=4 HVDKIT_LOCAL_RANK=0 HVDKIT_LOCAL_SIZE=2 "
    "HVDKIT_RENDEZVOUS_ADDR=127.0.0.1 HVDKIT_RENDEZVOUS_PORT=23456 HVDKIT_RENDEZVOUS_FD=5 HVDKIT_JOB=1f"
)
HOROVODRUN = variables(
    "HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=1 HOROVOD_LOCAL_SIZE=2 "
    "HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=4444"
)
PLACE = variables("MASTER_ADDR=h0 MASTER_PORT=29500")
BY_HAND = {**variables("RANK=1 WORLD_SIZE=2"), **PLACE}
TORCHRUN = BY_HAND | variables(
    "LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=run-7 "
    "TORCHELASTIC_USE_AGENT_STORE=True"
)
OPENMPI = variables(
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=prterun-h-12@1 PMIX_RANK=2"
)
PMI = variables("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2")
SRUN = variables(
    "SLURM_JOB_ID=100 SLURM_STEP_ID=3 SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0 SLURM_NODEID=1 "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_STEP_NODELIST=node[07-08]"
)
BATCH_SCRIPT = variables("SLURM_JOB_ID=100 SLURM_PROCID=0 SLURM_NTASKS=3 SLURM_LOCALID=0")
SRUN_PORT = 20000 + 100 * 31 + 3
TCP = Rendezvous("tcp", "h0", 29500)
ALONE = World("none", 0, 1, 0, 1)
OF_HVDKITRUN = World("hvdkitrun", 0, 4, 0, 2, Rendezvous("fd", "127.0.0.1", 23456, 5), job="1f")
OF_TORCHRUN = World("torchrun", 1, 2, 1, 2, Rendezvous("agent", "h0", 29500), job="run-7")
OF_OPENMPI = World("openmpi", 2, 4, 0, 2, mpi=True, job="prterun-h-12@1")
OF_SRUN_MPI = World("srun", 2, 3, 0, 1, mpi=True, job="100.3")
OF_SRUN = World("srun", 2, 3, 0, 1, Rendezvous("tcp", "node07", SRUN_PORT), job="100.3")

CASES = {
    "no launcher": ({}, ALONE),
    "hvdkitrun, rank 0 with its socket": (HVDKITRUN, OF_HVDKITRUN),
    "hvdkitrun, with torch's variables for others": (
        HVDKITRUN | PLACE | variables("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=0"),
        OF_HVDKITRUN,
    ),
    "hvdkitrun, another rank": (
        HVDKITRUN | variables("HVDKIT_RANK=3 HVDKIT_LOCAL_RANK=1"),
        replace(OF_HVDKITRUN, rank=3, local_rank=1, rendezvous=Rendezvous("tcp", "127.0.0.1", 23456)),
    ),
    "horovodrun --gloo": (HOROVODRUN, World("horovodrun", 3, 4, 1, 2, Rendezvous("http", "10.0.0.1", 4444))),
    "torchrun with the agent's store": (TORCHRUN, OF_TORCHRUN),
    "torchrun with a store of its own": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        replace(OF_TORCHRUN, rendezvous=TCP),
    ),
    "started by hand": (BY_HAND, World("by hand", 1, 2, rendezvous=TCP)),
    "started by hand, alone": (variables("RANK=0 WORLD_SIZE=1"), World("by hand", 0, 1)),
    "Open MPI": (OPENMPI, OF_OPENMPI),
    "hvdkitrun --mpi": (OPENMPI | {"HVDKIT_JOB": "1f"}, replace(OF_OPENMPI, job="1f")),
    "hvdkitrun --mpi, with torch's variables for others": (
        OPENMPI | PLACE | variables("RANK=2 WORLD_SIZE=4 HVDKIT_TORCH_PLACE=2/4"),
        OF_OPENMPI,
    ),
    "mpirun in a rank of hvdkitrun --mpi": (
        OPENMPI | PLACE | variables("RANK=1 WORLD_SIZE=2 HVDKIT_TORCH_PLACE=1/2"),
        OF_OPENMPI,
    ),
    "Open MPI with a place to meet": (OPENMPI | PLACE, replace(OF_OPENMPI, rendezvous=TCP)),
    "MPICH": (PMI, World("pmi", 2, 4, 0, 2, mpi=True)),
    "srun": (SRUN, OF_SRUN),
    "srun without the step's task count": (
        {("SLURM_NTASKS" if name == "SLURM_STEP_NUM_TASKS" else name): value for name, value in SRUN.items()},
        OF_SRUN,
    ),
    "srun on one host": (
        SRUN | {"SLURM_STEP_NODELIST": "node07"},
        replace(OF_SRUN, rendezvous=Rendezvous("tcp", "127.0.0.1", SRUN_PORT)),
    ),
    "srun with a place to meet": (SRUN | PLACE, replace(OF_SRUN, rendezvous=TCP)),
    "srun --mpi=pmix": (SRUN | {"PMIX_RANK": "2"}, OF_SRUN_MPI),
    "srun --mpi=pmi2": (SRUN | variables("PMI_RANK=2 PMI_SIZE=3"), OF_SRUN_MPI),
    # what lies around and is no launcher
    "a batch script is no task of a step": (BATCH_SCRIPT, ALONE),
    "a shell that srun opened": (SRUN | {"SLURM_JOB_NAME": "bash"}, ALONE),
    "MASTER_ADDR and MASTER_PORT alone": (PLACE, ALONE),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "1"}, ALONE),
    # one launcher inside another
    "hvdkitrun inside everything": (HOROVODRUN | TORCHRUN | OPENMPI | SRUN | HVDKITRUN, OF_HVDKITRUN),
    "torchrun inside mpirun": (OPENMPI | TORCHRUN, OF_TORCHRUN),
    "mpirun inside srun": (SRUN | OPENMPI, OF_OPENMPI),
    "mpiexec inside srun": (SRUN | PMI, World("pmi", 2, 4, 0, 2, mpi=True, job="100.3")),
    "mpirun with RANK and WORLD_SIZE that agree": (OPENMPI | variables("RANK=2 WORLD_SIZE=4"), OF_OPENMPI),
    "by hand inside srun": (SRUN | BY_HAND, World("by hand", 1, 2, rendezvous=TCP, job="100.3")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_launchers_variables_give_its_world(name):
    environ, world = CASES[name]
    assert detect(environ) == world


def test_without_an_argument_the_processs_own_environment_is_read(monkeypatch):
    for name in BY_HAND:
        monkeypatch.setenv(name, BY_HAND[name])
    for name in ("HVDKIT_RANK", "HVDKIT_SIZE", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert detect().size == 2


def test_a_launcher_that_is_registered_is_asked_first(monkeypatch):
    monkeypatch.setattr(environments, "_launchers", [*environments._launchers])
    environments.register(lambda environ: World("mine", 0, 3) if "MINE" in environ else None)
    assert detect({**HVDKITRUN, "MINE": "1"}) == World("mine", 0, 3)
    assert detect(HVDKITRUN).launcher == "hvdkitrun"


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


FORMER_JOB = "unset the variables that a former job left behind"
SLURMS_LIST = (
    "cannot read Slurm's list 'node[1-'\nHINT: set MASTER_ADDR and MASTER_PORT in every task; "
    "`scontrol show hostnames` prints the hosts of the job"
)

# name: (environment, words that the message must hold)
CONFLICTS = {
    # half set
    "RANK alone": ({"RANK": "1"}, ["RANK=1", "missing WORLD_SIZE"]),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "missing RANK"]),
    "nowhere to meet": (without(BY_HAND, "MASTER_ADDR"), ["RANK=1", "MASTER_PORT=29500", "missing MASTER_ADDR"]),
    "no port to meet at": (without(BY_HAND, "MASTER_PORT"), ["MASTER_ADDR=h0", "missing MASTER_PORT"]),
    "torchrun without WORLD_SIZE": (without(TORCHRUN, "WORLD_SIZE"), ["torchrun", "missing WORLD_SIZE"]),
    "hvdkitrun without its size": (
        without(HVDKITRUN, "HVDKIT_SIZE"),
        ["HVDKIT_RANK=0", "missing HVDKIT_SIZE", f"\nHINT: hvdkitrun sets them all; {FORMER_JOB}"],
    ),
    "horovodrun without its server": (
        without(HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        [
            "HOROVOD_RANK=3",
            "missing HOROVOD_GLOO_RENDEZVOUS_PORT",
            f"\nHINT: horovodrun --gloo sets them all; start with it or with hvdkitrun, or {FORMER_JOB}",
        ],
    ),
    "Open MPI without a size": (
        without(OPENMPI, "OMPI_COMM_WORLD_SIZE"),
        ["missing OMPI_COMM_WORLD_SIZE", f"\nHINT: mpirun sets them all; {FORMER_JOB}"],
    ),
    "PMI without a rank": (
        without(PMI, "PMI_RANK"),
        ["PMI_SIZE=4", "missing PMI_RANK", f"\nHINT: mpiexec sets them all; {FORMER_JOB}"],
    ),
    "srun without a size": (without(SRUN, "SLURM_STEP_NUM_TASKS"), ["SLURM_PROCID=2", "missing SLURM_NTASKS"]),
    # out of range
    "rank not below size": ({**BY_HAND, "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2", "smaller"]),
    "rank no number": ({**BY_HAND, "RANK": "one"}, ["RANK='one'", "whole number"]),
    "size zero": ({**BY_HAND, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"]),
    "local rank not below local size": ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
    "local size above size": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3", "WORLD_SIZE=2"]),
    "port out of range": ({**BY_HAND, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "TCP port"]),
    "Slurm's list of nodes": ({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, [SLURMS_LIST]),
    # two launchers
    "Open MPI and RANK": (
        {**OPENMPI, "RANK": "1", "WORLD_SIZE": "4"},
        ["OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4", "RANK=1 WORLD_SIZE=4"],
    ),
    "hvdkitrun --mpi and another RANK": (
        {**OPENMPI, **variables("RANK=1 WORLD_SIZE=4 HVDKIT_TORCH_PLACE=2/4")},
        ["OMPI_COMM_WORLD_RANK=2", "RANK=1"],
    ),
    "PMI and RANK": ({**PMI, **BY_HAND}, ["PMI_RANK=2 PMI_SIZE=4", "RANK=1 WORLD_SIZE=2"]),
    "srun with PMIx and RANK": ({**SRUN, "PMIX_RANK": "2", **BY_HAND}, ["SLURM_PROCID=2", "RANK=1 WORLD_SIZE=2"]),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_contradictions_are_refused_with_names_values_and_a_hint(name):
    environ, words = CONFLICTS[name]
    with pytest.raises(EnvironmentConflictError) as caught:
        detect(environ)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\nHINT: " in message


# -- what torch.distributed cannot read --------------------------------------------------------------------------------

TORCH_PORT = 20000 + (100 * 31 + 3 + 6000) % 12000

FOR_TORCH = {
    "Open MPI": (OPENMPI, OF_OPENMPI),
    "Open MPI with a place to meet": (OPENMPI | PLACE, replace(OF_OPENMPI, rendezvous=TCP)),
    "srun, at a port of torch's own": (SRUN, replace(OF_SRUN, rendezvous=Rendezvous("tcp", "node07", TORCH_PORT))),
    "srun with PMI does not need MPI": (
        SRUN | {"PMIX_RANK": "2"},
        replace(OF_SRUN_MPI, rendezvous=Rendezvous("tcp", "node07", TORCH_PORT)),
    ),
    "srun with a place to meet": (SRUN | PLACE, replace(OF_SRUN, rendezvous=TCP)),
    "srun that names no hosts": (without(SRUN, "SLURM_STEP_NODELIST"), None),
    "one task": (
        SRUN | variables("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_NODEID=0"),
        None,
    ),
    "no launcher": ({}, None),
    "half set by hand": ({"RANK": "1"}, None),
    "by hand": (BY_HAND, None),
    "hvdkitrun, which sets torch's variables": (HVDKITRUN, None),
}


@pytest.mark.parametrize("name", FOR_TORCH)
def test_only_ranks_of_mpi_and_srun_meet_for_torch_by_other_variables(name):
    environ, world = FOR_TORCH[name]
    assert world_for_torch(environ=environ) == world


@pytest.mark.parametrize(("rank", "size"), [("2", "4"), ("2", None), (None, "4")])
def test_a_rank_and_a_size_of_another_job_are_torchs_matter(rank, size):
    given = {name: value for name, value in (("rank", rank), ("world_size", size)) if value}
    assert world_for_torch(given, OPENMPI) == OF_OPENMPI
    assert world_for_torch({name: str(int(value) - 1) for name, value in given.items()}, OPENMPI) is None


# -- Slurm's short forms stand for what `scontrol show hostnames` prints -----------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("x-1,y[3]", ["x-1", "y3"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", ",a", "a,", "a[1-", "a]", "a[x]", "a[]", "a[1,]", "a[1]]"])
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(EnvironmentConflictError, match="HINT"):
        expand_hosts(text)


def test_task_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(EnvironmentConflictError):
        expand_counts("2x3")
