"""The flags of an elastic job, spelled as in Horovod 0.28.1 (``horovod/runner/launch.py``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.launch import UsageError
from hvdkit.launch.elastic.actions import Limits
from hvdkit.launch.hosts import Host

_FLAGS = {
    "least": "--min-np",
    "most": "--max-np",
    "slots_per_host": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "cooldown": "--blacklist-cooldown-range",
    "script": "--host-discovery-script",
    "blacklist": "--blacklist",
}


@dataclass(frozen=True)
class ElasticOptions:
    """The limits of an elastic job, and the script that prints its hosts (None: they are those of the job)."""

    limits: Limits
    script: str | None
    slots_per_host: int


def add_to(
    parser: argparse.ArgumentParser,
    whole: Callable[[str], float],
    count: Callable[[str], float],
    seconds: Callable[[str], float],
) -> None:
    """Add the flags; the functions parse whole numbers from 1 and from 0 on, and seconds."""
    group = parser.add_argument_group("elastic jobs, in which processes come and go (docs/elastic.md)")
    add = group.add_argument
    add(
        "--min-np",
        "--min-num-proc",
        dest="least",
        type=whole,
        metavar="N",
        help="processes without which it ends (-np)",
    )
    add("--max-np", "--max-num-proc", dest="most", type=whole, metavar="N", help="most processes (all slots)")
    add("--slots-per-host", type=whole, metavar="N", help="of hosts without a number in the script's output (1)")
    about = "seconds to wait for enough processes, and for one to be ready (600)"
    add("--elastic-timeout", type=seconds, metavar="S", help=about)
    add("--reset-limit", type=count, metavar="N", help="how often processes may come or go before the job ends")
    policy = group.add_mutually_exclusive_group().add_argument
    policy(
        "--blacklist", choices=["slot", "host"], help="what a failure closes: its slot after three, or its host at once"
    )
    about = "close the host of a failure for LOW seconds, each time twice as long, up to HIGH"
    policy("--blacklist-cooldown-range", dest="cooldown", type=seconds, nargs=2, metavar=("LOW", "HIGH"), help=about)
    add(
        "--host-discovery-script",
        dest="script",
        metavar="SCRIPT",
        help="prints a line host:slots for each host there is",
    )


def options_of(arguments: argparse.Namespace, hosts: list[Host] | None) -> ElasticOptions | None:
    """Return the options if any of the flags was given, else None. ``hosts``: those that the user named.

    Raises UsageError.
    """
    given = [flag for name, flag in _FLAGS.items() if getattr(arguments, name) is not None]
    if not given:
        return None
    if arguments.controller == "mpi":
        hint = "leave --mpi away: elastic jobs use Gloo, since MPI ends a job of which a process fails"
        raise UsageError(f"--mpi does not go with {', '.join(given)}\nHINT: {hint}")
    if arguments.script is not None and hosts is not None:
        raise UsageError("both a list of hosts and --host-discovery-script\nHINT: let the script print the hosts")
    start = arguments.size or arguments.least
    if start is None:
        raise UsageError(f"{given[0]} without a number of processes\nHINT: add -np N, the number to start with")
    least = arguments.least or start
    slots = None if hosts is None else sum(host.slots for host in hosts)
    most = arguments.most or max(start, slots or (start if arguments.script is None else 1 << 30))
    if least > start:
        raise UsageError(f"--min-np {least} is more than -np {start}\nHINT: -np is the number to start with")
    if start > most:
        raise UsageError(f"-np {start} is more than --max-np {most}\nHINT: -np is the number to start with")
    if slots is not None and slots < start:
        raise UsageError(f"-np {start} asks for more processes than there are slots ({slots})\nHINT: lower -np, or -H")
    cooldown = (float("inf"),) * 2 if arguments.blacklist == "host" else arguments.cooldown
    if cooldown is not None and cooldown[0] > cooldown[1]:
        raise UsageError("--blacklist-cooldown-range: LOW is larger than HIGH\nHINT: as in 10 60")
    timeout = 600.0 if arguments.elastic_timeout is None else arguments.elastic_timeout
    limits = Limits(
        start, least, most, timeout, arguments.reset_limit, None if cooldown is None else tuple(cooldown),
        hosts_may_change=arguments.script is not None,
    )  # fmt: skip
    return ElasticOptions(limits, arguments.script, arguments.slots_per_host or 1)
