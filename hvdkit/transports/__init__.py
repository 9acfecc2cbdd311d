"""Which transport carries this job, and why: a pure choice, then one constructor."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from hvdkit.environments import horovodrun
from hvdkit.environments.base import World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.base import Bytes, Transfer, Transport, aligned_empty

__all__ = ["Bytes", "Transfer", "Transport", "aligned_empty", "choose_transport", "open_transport"]

# What may be asked for where one rank alone needs no transport.
ALONE = ("auto", "horovod", "solo")


def choose_transport(
    world: World, asked: str, have_mpi4py: bool, have_torch: bool, cuda: bool, for_torch: bool = False
) -> tuple[str, str]:
    """The transport for ``world`` and the reason, from what was asked for and what is there.

    Whether Horovod's engine is there on all ranks turns out when it starts; see HorovodTransport.
    Raises TransportUnavailableError that says what is missing and what to do.
    """
    if asked == "solo" and world.size > 1:
        raise TransportUnavailableError(f"HVDKIT_TRANSPORT=solo is for one rank, this job has {world.size}.")
    if world.size == 1 and asked in ALONE:
        return "solo", "one rank"
    if asked == "horovod":
        if not for_torch:
            raise TransportUnavailableError(
                "HVDKIT_TRANSPORT=horovod carries PyTorch's tensors, and this script uses another framework.\n"
                "HINT: unset HVDKIT_TRANSPORT: the job goes by MPI or Gloo, whichever started it."
            )
        return "horovod", "HVDKIT_TRANSPORT"
    if asked == "auto" and for_torch and world.launcher == horovodrun.name:
        return "horovod", f"started by {world.launcher}"
    if asked == "mpi":
        if not have_mpi4py:
            raise TransportUnavailableError(
                "HVDKIT_TRANSPORT=mpi needs mpi4py.\nHINT: pip install 'hvdkit[mpi]' (mpi4py and an MPI)."
            )
        if world.size > 1 and not world.mpi:
            raise TransportUnavailableError(
                f"HVDKIT_TRANSPORT=mpi needs an MPI job; these {world.size} ranks were started by {world.launcher}.\n"
                "HINT: start the job with mpirun or hvdkitrun --mpi, or set HVDKIT_TRANSPORT=torch."
            )
        return "mpi", "HVDKIT_TRANSPORT"
    if asked == "torch":
        if not have_torch:
            raise TransportUnavailableError("HVDKIT_TRANSPORT=torch needs PyTorch.\nHINT: pip install 'hvdkit[torch]'.")
        return "torch", "HVDKIT_TRANSPORT"
    if world.mpi and have_mpi4py and not (cuda and have_torch):
        return "mpi", f"started by {world.launcher}, mpi4py is here"
    if have_torch and (world.rendezvous is not None or (world.mpi and have_mpi4py)):
        return "torch", "tensors on CUDA" if world.mpi else f"started by {world.launcher}"
    if world.mpi:
        raise TransportUnavailableError(
            f"this job was started by {world.launcher}, and mpi4py is not installed.\n"
            "HINT: pip install 'hvdkit[mpi]', or set MASTER_ADDR, MASTER_PORT and HVDKIT_TRANSPORT=torch."
        )
    raise TransportUnavailableError(
        f"no transport for {world.size} ranks started by {world.launcher}.\n"
        "HINT: pip install 'hvdkit[torch]' or start the job with mpirun and hvdkit[mpi]."
    )


def open_transport(
    world: World,
    asked: str,
    cuda: bool,
    for_torch: bool,
    generation: int,
    start_timeout_seconds: float,
    members: Sequence[int] | None = None,
) -> Transport:
    """Choose and open the transport; collective over ``members`` of ``world`` (all ranks, if None).

    The ranks of the transport are the places in ``members``.
    """
    have_mpi4py = importlib.util.find_spec("mpi4py") is not None
    have_torch = importlib.util.find_spec("torch") is not None
    name, _ = choose_transport(world, asked, have_mpi4py, have_torch, cuda, for_torch)
    horovods = name == "horovod"
    if horovods:  # it has another one for messages
        name, _ = choose_transport(world, "auto", have_mpi4py, have_torch, cuda)
    if members is not None:
        world = world.part(members)
    if name == "solo" or (world.size == 1 and asked in ALONE):
        from hvdkit.transports.solo import SoloTransport

        return SoloTransport()
    transport: Transport
    if name == "mpi":
        transport = _open_mpi(world, start_timeout_seconds)
    else:
        from hvdkit.transports.torch_distributed import TorchTransport

        transport = TorchTransport(world, generation, start_timeout_seconds)
    if horovods:
        from hvdkit.transports.horovod import HorovodTransport
        from hvdkit.transports.horovod_library import find_native_part

        transport = HorovodTransport(transport, find_native_part(), world, required=asked == "horovod")
    return transport


def open_mpi_communicator(communicator: Any, start_timeout_seconds: float) -> Transport:
    """The transport over a communicator that the user brought."""
    from hvdkit.transports.mpi import MpiTransport

    return MpiTransport(communicator, None, start_timeout_seconds)


def _open_mpi(world: World, start_timeout_seconds: float) -> Transport:
    from hvdkit.transports.mpi import MpiTransport, start_mpi

    MPI = start_mpi(world, start_timeout_seconds)  # noqa: N806 (mpi4py's name)
    seen = MPI.COMM_WORLD.Get_size()
    if world.members is None and seen != world.size:
        raise TransportUnavailableError(
            f"{world.launcher} started {world.size} ranks, but MPI sees {seen}: mpi4py was built for another "
            "MPI than the one that started this job.\n"
            "HINT: use the mpirun that belongs to mpi4py's MPI (pip install 'hvdkit[mpi]' brings both), or tell mpi4py "
            "the other one's library (MPI4PY_LIBMPI=/path/to/libmpi.so); under SLURM `srun --mpi=pmix`; or set "
            "HVDKIT_TRANSPORT=torch."
        )
    return MpiTransport(MPI.COMM_WORLD, world.members, start_timeout_seconds)
