"""Processes that Horovod's own ``horovodrun --gloo`` started: HOROVOD_RANK and its like.

In its MPI mode ``horovodrun`` starts mpirun, and the place of a process is what Open MPI says.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.variables import Names, half_set, job_identifier, port, read_place

name = "horovodrun"

_NAMES = Names(
    rank="HOROVOD_RANK",
    size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_size="HOROVOD_LOCAL_SIZE",
    cross_rank="HOROVOD_CROSS_RANK",
    cross_size="HOROVOD_CROSS_SIZE",
)
_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_HINT = "horovodrun --gloo sets them all; start with it or with hvdkitrun, or unset what a former job left behind"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that horovodrun describes, None if it did not start this process."""
    place = read_place(name, environ, _NAMES, _HINT)
    if place is None:
        return None
    rendezvous = None
    if all(variable in environ for variable in _RENDEZVOUS):
        # horovodrun serves keys and values over HTTP there; it is not a TCPStore.
        rendezvous = Rendezvous("http", environ[_RENDEZVOUS[0]], port(environ, _RENDEZVOUS[1]))
    elif place.size > 1:
        raise half_set(name, environ, (_NAMES.rank, _NAMES.size, *_RENDEZVOUS), _HINT)
    return World(launcher=name, **vars(place), rendezvous=rendezvous, job=job_identifier(environ))
