"""The launcher without MPI: a worker for each rank, and a meeting place that no other program can take."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from hvdkit.launch.hosts import Placement
from hvdkit.launch.job import LaunchJob, for_other_hosts
from hvdkit.launch.meeting import address_of_rank_0, draw_port, ranks_of_hosts, torch_meeting
from hvdkit.launch.supervise import WORKER, Child
from hvdkit.launch.worker import torch_place


class MeetingPoint(NamedTuple):
    """The address at which rank 0 listens; ``socket`` is open already if rank 0 runs on this machine.

    ``torch``: the variables that say where ranks of torch.distributed meet, which is at another port.
    """

    address: str
    port: int
    torch: dict[str, str]
    socket: socket.socket | None = None


@contextmanager
def meeting_point(job: LaunchJob) -> Iterator[MeetingPoint]:
    """Choose where the ranks meet. If rank 0 runs on this machine, hold the port open until ``children`` takes it."""
    address = address_of_rank_0(job)
    if job.placements[0].host in job.remote:
        port = draw_port(job, taken=job.environment.get("MASTER_PORT", ""))
        yield MeetingPoint(address, int(port), torch_meeting(job, address, taken=port))
        return
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=len(job.placements)) as listener:
        port = listener.getsockname()[1]
        yield MeetingPoint(address, port, torch_meeting(job, address, taken=str(port)), listener)


def rank_environment(job: LaunchJob, placement: Placement, point: MeetingPoint) -> dict[str, str]:
    """Return the variables of a single rank: the job's, its place in hvdkit's and torch's words, and where to meet."""
    place = (placement.rank, placement.size, placement.local_rank, placement.local_size)
    environment = {
        **(for_other_hosts(job.environment) if placement.host in job.remote else job.environment),
        **{f"HVDKIT_{name.upper()}": str(number) for name, number in asdict(placement).items() if name != "host"},
        "HVDKIT_RENDEZVOUS_ADDR": point.address,
        "HVDKIT_RENDEZVOUS_PORT": str(point.port),
        **point.torch,
        **torch_place(place, ranks_of_hosts(job.placements)),
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
            function=job.options.function,
        )
        for placement in job.placements
    ]
    if point.socket is not None:
        result[0].pass_fds = (point.socket.detach(),)  # closed here when the child has it
    return result
