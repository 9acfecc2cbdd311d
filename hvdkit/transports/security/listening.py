"""The address on which this rank listens, which is the loopback if all ranks are on one host."""

from __future__ import annotations

import errno
import logging
import os
import socket

from hvdkit.environments.base import World
from hvdkit.environments.network import (
    LOOPBACK,
    addresses_of,
    interface_address,
    is_loopback,
    is_own,
    named_interfaces,
    own_address,
)
from hvdkit.errors import TransportUnavailableError

logger = logging.getLogger("hvdkit")

PORT_TAKEN = "HINT: another program, or another job, has the port; choose another MASTER_PORT, or let hvdkitrun choose."
CANNOT_LISTEN = (
    "HINT: choose a MASTER_PORT from 1024 to 65535. If this host does not have the address, name its network interface "
    "with GLOO_SOCKET_IFNAME or --network-interfaces."
)


def on_one_host(world: World) -> bool:
    """True if all ranks are known to be on one host: the launcher says so, or they meet on a loopback."""
    meets_here = world.rendezvous is not None and is_loopback(world.rendezvous.host)
    return meets_here or world.local_size == world.size


def addresses_for(world: World) -> list[str]:
    """Return this rank's addresses: of each named interface, else one. Raises TransportUnavailableError."""
    interfaces = named_interfaces()
    if not interfaces:
        towards = None if world.rendezvous is None else world.rendezvous.host
        return [LOOPBACK if on_one_host(world) else own_address(towards)]
    try:
        return [interface_address(name) for name in interfaces]
    except LookupError as error:
        raise TransportUnavailableError(
            f"rank {world.rank}: {error.args[0]}\n"
            "HINT: GLOO_SOCKET_IFNAME or --network-interfaces names the interface; correct it, or leave it out."
        ) from error


def meeting_addresses(world: World, host: str) -> tuple[str, str]:
    """Return the host to connect to, and where rank 0 listens for that, for a meeting place that a user named.

    Both are the same on all ranks of a host. Raises TransportUnavailableError for a name that is not known here.
    """
    try:
        stands_for = addresses_of(host)
    except OSError as error:
        raise TransportUnavailableError(
            f"rank {world.rank} does not know the host {host!r} where the ranks should meet: {error}\n"
            "HINT: MASTER_ADDR, or the first host of the job, must be a name or an address that all hosts know."
        ) from error
    own = [address for address in stands_for if is_own(address)]
    outside = [address for address in own if not is_loopback(address)]
    if own and on_one_host(world):
        return host, own[0]
    if outside:
        return host, outside[0]
    address = addresses_for(world)[0]
    if own:
        # Many systems give the host's own name to their loopback. Other hosts see another address behind it.
        return address, address
    # The name of another host; or rank 0 is behind a translation of addresses, as a service of Kubernetes is.
    return host, address


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on this address only; 0: a free port. Raises TransportUnavailableError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        raise TransportUnavailableError(
            f"this rank cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}\n"
            + (PORT_TAKEN if error.errno == errno.EADDRINUSE else CANNOT_LISTEN)
        ) from error
    logger.debug("listening on %s port %d", address, listener.getsockname()[1])
    return listener
