"""Processes that ``hvdkitrun --gloo``, or Horovod's own ``horovodrun --gloo``, started: HVDKIT_RANK, HOROVOD_RANK ...

In their MPI mode both start mpirun, and the place of a process is what Open MPI says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.variables import Names, half_set, integer, port, read_world

HOROVODRUN = "horovodrun"

_PARTS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_HINT = "hvdkitrun sets them all; unset what a former job left behind"
_HOROVODRUNS_HINT = (
    "horovodrun --gloo sets them all; start with it or with hvdkitrun, or unset what a former job left behind"
)
_LISTENER = "HVDKIT_RENDEZVOUS_FD"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that hvdkitrun describes, None if it did not start this process."""
    world = _world(environ, "hvdkitrun", "HVDKIT", "HVDKIT_RENDEZVOUS", "tcp", _HINT)
    if world is None or world.rendezvous is None or world.rank != 0 or _LISTENER not in environ:
        return world
    return replace(world, rendezvous=replace(world.rendezvous, kind="fd", listen_fd=integer(environ, _LISTENER)))


def detect_horovodrun(environ: Mapping[str, str]) -> World | None:
    """The World that horovodrun describes, None if it did not start this process."""
    # It serves keys and values over HTTP where ranks meet; that is no TCPStore.
    return _world(environ, HOROVODRUN, "HOROVOD", "HOROVOD_GLOO_RENDEZVOUS", "http", _HOROVODRUNS_HINT)


def _world(environ: Mapping[str, str], launcher: str, prefix: str, meeting: str, kind: str, hint: str) -> World | None:
    names = Names(*(f"{prefix}_{part}" for part in _PARTS))
    address, port_name = f"{meeting}_ADDR", f"{meeting}_PORT"
    world = read_world(launcher, environ, names, hint)
    if world is None:
        return None
    if address in environ and port_name in environ:
        return replace(world, rendezvous=Rendezvous(kind, environ[address], port(environ, port_name)))
    if world.size > 1:
        raise half_set(launcher, environ, (names.rank, names.size, address, port_name), hint)
    return world
