"""What ``hvd.init()`` is given: process sets that exist from the start."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from tests.on_ranks import on_ranks
from tests.ranks import ROOT, Skip, free_port, rank_environment
from tests.told import told
from tests.torch.data import equal
from tests.torch.operations import still_works

pytestmark = on_ranks((3, "mpi"), (3, "torch"))


@contextlib.contextmanager
def started(hvd: Any, **arguments: Any) -> Iterator[None]:
    """A job that is started with ``arguments``; the usual one goes on afterwards."""
    hvd.shutdown()
    try:
        hvd.init(**arguments)
        yield
        hvd.barrier()  # a rank that shuts down ends the job for those that still compute
    finally:
        hvd.shutdown()
        hvd.init()
    still_works(hvd)


def assert_reduces_inside(hvd: Any, process_set: Any, ranks: list[int]) -> None:
    """The set has these ranks, counted in the job, and they sum among themselves."""
    assert process_set.ranks == ranks
    assert process_set.included() is (hvd.rank() in ranks)
    if not process_set.included():
        with told(ValueError, "HINT"):
            hvd.allreduce(torch.ones(2), process_set=process_set)
        return
    assert (process_set.size(), process_set.rank()) == (len(ranks), ranks.index(hvd.rank()))
    summed = hvd.allreduce(torch.tensor([hvd.rank(), 1]), op=hvd.Sum, process_set=process_set)
    assert equal(summed, torch.tensor([sum(ranks), len(ranks)]))


def test_static_process_sets(hvd: Any) -> None:
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([2, 1]), hvd.ProcessSet(range(0, 3, 2))]
    assert [process_set.size() for process_set in sets] == [None] * 3
    with started(hvd, process_sets=sets):
        assert [process_set.process_set_id for process_set in sets] == [1, 2, 3]
        for process_set, ranks in zip(sets, ([0], [1, 2], [0, 2]), strict=True):
            assert_reduces_inside(hvd, process_set, ranks)
        with told(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            hvd.add_process_set([0, 1])
        with told(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS=1"):
            hvd.remove_process_set(sets[0])


def test_static_process_sets_that_cannot_be(hvd: Any) -> None:
    for sets, texts in (
        ([hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])], ("entry number 1 is a duplicate", "[0, 1]")),
        ([hvd.ProcessSet([0, 1, 2])], ("entry number 0 is a duplicate",)),
        ([hvd.ProcessSet([0, 3])], ("expected ranks from 0 to 2", "[0, 3]")),
        ([hvd.ProcessSet([])], ("expected ranks from 0 to 2", "[]")),
    ):
        with told(ValueError, *texts), started(hvd, process_sets=sets):
            pass
    still_works(hvd)


def _communicators(hvd: Any) -> tuple[Any, Any]:
    """mpi4py, and all ranks in reverse order."""
    if not hvd.mpi_enabled():
        raise Skip("needs MPI")
    from mpi4py import MPI

    return MPI, MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.Get_rank())


def test_process_sets_from_communicators_count_in_the_communicator_of_the_job(hvd: Any) -> None:
    mpi, backwards = _communicators(hvd)
    me = mpi.COMM_WORLD.Get_rank()
    pair = backwards.Split(int(me == 2), 0)  # ranks 1 and 0 of the world, which are ranks 1 and 2 of the job
    process_set = hvd.ProcessSet([1, 2] if me == 2 else pair)
    with started(hvd, comm=backwards, process_sets=[process_set]):
        assert (hvd.rank(), hvd.size()) == (2 - me, 3)
        assert_reduces_inside(hvd, process_set, [1, 2])


def test_process_sets_from_communicators_that_cannot_be(hvd: Any) -> None:
    mpi, _ = _communicators(hvd)
    world = mpi.COMM_WORLD
    with told(NotImplementedError, "process sets defined via MPI communicators are only supported", "[0, 1, 2]"):
        hvd.init(comm=[0, 1, 2], process_sets=[hvd.ProcessSet(world)])
    first_two = world.Split(int(world.Get_rank() == 2), 0)  # the last rank is alone
    sets = [hvd.ProcessSet(world)]
    fact = "ProcessSet: expected a communicator whose ranks are all in the job's communicator; ranks outside of it: "
    with told(ValueError, f"{fact}{2 if world.Get_rank() == 2 else 1} of 3"), started(hvd, comm=first_two):
        hvd.shutdown()
        hvd.init(comm=first_two, process_sets=sets)


WAITS_FOR_NOBODY = """
import hvdkit.torch as hvd
try:
    hvd.init(process_sets=[hvd.ProcessSet([0, 3])])
except ValueError as error:
    print("TOLD", error)
"""


def test_process_sets_that_cannot_be_are_told_before_ranks_meet():
    environment = rank_environment(
        HVDKIT_TRANSPORT="torch",
        HVDKIT_START_TIMEOUT_SECONDS="5",
        RANK="0",
        WORLD_SIZE="3",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    command = [sys.executable, "-c", WAITS_FOR_NOBODY]
    output = subprocess.check_output(command, env=environment, cwd=ROOT, text=True, timeout=120)
    assert "TOLD ProcessSet: expected ranks from 0 to 2, got [0, 3]" in output
