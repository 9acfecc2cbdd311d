"""The network of a job: this host's addresses that other ranks use, and the job's secret."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Mapping

import psutil

from hvdkit import config
from hvdkit.errors import EnvironmentConflictError

LOOPBACK = "127.0.0.1"
# An address reserved for documentation: no host has it, so the route to it is the route out of this host.
_ELSEWHERE = "198.51.100.1"
# Connecting to an unspecified address reaches the host itself; listening there would listen on all interfaces.
_UNSPECIFIED = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104
_INTERNET = (socket.AF_INET, socket.AF_INET6)

SHORTEST_SECRET, LONGEST_SECRET = 16, 4096  # bytes


def named_interfaces(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the network interfaces that the user, ``hvdkitrun`` or ``horovodrun`` named."""
    environ = os.environ if environ is None else environ
    text = environ.get("GLOO_SOCKET_IFNAME") or environ.get("HOROVOD_GLOO_IFACE") or ""
    return [name for name in text.split(",") if name]


def interface_address(interface: str) -> str:
    """Return the first IPv4 address of a network interface, else its first IPv6 address that is not link-local.

    Raises LookupError, which lists the interfaces of this host, if there is no such interface or address.
    """
    interfaces = psutil.net_if_addrs()
    for family in _INTERNET:
        for entry in interfaces.get(interface, []):
            if entry.family == family and "%" not in entry.address:
                return str(entry.address)
    fact = f"there is no network interface {interface!r} with an address on {socket.gethostname()}"
    raise LookupError(f"{fact}, only {', '.join(sorted(interfaces))}")


def own_addresses() -> list[str]:
    """Return every address of this host."""
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in _INTERNET]
    return sorted({entry.address.partition("%")[0] for entry in entries})


def interface_of(address: str) -> str:
    """Return the name of the interface that has this address, or ""."""
    interfaces = psutil.net_if_addrs()
    return next((name for name in interfaces if any(entry.address == address for entry in interfaces[name])), "")


def address_towards(host: str, port: int = 1) -> str:
    """Return this host's address on the route to another host. Raises OSError if no route or host is there."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing; it only asks the kernel for the route
        return str(probe.getsockname()[0])


def addresses_of(host: str) -> list[str]:
    """Return the addresses to connect to for a host name, IPv4 first. Raises OSError for an unknown name."""
    addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    addresses = [_UNSPECIFIED.get(address, address) for address in addresses]
    return sorted(dict.fromkeys(addresses), key=lambda address: ":" in address)


def is_own(address: str) -> bool:
    """True if this host has the address: only its own addresses can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def is_free(port: int) -> bool:
    """True if nothing on this host has this port on an IPv4 address."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def is_loopback(host: str) -> bool:
    """True if this name or address means, on every host, that host itself."""
    try:
        return ipaddress.ip_address(_UNSPECIFIED.get(host, host).partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def own_address(towards: str | None = None) -> str:
    """Return an address of this host that other hosts reach; without a network, the loopback address.

    The address of this host's name comes first, then that on the route to ``towards``, then on the route out of here.
    """
    lookups: list[Callable[[], list[str]]] = [
        lambda: addresses_of(socket.gethostname()),
        lambda: [address_towards(towards or _ELSEWHERE)],
        lambda: [address_towards(_ELSEWHERE)],
    ]
    for lookup in lookups:
        with contextlib.suppress(OSError):
            for address in lookup():
                if not is_loopback(address) and is_own(address):
                    return address
    return LOOPBACK


def job_secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the content of the file that HVDKIT_SECRET_FILE names, None if it names none.

    Raises EnvironmentConflictError if the file cannot be read, others can read it, or it holds too little.
    """
    path = config.value_of("secret_file", os.environ if environ is None else environ)
    if not path:
        return None
    try:
        # O_NONBLOCK: a pipe without a writer is refused below, not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        hint = "the same file must be on every host and in every container; hvdkitrun makes one only if you name none"
        raise _refused_secret(path, f"cannot be read: {error.strerror}", hint) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused_secret(path, "is not a file", "name a file")
        if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise _refused_secret(path, "can be read or changed by others", "make it yours alone: chown, and chmod 600")
        secret = os.read(descriptor, LONGEST_SECRET + 1).strip()
    finally:
        os.close(descriptor)
    if not SHORTEST_SECRET <= len(secret) <= LONGEST_SECRET:
        fact = f"must have from {SHORTEST_SECRET} to {LONGEST_SECRET} bytes"
        raise _refused_secret(path, fact, "make one: (umask 077; openssl rand -hex 32 > secret)")
    return secret


def _refused_secret(path: str, fact: str, hint: str) -> EnvironmentConflictError:
    return EnvironmentConflictError(f"the job's secret HVDKIT_SECRET_FILE={path} {fact}\nHINT: {hint}")
