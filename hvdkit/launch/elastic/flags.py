"""The flags of an elastic job, spelled as in Horovod 0.28.1 (``horovod/runner/launch.py``)."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.launch import UsageError
from hvdkit.launch.elastic.actions import Limits
from hvdkit.launch.hosts import Host, parse_hosts

_FLAGS = {
    "least": "--min-np",
    "most": "--max-np",
    "slots_per_host": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown": "--blacklist-cooldown-range",
    "script": "--host-discovery-script",
    "blacklist": "--blacklist",
    "listen": "--listen",
}


@dataclass(frozen=True)
class ElasticOptions:
    """The limits of an elastic job, and the script that prints its hosts (None: they are those of the job).

    ``listen``: where hosts join that know the secret, None if none may; an empty host stands for this host's address.
    """

    limits: Limits
    script: str | None
    slots_per_host: int
    listen: tuple[str, int] | None = None
    secret_file: str = ""


@dataclass(frozen=True)
class JoinOptions:
    """The launcher whose job this host joins, and what this host offers."""

    address: tuple[str, int]
    secret_file: str
    host: Host
    start_timeout: float  # seconds in which the launcher must be found


def add_to(
    parser: argparse.ArgumentParser,
    whole: Callable[[str], float],
    count: Callable[[str], float],
    seconds: Callable[[str], float],
) -> None:
    """Add the flags; the functions parse whole numbers from 1 and from 0 on, and seconds."""
    group = parser.add_argument_group("elastic jobs: processes may fail, leave and join (docs/elastic.md)")
    add = group.add_argument
    about = "least number of processes; with fewer, the job waits, then ends (default -np)"
    add("--min-np", "--min-num-proc", dest="least", type=whole, metavar="N", help=about)
    about = "largest number of processes (default: all slots)"
    add("--max-np", "--max-num-proc", dest="most", type=whole, metavar="N", help=about)
    about = "slots of a host for which the discovery script prints no number (default 1)"
    add("--slots-per-host", type=whole, metavar="N", help=about)
    about = "seconds to wait for --min-np processes, and, separately, for each new process to be ready (default 600)"
    add("--elastic-timeout", type=seconds, metavar="S", help=about)
    about = "number of changes of membership after which the job ends (default: no limit)"
    add("--reset-limit", type=count, metavar="N", help=about)
    policy = group.add_mutually_exclusive_group().add_argument
    about = "close a slot after three failures in it (slot, the default), or a host after its first failure (host)"
    policy("--blacklist", choices=["slot", "host"], help=about)
    about = "close a host for LOW seconds after a failure, twice as long after the next failure, at most HIGH"
    policy("--blacklist-cooldown-range", dest="cooldown", type=seconds, nargs=2, metavar=("LOW", "HIGH"), help=about)
    about = "program that prints a line host:slots for each host; it runs each second"
    add("--host-discovery-script", dest="script", metavar="SCRIPT", help=about)
    about = "let hosts join at this port with the secret (0: any free port)"
    add("--listen", metavar="[ADDRESS:]PORT", help=about)
    about = "file with the secret for --listen and --join; --listen creates the file"
    add("--secret-file", metavar="FILE", help=about)
    about = "let this host join the job that listens at this address; on SIGTERM the host leaves the job"
    add("--join", metavar="HOST:PORT", help=about)
    add("--slots", type=whole, metavar="N", help="slots of a host that joins (default 1)")
    add("--hostname", metavar="NAME", help="name of a host that joins (default: its own name)")


def join_options_of(arguments: argparse.Namespace, start_timeout: float) -> JoinOptions:
    """Return the options of ``--join``. Raises UsageError."""
    if arguments.command or arguments.size is not None or arguments.listen is not None:
        raise UsageError("--join takes no command, -np or --listen\nHINT: give them to the hvdkitrun that listens")
    if arguments.secret_file is None:
        raise UsageError("--join without --secret-file\nHINT: copy the file of hvdkitrun --listen to this host")
    (host,) = parse_hosts(f"{arguments.hostname or socket.gethostname()}:{arguments.slots or 1}")
    return JoinOptions(_address(arguments.join, "--join"), arguments.secret_file, host, start_timeout)


def _address(text: str, flag: str) -> tuple[str, int]:
    """Return the host, or "", and the port of ``[HOST:]PORT``."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (not host and flag == "--join"):
        raise UsageError(f"cannot read {flag} {text}\nHINT: write it as in {flag} host1:4000")
    return host.strip("[]"), int(port)


def options_of(arguments: argparse.Namespace, hosts: list[Host] | None, rescues: bool = False) -> ElasticOptions | None:
    """Return the options if any of the flags was given, else None. ``hosts``: those that the user named.

    Raises UsageError.
    """
    listens = arguments.listen is not None
    if listens != (arguments.secret_file is not None):
        fact = "--listen without --secret-file" if listens else "--secret-file without --listen or --join"
        needed = "--secret-file" if listens else "one of them"
        raise UsageError(f"{fact}\nHINT: give {needed} too: hosts that join prove that they know the file's secret")
    given = [flag for name, flag in _FLAGS.items() if getattr(arguments, name) is not None]
    if not given:
        return None
    if arguments.controller == "mpi":
        hint = "leave --mpi out: elastic jobs use Gloo, since MPI ends a job if one of its processes fails"
        raise UsageError(f"--mpi cannot be combined with {', '.join(given)}\nHINT: {hint}")
    if arguments.script is not None and hosts is not None:
        raise UsageError("both a list of hosts and --host-discovery-script\nHINT: let the script print the hosts")
    start = arguments.size or arguments.least
    if start is None:
        raise UsageError(f"{given[0]} without a number of processes\nHINT: add -np N, the number to start with")
    least = arguments.least or start
    slots = None if hosts is None else sum(host.slots for host in hosts)
    may_change = listens or arguments.script is not None
    most = arguments.most or (1 << 30 if may_change else max(start, slots or start))
    if least > start:
        raise UsageError(f"--min-np {least} is more than -np {start}\nHINT: raise -np, or lower --min-np to {start}")
    if start > most:
        raise UsageError(f"-np {start} is more than --max-np {most}\nHINT: lower -np, or raise --max-np to {start}")
    if slots is not None and slots < start and not may_change:
        raise UsageError(
            f"-np {start} asks for more processes than there are slots ({slots})\n"
            f"HINT: lower -np to {slots}, or raise the slots of the hosts (-H HOST:SLOTS)"
        )
    cooldown = (float("inf"),) * 2 if arguments.blacklist == "host" else arguments.cooldown
    if cooldown is not None and cooldown[0] > cooldown[1]:
        raise UsageError("--blacklist-cooldown-range: LOW is larger than HIGH\nHINT: give LOW first, as in 10 60")
    timeout = 600.0 if arguments.elastic_timeout is None else arguments.elastic_timeout
    limits = Limits(
        start, least, most, timeout, arguments.reset_limit, None if cooldown is None else tuple(cooldown),
        hosts_may_change=may_change, rescues=rescues,
    )  # fmt: skip
    listen = _address(arguments.listen, "--listen") if listens else None
    return ElasticOptions(limits, arguments.script, arguments.slots_per_host or 1, listen, arguments.secret_file or "")
