"""The launcher without MPI: one worker a rank, and a place for the ranks to meet that no other program can take."""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil

from hvdkit.environments import network
from hvdkit.environments.network import LOOPBACK
from hvdkit.launch.errors import LaunchError, UsageError
from hvdkit.launch.hosts import Slot
from hvdkit.launch.job_environment import for_other_hosts, slot_environment
from hvdkit.launch.output import Output
from hvdkit.launch.starters.ssh import Ssh
from hvdkit.launch.supervise import WORKER, Child

_PORTS = (20000, 32767)  # below the ports that Linux hands out itself
_SECRET_BYTES = 32


@dataclass(frozen=True)
class MeetingPoint:
    """Where rank 0 listens; ``socket`` is open already if rank 0 runs on this machine."""

    address: str
    port: int
    socket: socket.socket | None = None


@contextmanager
def meeting_point(slots: list[Slot], remote: set[str], interfaces: list[str], ssh_port: int) -> Iterator[MeetingPoint]:
    """Choose where the ranks meet, holding the port open for rank 0 if that is possible from here.

    ``children`` takes the socket: what stays open here would keep the port open for the whole job.
    """
    first = slots[0].host
    if first in remote:
        # Nothing can be opened over there beforehand; a port taken by another program shows when rank 0 starts.
        yield MeetingPoint(first, random.SystemRandom().randint(*_PORTS))
        return
    others = [slot.host for slot in slots if slot.host in remote]
    address = own_address(others[0], interfaces, ssh_port) if others else LOOPBACK
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(slots)) as listener:
        yield MeetingPoint(address, listener.getsockname()[1], listener)


def own_address(other: str, interfaces: list[str], port: int) -> str:
    """The address of this machine under which another host sees it: the interface's, else the one that leads there."""
    if interfaces:
        return interface_address(interfaces[0])
    try:
        return network.address_towards(other, port)
    except OSError as error:  # ssh may know the host by its own configuration only
        raise LaunchError(
            f"cannot find the address under which host {other} sees this machine: {error}\n"
            "HINT: name the network interface that leads there with --network-interfaces"
        ) from error


def interface_address(interface: str) -> str:
    """The address of a network interface. Raises UsageError where there is none."""
    try:
        return network.interface_address(interface)
    except LookupError as error:
        raise UsageError(f"{error.args[0]}\nHINT: choose one of them, or leave --network-interfaces away") from error


def rank_environment(slot: Slot, point: MeetingPoint, interfaces: list[str], one_host: bool) -> dict[str, str]:
    """What a rank is told beyond the job's environment."""
    environment = {
        **slot_environment(slot),
        "HVDKIT_RENDEZVOUS_ADDR": point.address,
        "HVDKIT_RENDEZVOUS_PORT": str(point.port),
    }
    if slot.rank == 0 and point.socket is not None:
        environment["HVDKIT_RENDEZVOUS_FD"] = str(point.socket.fileno())
    if interfaces:
        environment["GLOO_SOCKET_IFNAME"] = ",".join(interfaces)
    elif one_host and "lo" in psutil.net_if_addrs():
        # Left to itself, Gloo looks up the host's name, which may lead out of the machine or nowhere.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def children(
    command: list[str],
    slots: list[Slot],
    environment: Mapping[str, str],
    point: MeetingPoint,
    remote: set[str],
    interfaces: list[str],
    ssh: Ssh,
    output: Output,
) -> list[Child]:
    """A worker for every rank, in rank order."""
    result = []
    secret = "" if environment.get("HVDKIT_SECRET_FILE") else secrets.token_hex(_SECRET_BYTES)
    for slot in slots:
        away = slot.host in remote
        own = rank_environment(slot, point, interfaces, one_host=not remote)
        if "GLOO_SOCKET_IFNAME" in environment and not interfaces:
            own.pop("GLOO_SOCKET_IFNAME", None)  # the caller knows better
        listener = point.socket if slot.rank == 0 else None
        result.append(
            Child(
                command=command,
                environment={**(for_other_hosts(environment) if away else environment), **own},
                receive=partial(output.write, slot.rank),
                remote=ssh.argv(slot.host, WORKER) if away else [],  # hvdkit must lie at the same path there
                pass_fds=() if listener is None else (listener.detach(),),  # the child's alone
                secret=secret,
            )
        )
    return result
