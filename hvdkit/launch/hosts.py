"""The placement of ranks: from ``-H h1:2,h2:2`` or a host file to the host of every rank."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from hvdkit.launch import UsageError

_NAME = r"(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\])"  # a leading dash would be an option of ssh
_HOST = re.compile(rf"(?P<name>{_NAME}):(\d+)", re.ASCII)
_FILE_LINE = re.compile(rf"(?P<name>{_NAME})(?:\s+slots\s*=\s*(\d+)|:(\d+))?", re.ASCII)


@dataclass(frozen=True)
class Host:
    """A machine and the number of ranks that may run on it."""

    name: str
    slots: int


@dataclass(frozen=True)
class Placement:
    """The host and the numbers of a rank."""

    host: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of ``h1:2,h2:2``."""
    hint = "write each host as name:slots, joined by commas, as in -H host1:2,host2:4"
    entries = [entry.strip() for entry in text.split(",")]
    hosts = [_host(_HOST, entry, f"{entry!r} in the host list {text!r}\nHINT: {hint}") for entry in entries]
    return _without_doubles(hosts, text)


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of a file with lines ``name slots=N``; ``#`` starts a comment, the default is a single slot."""
    hosts: list[Host] = []
    hint = "write each host on its own line as: host1 slots=2"
    for number, line in enumerate(text.splitlines(), start=1):
        if line := line.partition("#")[0].strip():
            hosts.append(_host(_FILE_LINE, line, f"line {number} of the host file {path}: {line!r}\nHINT: {hint}"))
    if not hosts:
        raise UsageError(f"the host file {path} names no host\nHINT: write a line such as: host1 slots=2")
    return _without_doubles(hosts, path)


def parse_discovered(text: str, slots: int) -> list[Host]:
    """Return the hosts that a discovery script has printed, each on a line as ``name`` or ``name:slots``."""
    hint = "the script prints each host on its own line as: host1:2"
    hosts = []
    for line in filter(None, map(str.strip, text.splitlines())):
        entry = line if re.search(r":\d+$", line) else f"{line}:{slots}"
        hosts.append(_host(_HOST, entry, f"{line!r} in the output of the discovery script\nHINT: {hint}"))
    return _without_doubles(hosts, "the output of the discovery script")


def _host(pattern: re.Pattern[str], text: str, about: str) -> Host:
    """Return the host that a text names. Raises UsageError with ``about``, which quotes the text and has a hint."""
    match = pattern.fullmatch(text)
    slots = 0 if match is None else int(next(filter(None, match.groups()[1:]), 1))
    if match is None or slots < 1:
        raise UsageError(f"cannot read {about}")
    return Host(match["name"].strip("[]"), slots)  # brackets keep the colons of an IPv6 address from the slots


def _without_doubles(hosts: list[Host], where: str) -> list[Host]:
    names = [host.name for host in hosts]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        hint = "name each host once, with all its slots"
        raise UsageError(f"named more than once in {where!r}: {', '.join(doubles)}\nHINT: {hint}")
    return hosts


def assign_slots(hosts: list[Host], size: int) -> list[Placement]:
    """Return the placements of ranks 0 to size - 1; each host is filled before the next."""
    available = sum(host.slots for host in hosts)
    if size > available:
        slots = f"slots ({available}) on {', '.join(f'{host.name}:{host.slots}' for host in hosts)}"
        hint = f"lower -np to {available}, or raise the slots after the colon; more slots than cores are allowed"
        raise UsageError(f"-np {size} asks for more processes than there are {slots}\nHINT: {hint}")
    places = [(host.name, local_rank) for host in hosts for local_rank in range(min(host.slots, size))][:size]
    local_sizes = Counter(name for name, _ in places)
    return [
        Placement(name, rank, size, local_rank, local_sizes[name]) for rank, (name, local_rank) in enumerate(places)
    ]
