"""Which way the ranks are started, by mpirun or one by one, and the transport they are told to use."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.launch.errors import UsageError
from hvdkit.launch.starters import mpi
from hvdkit.transports import AUTO, candidate

_TRANSPORT_OF = {"mpi": "mpi", "gloo": "torch"}


@dataclass(frozen=True)
class Controller:
    """``mpirun`` is None where hvdkitrun starts the ranks itself. ``reason`` says why it is this one."""

    mpirun: str | None
    transport: str
    reason: str


def choose(flag: str | None, asked: str, size: int) -> tuple[str | None, str]:
    """What ``--mpi``, ``--gloo`` or neither, and HVDKIT_TRANSPORT, ask for together.

    Returns ``"mpi"``, ``"gloo"`` or None for whichever is there, and who said so.

    Raises:
        UsageError: they contradict each other, or the number of ranks.
    """
    variable = f"HVDKIT_TRANSPORT={asked}"
    carrier = None if asked == AUTO else candidate(asked)
    controller = None if carrier is None else carrier.controller
    if flag is not None and controller is not None and asked != _TRANSPORT_OF[flag]:
        raise UsageError(
            f"--{flag} and {variable} contradict each other: --{flag} is for the transport {_TRANSPORT_OF[flag]}\n"
            f"HINT: leave --{flag} away, or unset HVDKIT_TRANSPORT"
        )
    if carrier is not None and size > (carrier.most_ranks or size):
        raise UsageError(
            f"{variable} is for one process, but -np {size} asks for more\n"
            "HINT: unset HVDKIT_TRANSPORT, or start with -np 1"
        )
    if flag is not None:
        return flag, f"--{flag}"
    return controller, "" if controller is None else variable


def find(flag: str | None, asked: str, size: int) -> Controller:
    """The controller of this job.

    Raises:
        UsageError: what was asked for contradicts itself.
        LaunchError: MPI was asked for and is not there.
    """
    chosen, by = choose(flag, asked, size)
    transport = None if asked == AUTO else asked
    if chosen == "mpi":
        return Controller(mpi.require_mpirun(by), transport or "mpi", f"with mpirun: {by}")
    if chosen == "gloo":
        return Controller(None, transport or "torch", f"without MPI: {by}")
    found = mpi.find_mpirun()
    if found.path is None:
        return Controller(None, transport or "torch", f"without MPI: {found.reason}")
    # Nobody asked for MPI's transport: ranks on CUDA may meet through MPI and use NCCL.
    return Controller(found.path, transport or AUTO, f"with mpirun: {found.path} is there")
