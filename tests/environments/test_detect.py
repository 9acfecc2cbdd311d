"""Every launcher's variables give the World they mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdkit import environments
from hvdkit.environments import Rendezvous, World, detect

HVDKITRUN = {
    "HVDKIT_RANK": "0",
    "HVDKIT_SIZE": "4",
    "HVDKIT_LOCAL_RANK": "0",
    "HVDKIT_LOCAL_SIZE": "2",
    "HVDKIT_CROSS_RANK": "0",
    "HVDKIT_CROSS_SIZE": "2",
    "HVDKIT_RENDEZVOUS_ADDR": "127.0.0.1",
    "HVDKIT_RENDEZVOUS_PORT": "23456",
    "HVDKIT_RENDEZVOUS_FD": "5",
    "HVDKIT_JOB": "1f",
}
HOROVODRUN_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
HOROVODRUN = {
    **dict(zip((f"HOROVOD_{name}" for name in HOROVODRUN_NAMES), ("3", "4", "1", "2", "1", "2"), strict=True)),
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4444",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500"}
TORCHRUN = {
    **BY_HAND,
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "run-7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-h-12@1",
    "PMIX_RANK": "2",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "100",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "100", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}
SRUN_PORT = 20000 + 100 * 31 + 3
TCP = Rendezvous("tcp", "h0", 29500)
OPENMPI_WORLD = World("openmpi", 2, 4, 0, 2, mpi=True, job="prterun-h-12@1")
SRUN_WORLD = World("srun", 2, 3, 0, 1, 1, 2, Rendezvous("tcp", "node07", SRUN_PORT), job="100.3")

CASES = {
    "no launcher": ({}, World("none", 0, 1, 0, 1, 0, 1)),
    "hvdkitrun, rank 0 with its socket": (
        HVDKITRUN,
        World("hvdkitrun", 0, 4, 0, 2, 0, 2, Rendezvous("fd", "127.0.0.1", 23456, 5), job="1f"),
    ),
    "hvdkitrun, rank 0 without a socket": (
        {name: value for name, value in HVDKITRUN.items() if name != "HVDKIT_RENDEZVOUS_FD"},
        World("hvdkitrun", 0, 4, 0, 2, 0, 2, Rendezvous("tcp", "127.0.0.1", 23456), job="1f"),
    ),
    "hvdkitrun, another rank": (
        {**HVDKITRUN, "HVDKIT_RANK": "3", "HVDKIT_LOCAL_RANK": "1"},
        World("hvdkitrun", 3, 4, 1, 2, 0, 2, Rendezvous("tcp", "127.0.0.1", 23456), job="1f"),
    ),
    "horovodrun --gloo": (HOROVODRUN, World("horovodrun", 3, 4, 1, 2, 1, 2, Rendezvous("http", "10.0.0.1", 4444))),
    "torchrun with the agent's store": (
        TORCHRUN,
        World("torchrun", 1, 2, 1, 2, 0, 1, Rendezvous("agent", "h0", 29500), job="run-7"),
    ),
    "torchrun with a store of its own": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
        World("torchrun", 1, 2, 1, 2, 0, 1, TCP, job="run-7"),
    ),
    "started by hand": (BY_HAND, World("by hand", 1, 2, rendezvous=TCP)),
    "started by hand, alone": ({"RANK": "0", "WORLD_SIZE": "1"}, World("by hand", 0, 1)),
    "Open MPI": (OPENMPI, OPENMPI_WORLD),
    "hvdkitrun --mpi": ({**OPENMPI, "HVDKIT_JOB": "1f"}, World("openmpi", 2, 4, 0, 2, mpi=True, job="1f")),
    "Open MPI with a place to meet": (
        {**OPENMPI, "MASTER_ADDR": "h0", "MASTER_PORT": "29500"},
        World("openmpi", 2, 4, 0, 2, rendezvous=TCP, mpi=True, job="prterun-h-12@1"),
    ),
    "MPICH": (PMI, World("pmi", 2, 4, 0, 2, mpi=True)),
    "srun": (SRUN, SRUN_WORLD),
    "srun without the step's task count": (
        {("SLURM_NTASKS" if name == "SLURM_STEP_NUM_TASKS" else name): value for name, value in SRUN.items()},
        SRUN_WORLD,
    ),
    "srun on one host": (
        {**SRUN, "SLURM_STEP_NODELIST": "node07"},
        replace(SRUN_WORLD, rendezvous=Rendezvous("tcp", "127.0.0.1", SRUN_PORT)),
    ),
    "srun with a place to meet": (
        {**SRUN, "MASTER_ADDR": "h0", "MASTER_PORT": "29500"},
        World("srun", 2, 3, 0, 1, 1, 2, TCP, job="100.3"),
    ),
    "srun --mpi=pmix": ({**SRUN, "PMIX_RANK": "2"}, World("srun", 2, 3, 0, 1, 1, 2, mpi=True, job="100.3")),
    "srun --mpi=pmi2": (
        {**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"},
        World("srun", 2, 3, 0, 1, 1, 2, mpi=True, job="100.3"),
    ),
    # what lies around and is no launcher
    "a batch script is no task of a step": (BATCH_SCRIPT, World("none", 0, 1, 0, 1, 0, 1)),
    "the batch step": ({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"}, World("none", 0, 1, 0, 1, 0, 1)),
    "a shell that srun opened": ({**SRUN, "SLURM_JOB_NAME": "bash"}, World("none", 0, 1, 0, 1, 0, 1)),
    "MASTER_ADDR and MASTER_PORT alone": (
        {"MASTER_ADDR": "h0", "MASTER_PORT": "29500"},
        World("none", 0, 1, 0, 1, 0, 1),
    ),
    "WORLD_SIZE of one alone": ({"WORLD_SIZE": "1"}, World("none", 0, 1, 0, 1, 0, 1)),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "1"}, World("none", 0, 1, 0, 1, 0, 1)),
    # one launcher inside another
    "hvdkitrun inside everything": (
        {**HOROVODRUN, **TORCHRUN, **OPENMPI, **SRUN, **HVDKITRUN},
        World("hvdkitrun", 0, 4, 0, 2, 0, 2, Rendezvous("fd", "127.0.0.1", 23456, 5), job="1f"),
    ),
    "torchrun inside mpirun": (
        {**OPENMPI, **TORCHRUN},
        World("torchrun", 1, 2, 1, 2, 0, 1, Rendezvous("agent", "h0", 29500), job="run-7"),
    ),
    "torchrun inside srun": (
        {**SRUN, **TORCHRUN},
        World("torchrun", 1, 2, 1, 2, 0, 1, Rendezvous("agent", "h0", 29500), job="run-7"),
    ),
    "mpirun inside srun": ({**SRUN, **OPENMPI}, OPENMPI_WORLD),
    "mpirun inside a half-set Slurm": ({**OPENMPI, "SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}, OPENMPI_WORLD),
    "mpiexec inside srun": ({**SRUN, **PMI}, World("pmi", 2, 4, 0, 2, mpi=True, job="100.3")),
    "mpirun with RANK and WORLD_SIZE that agree": ({**OPENMPI, "RANK": "2", "WORLD_SIZE": "4"}, OPENMPI_WORLD),
    "by hand inside srun": ({**SRUN, **BY_HAND}, World("by hand", 1, 2, rendezvous=TCP, job="100.3")),
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
