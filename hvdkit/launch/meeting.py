"""The address of rank 0, as other hosts see it, and ports on its host at which ranks can meet."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from hvdkit.environments import network
from hvdkit.environments.network import LOOPBACK
from hvdkit.launch import LaunchError, UsageError
from hvdkit.launch.hosts import Placement
from hvdkit.launch.job import LaunchJob

# Below the ports that Linux hands out itself: no connection takes such a port before rank 0 listens there.
_PORTS = range(20000, 32768)


def address_of_rank_0(job: LaunchJob) -> str:
    """Return the address of rank 0's host: the name given for it, else an address of this machine."""
    first = job.placements[0].host
    if first in job.remote:
        return first
    others = [placement.host for placement in job.placements if placement.host in job.remote]
    return address_seen_by(others[0], job.options.interfaces, job.ssh.port or 22) if others else LOOPBACK


def address_seen_by(other: str, interfaces: list[str], port: int) -> str:
    """Return this machine's address for another host: that of the first interface, else on the route to the host."""
    try:
        return network.interface_address(interfaces[0]) if interfaces else network.address_towards(other, port)
    except LookupError as error:
        raise UsageError(f"{error.args[0]}\nHINT: choose one of these, or leave --network-interfaces out") from error
    except OSError as error:  # the host's name may be known to ssh only
        hint = "name the network interface that leads there with --network-interfaces"
        fact = f"cannot find the address under which host {other} sees this machine: {error}"
        raise LaunchError(f"{fact}\nHINT: {hint}") from error


def draw_port(job: LaunchJob, taken: str = "") -> str:
    """Return a port for rank 0 other than ``taken``. On this machine it is free now; elsewhere rank 0 finds out."""
    is_here = job.placements[0].host not in job.remote
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if str(port) != taken and not (is_here and not network.is_free(port)):
            return str(port)
    raise LaunchError(f"no port from {_PORTS[0]} to {_PORTS[-1]} is free\nHINT: free one of them (see ss -ltn)")


def torch_meeting(job: LaunchJob, address: str, taken: str = "") -> dict[str, str]:
    """Return where ranks of torch.distributed meet: at the caller's MASTER_PORT, or a port other than ``taken``."""
    return {"MASTER_ADDR": address, "MASTER_PORT": job.environment.get("MASTER_PORT") or draw_port(job, taken)}


def ranks_of_hosts(placements: Sequence[Placement]) -> list[int]:
    """Return the number of ranks on each host, in the order of the hosts."""
    return list(Counter(placement.host for placement in placements).values())
