"""Processes that ``hvdkitrun --gloo`` started: HVDKIT_RANK and its like.

In its MPI mode ``hvdkitrun`` starts mpirun, and the place of a process is what Open MPI says.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.variables import Names, half_set, integer, job_identifier, port, read_place

name = "hvdkitrun"

_NAMES = Names(
    rank="HVDKIT_RANK",
    size="HVDKIT_SIZE",
    local_rank="HVDKIT_LOCAL_RANK",
    local_size="HVDKIT_LOCAL_SIZE",
    cross_rank="HVDKIT_CROSS_RANK",
    cross_size="HVDKIT_CROSS_SIZE",
)
_RENDEZVOUS = ("HVDKIT_RENDEZVOUS_ADDR", "HVDKIT_RENDEZVOUS_PORT")
_HINT = "hvdkitrun sets them all; unset what a former job left behind"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that hvdkitrun describes, None if it did not start this process."""
    place = read_place(name, environ, _NAMES, _HINT)
    if place is None:
        return None
    rendezvous = None
    if all(variable in environ for variable in _RENDEZVOUS):
        address, port_number = environ[_RENDEZVOUS[0]], port(environ, _RENDEZVOUS[1])
        if place.rank == 0 and "HVDKIT_RENDEZVOUS_FD" in environ:
            listen_fd = integer(environ, "HVDKIT_RENDEZVOUS_FD")
            rendezvous = Rendezvous("fd", address, port_number, listen_fd)
        else:
            rendezvous = Rendezvous("tcp", address, port_number)
    elif place.size > 1:
        raise half_set(name, environ, (_NAMES.rank, _NAMES.size, *_RENDEZVOUS), _HINT)
    return World(launcher=name, **vars(place), rendezvous=rendezvous, job=job_identifier(environ))
