"""What does not fit together is refused, with the names and values that say why."""

from __future__ import annotations

import pytest

from hvdkit.environments import detect
from hvdkit.errors import EnvironmentConflictError
from tests.environments.test_detect import BY_HAND, HOROVODRUN, HVDKITRUN, OPENMPI, PMI, SRUN, TORCHRUN

SRUN_PMIX = {**SRUN, "PMIX_RANK": "2"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# name: (environment, words that the message must hold)
CASES = {
    # half set
    "RANK alone": ({"RANK": "1"}, ["RANK=1", "missing WORLD_SIZE"]),
    "WORLD_SIZE without RANK": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "missing RANK"]),
    "nowhere to meet": (without(BY_HAND, "MASTER_ADDR"), ["RANK=1", "MASTER_PORT=29500", "missing MASTER_ADDR"]),
    "no port to meet at": (without(BY_HAND, "MASTER_PORT"), ["MASTER_ADDR=h0", "missing MASTER_PORT"]),
    "torchrun without WORLD_SIZE": (without(TORCHRUN, "WORLD_SIZE"), ["torchrun", "missing WORLD_SIZE"]),
    "hvdkitrun without its size": (without(HVDKITRUN, "HVDKIT_SIZE"), ["HVDKIT_RANK=0", "missing HVDKIT_SIZE"]),
    "horovodrun without its server": (
        without(HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        ["HOROVOD_RANK=3", "missing HOROVOD_GLOO_RENDEZVOUS_PORT"],
    ),
    "Open MPI without a size": (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), ["missing OMPI_COMM_WORLD_SIZE"]),
    "PMI without a rank": (without(PMI, "PMI_RANK"), ["PMI_SIZE=4", "missing PMI_RANK"]),
    "srun without a size": (without(SRUN, "SLURM_STEP_NUM_TASKS"), ["SLURM_PROCID=2", "missing SLURM_NTASKS"]),
    # out of range
    "rank not below size": ({**BY_HAND, "RANK": "2"}, ["RANK=2", "WORLD_SIZE=2", "smaller"]),
    "rank no number": ({**BY_HAND, "RANK": "one"}, ["RANK='one'", "whole number"]),
    "size zero": ({**BY_HAND, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"]),
    "local rank not below local size": ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
    "local size above size": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE=3", "WORLD_SIZE=2"]),
    "port out of range": ({**BY_HAND, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536", "TCP port"]),
    "Slurm's list of nodes": ({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, ["node[1-", "MASTER_ADDR"]),
    # two launchers
    "Open MPI and RANK": (
        {**OPENMPI, "RANK": "1", "WORLD_SIZE": "4"},
        ["OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=4", "RANK=1 WORLD_SIZE=4"],
    ),
    "PMI and RANK": ({**PMI, **BY_HAND}, ["PMI_RANK=2 PMI_SIZE=4", "RANK=1 WORLD_SIZE=2"]),
    "srun with PMIx and RANK": ({**SRUN_PMIX, **BY_HAND}, ["SLURM_PROCID=2", "RANK=1 WORLD_SIZE=2"]),
}


@pytest.mark.parametrize("name", CASES)
def test_contradictions_are_refused_with_names_values_and_a_hint(name):
    environ, words = CASES[name]
    with pytest.raises(EnvironmentConflictError) as caught:
        detect(environ)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "\nHINT: " in message
