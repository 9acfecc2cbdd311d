"""Which transport carries a job, and what is said where none can."""

from __future__ import annotations

import pytest

from hvdkit.environments.base import Rendezvous, World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports import choose_transport

MEETING = Rendezvous("tcp", "127.0.0.1", 1)
ALONE = World("none", 0, 1)
MPIRUN = World("openmpi", 0, 2, mpi=True)
TORCHRUN = World("torchrun", 0, 2, rendezvous=MEETING)


def choose(world, asked="auto", have_mpi4py=True, have_torch=True, cuda=False):
    return choose_transport(world, asked, have_mpi4py, have_torch, cuda)[0]


def test_one_rank_starts_nothing():
    assert choose(ALONE) == "solo"
    assert choose(ALONE, have_mpi4py=False, have_torch=False) == "solo"


def test_the_launcher_decides():
    assert choose(MPIRUN) == "mpi"
    assert choose(TORCHRUN) == "torch"


def test_cuda_prefers_torch_where_it_can_meet():
    assert choose(MPIRUN, cuda=True) == "torch"
    assert choose(MPIRUN, cuda=True, have_torch=False) == "mpi"


def test_what_was_asked_for_wins():
    assert choose(MPIRUN, "torch") == "torch"
    assert choose(ALONE, "mpi") == "mpi"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"world": TORCHRUN, "asked": "mpi"}, "were started by torchrun"),
        ({"world": MPIRUN, "asked": "mpi", "have_mpi4py": False}, "needs mpi4py"),
        ({"world": MPIRUN, "have_mpi4py": False}, "mpi4py is not installed"),
        ({"world": TORCHRUN, "asked": "solo"}, "is for one rank, this job has 2"),
        ({"world": TORCHRUN, "have_torch": False, "have_mpi4py": False}, "no transport for 2 ranks"),
    ],
)
def test_where_none_can_carry_it_the_error_says_what_to_do(arguments, told):
    with pytest.raises(TransportUnavailableError, match=told) as caught:
        choose(**arguments)
    assert "HINT" in str(caught.value) or "one rank" in str(caught.value)
