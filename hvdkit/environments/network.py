"""Which of this host's addresses a job uses: those of a named interface, the loopback, or one that others reach."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping

import psutil

LOOPBACK = "127.0.0.1"
# Reserved for documentation: nobody has it, so the way there is the way out of this host.
_SOMEWHERE_ELSE = "198.51.100.1"

# To connect there is to connect to oneself; to listen there would be to listen everywhere.
_UNSPECIFIED = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104


def named_interfaces(environ: Mapping[str, str] | None = None) -> list[str]:
    """The network interfaces that the user, ``hvdkitrun`` or ``horovodrun`` named; empty if nobody did."""
    environ = os.environ if environ is None else environ
    text = environ.get("GLOO_SOCKET_IFNAME") or environ.get("HOROVOD_GLOO_IFACE") or ""
    return [name for name in text.split(",") if name]


def interface_address(interface: str) -> str:
    """The first IPv4 address of a network interface, else its first IPv6 one that is no link-local one.

    Raises LookupError where there is no such interface, or none with an address; it names those that are there.
    """
    known = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in known.get(interface, []):
            if entry.family == family and "%" not in entry.address:
                return str(entry.address)
    raise LookupError(
        f"there is no network interface {interface!r} with an address on {socket.gethostname()}, "
        f"only {', '.join(sorted(known))}"
    )


def own_addresses() -> list[str]:
    """Every address of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for known in psutil.net_if_addrs().values() for entry in known if entry.family in families]
    return sorted({entry.address.partition("%")[0] for entry in entries})


def interface_of(address: str) -> str:
    """The name of the interface that an address of this host belongs to; "" where none has it."""
    known = psutil.net_if_addrs()
    return next((name for name in known if any(entry.address == address for entry in known[name])), "")


def address_towards(host: str, port: int = 1) -> str:
    """This host's address on the route to another. Raises OSError where there is no route, or no such host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; it only asks the kernel for the route
        return str(probe.getsockname()[0])


def addresses_of(host: str) -> list[str]:
    """Where a connection to this host goes, IPv4 before IPv6. Raises OSError for a name that is not known."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    found = [_UNSPECIFIED.get(address, address) for address in found]
    return sorted(dict.fromkeys(found), key=lambda address: ":" in address)


def is_own(address: str) -> bool:
    """Whether it is an address of this host: only these can be bound here."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def is_loopback(host: str) -> bool:
    """Whether this name or address means, on every host, that host itself."""
    try:
        return ipaddress.ip_address(_UNSPECIFIED.get(host, host).partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def own_address(towards: str | None = None) -> str:
    """One address of this host that other hosts reach.

    What this host's name stands for, else the address on the route to the host ``towards``, or on the one out of here;
    the loopback where there is no network.
    """
    ways: list[Callable[[], list[str]]] = [
        lambda: addresses_of(socket.gethostname()),
        lambda: [address_towards(towards or _SOMEWHERE_ELSE)],
        lambda: [address_towards(_SOMEWHERE_ELSE)],
    ]
    for way in ways:
        try:
            found = [address for address in way() if not is_loopback(address) and is_own(address)]
        except OSError:
            continue
        if found:
            return found[0]
    return LOOPBACK
