"""An elastic job: its options, the environment of its processes, the words for them, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdkit.environments import network
from hvdkit.environments.elastic import ADDRESS, HOST
from hvdkit.launch.elastic.actions import Limits
from hvdkit.launch.failures import shortened, signal_name
from hvdkit.launch.job import for_other_hosts
from hvdkit.launch.options import Options
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh

Offer = tuple[int, int, int, int]  # rank, size, local rank, local size


@dataclass(frozen=True)
class ElasticJob:
    """A job that is about to start. ``deadline``: the seconds after which a host that is silent counts as lost."""

    options: Options
    limits: Limits
    name: str
    environment: dict[str, str]
    ssh: Ssh
    output: Output
    deadline: float
    own_address: str  # at which other hosts reach this one
    say: Callable[[str], None]

    def environment_of(self, host: str, offer: Offer, is_remote: bool) -> dict[str, str]:
        """Return the variables of a process: the job's, and the place that it may expect, by Horovod's names."""
        names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
        environment = {
            **(for_other_hosts(self.environment) if is_remote else self.environment),
            **{f"HOROVOD_{name}": str(number) for name, number in zip(names, offer, strict=True)},
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_ELASTIC": "1",
            HOST: host,
        }
        if not is_remote:
            environment[ADDRESS] = self.own_address
        if self.options.interfaces:
            environment["GLOO_SOCKET_IFNAME"] = ",".join(self.options.interfaces)
        return environment

    def name_of(self, process: int, rank: int | None, host: str) -> str:
        """Return the words for a process: its rank, if it has one, and the label of its output."""
        name = f"process {process}" if rank is None else f"rank {rank}"
        return f"{name} on {host}" if rank in (None, process) else f"{name} (process {process}) on {host}"

    def end_of(self, process: int, rank: int | None, host: str, code: int) -> str:
        """Return the words for the end of a process that failed."""
        how = f"was killed by signal {signal_name(-code)} ({-code})" if code < 0 else f"exited with code {code}"
        return f"{self.name_of(process, rank, host)} {how}"

    def with_error(self, text: str, process: int) -> str:
        """Return the words with the error of a process that told it, or the cause of its end.

        Called once its output is printed.
        """
        record = self.output.failures.records.get(process)
        return f"{text}{self.output.causes[process]}" if record is None else f"{text} ({shortened(record.error)})"


class ProcessEnd(NamedTuple):
    """The end of a process. ``rank``: its number, where it never had a rank. ``code``: as in subprocess."""

    process: int
    rank: int
    code: int


@dataclass
class ElasticOutcome:
    """The end of an elastic job.

    ``reason``: the reason of its failure, "" for success. ``signal``: the signal that ended it. ``ends``: the processes
    that ended in its last generation, in their order.
    """

    reason: str | None = None
    signal: int | None = None
    ends: list[ProcessEnd] = field(default_factory=list)

    def verdict(self) -> tuple[int, str]:
        """Return the exit status and the words with which hosts that joined end."""
        if self.signal is not None:
            return 1, f"hvdkitrun ended the job after {signal_name(self.signal)}"
        return (1, f"the job ended: {self.reason}") if self.reason else (0, "the job has ended with success")


def address_here(interfaces: list[str], may_be_elsewhere: bool) -> str:
    """Return the address at which processes on this machine listen."""
    if interfaces:
        return network.interface_address(interfaces[0])
    return network.own_address() if may_be_elsewhere else network.LOOPBACK
