"""The launcher without MPI: a worker for each rank, and a meeting place that no other program can take."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from hvdkit.environments import network
from hvdkit.environments.network import LOOPBACK
from hvdkit.launch import LaunchError, UsageError
from hvdkit.launch.hosts import Placement
from hvdkit.launch.job import LaunchJob, for_other_hosts
from hvdkit.launch.supervise import WORKER, Child


class MeetingPoint(NamedTuple):
    """The address at which rank 0 listens; ``socket`` is open already if rank 0 runs on this machine."""

    address: str
    port: int
    socket: socket.socket | None = None


@contextmanager
def meeting_point(job: LaunchJob) -> Iterator[MeetingPoint]:
    """Choose where the ranks meet. If rank 0 runs on this machine, hold the port open until ``children`` takes it."""
    first = job.placements[0].host
    if first in job.remote:
        # A port that no program should have, below those that Linux hands out itself; rank 0 says so if one has it.
        yield MeetingPoint(first, random.SystemRandom().randint(20000, 32767))
        return
    others = [placement.host for placement in job.placements if placement.host in job.remote]
    address = address_seen_by(others[0], job.options.interfaces, job.ssh.port or 22) if others else LOOPBACK
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(job.placements)) as listener:
        yield MeetingPoint(address, listener.getsockname()[1], listener)


def address_seen_by(other: str, interfaces: list[str], port: int) -> str:
    """Return this machine's address for another host: that of the first interface, else on the route to the host."""
    try:
        return network.interface_address(interfaces[0]) if interfaces else network.address_towards(other, port)
    except LookupError as error:
        raise UsageError(f"{error.args[0]}\nHINT: choose one of them, or leave --network-interfaces away") from error
    except OSError as error:  # the host's name may be known to ssh only
        hint = "name the network interface that leads there with --network-interfaces"
        fact = f"cannot find the address under which host {other} sees this machine: {error}"
        raise LaunchError(f"{fact}\nHINT: {hint}") from error


def rank_environment(job: LaunchJob, placement: Placement, point: MeetingPoint) -> dict[str, str]:
    """Return the variables of a single rank: the job's, its place in the job, and where the ranks meet."""
    environment = {
        **(for_other_hosts(job.environment) if placement.host in job.remote else job.environment),
        **{f"HVDKIT_{name.upper()}": str(number) for name, number in asdict(placement).items() if name != "host"},
        "HVDKIT_RENDEZVOUS_ADDR": point.address,
        "HVDKIT_RENDEZVOUS_PORT": str(point.port),
    }
    if placement.rank == 0 and point.socket is not None:
        environment["HVDKIT_RENDEZVOUS_FD"] = str(point.socket.fileno())
    if job.options.interfaces:
        environment["GLOO_SOCKET_IFNAME"] = ",".join(job.options.interfaces)
    elif not job.remote:
        # Without an interface, Gloo looks up the host's name, which may lead out of the machine or nowhere.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def children(job: LaunchJob, point: MeetingPoint) -> list[Child]:
    """Return a worker for every rank, in rank order."""
    secret = "" if job.environment.get("HVDKIT_SECRET_FILE") else secrets.token_hex(32)
    result = [
        Child(
            command=job.options.command,
            environment=rank_environment(job, placement, point),
            receive=partial(job.output.write, placement.rank),
            # hvdkit must lie at the same path there.
            remote=job.ssh.argv(placement.host, WORKER) if placement.host in job.remote else [],
            secret=secret,
        )
        for placement in job.placements
    ]
    if point.socket is not None:
        result[0].pass_fds = (point.socket.detach(),)  # closed here when the child has it
    return result
