"""--mpi, --gloo and HVDKIT_TRANSPORT choose how ranks start and what they are told; contradictions are refused."""

from __future__ import annotations

import pytest

from hvdkit.launch import LaunchError, UsageError, mpi

MPIRUN = mpi.Mpirun("/bin/mpirun")
NO_MPIRUN = mpi.Mpirun(None, "mpi4py is not installed")


# flag, HVDKIT_TRANSPORT, ranks: is it mpirun that starts them, and what HVDKIT_TRANSPORT they get
@pytest.mark.parametrize(
    ("flag", "asked", "size", "mpirun", "transport"),
    [
        (None, "auto", 2, True, "auto"),
        (None, "mpi", 2, True, "mpi"),
        (None, "torch", 2, False, "torch"),
        (None, "solo", 1, False, "solo"),
        ("mpi", "auto", 2, True, "mpi"),
        ("mpi", "mpi", 2, True, "mpi"),
        ("gloo", "auto", 2, False, "torch"),
        ("gloo", "torch", 2, False, "torch"),
        (None, "horovod", 2, True, "horovod"),
        ("mpi", "horovod", 2, True, "horovod"),
        ("gloo", "horovod", 2, False, "horovod"),
    ],
)
def test_what_was_asked_for_is_what_ranks_get(monkeypatch, flag, asked, size, mpirun, transport):
    monkeypatch.setattr(mpi, "find_mpirun", lambda: MPIRUN)
    chosen = mpi.choose_controller(flag, asked, size)
    assert (chosen.mpirun, chosen.transport) == (MPIRUN.path if mpirun else None, transport)


@pytest.mark.parametrize(
    ("flag", "asked"), [("mpi", "torch"), ("gloo", "mpi"), ("mpi", "solo"), ("gloo", "solo")], ids=str
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_flag_and_a_variable_that_contradict_each_other_are_both_named(flag, asked, size):
    with pytest.raises(UsageError, match=f"--{flag} and HVDKIT_TRANSPORT={asked} contradict each other"):
        mpi.choose_controller(flag, asked, size)


def test_several_processes_cannot_be_solo():
    with pytest.raises(UsageError, match="HVDKIT_TRANSPORT=solo is for one process, but -np 2"):
        mpi.choose_controller(None, "solo", 2)


def test_without_an_mpirun_ranks_are_started_one_by_one_unless_mpi_was_asked_for(monkeypatch):
    monkeypatch.setattr(mpi, "find_mpirun", lambda: NO_MPIRUN)
    assert mpi.choose_controller(None, "auto", 2) == mpi.Controller(
        None, "torch", "without MPI: mpi4py is not installed"
    )
    assert mpi.choose_controller(None, "horovod", 2).transport == "horovod"
    with pytest.raises(LaunchError, match="--mpi cannot be used: mpi4py is not installed"):
        mpi.choose_controller("mpi", "auto", 2)
    with pytest.raises(LaunchError, match="HVDKIT_TRANSPORT=mpi cannot be used: mpi4py is not installed"):
        mpi.choose_controller(None, "mpi", 2)
