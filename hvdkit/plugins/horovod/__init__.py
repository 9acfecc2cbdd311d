"""Horovod's engine as a transport of PyTorch's CPU tensors, here a device's; another transport carries the messages.

Process sets, which every rank of the job would have to make in Horovod, buckets of lossy codecs and CUDA tensors go by
the transport below. Sums have Horovod's order: all ranks hold the same bits, but not those of another transport. Halves
are summed in fp32, in rank order; 8 bits as 32. Horovod does not name a lost rank; the transport below does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.environments.launchers import HOROVODRUN
from hvdkit.transports import AUTO, Candidate, Job, choose, register

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport

_FOR_TORCH_ALONE = "carries PyTorch's tensors alone.\nHINT: unset HVDKIT_TRANSPORT: MPI or Gloo then carries the job."


class HorovodCandidate(Candidate):
    """The candidate in the list of transports. Ranks learn at its start whether Horovod is installed."""

    name = "horovod"
    controller = None

    def unavailable(self, job: Job) -> str | None:
        return None if job.for_torch else _FOR_TORCH_ALONE

    def suits(self, job: Job) -> str:
        return f"started by {job.world.launcher}" if job.for_torch and job.world.launcher == HOROVODRUN else ""

    def open(self, job: Job) -> Transport:
        from hvdkit.plugins.horovod.engine import find_native_part
        from hvdkit.plugins.horovod.transport import HorovodTransport

        below = replace(job, requested=AUTO, for_torch=False)  # a job without Horovod
        inner = choose(below)[0].open(below)
        return HorovodTransport(inner, find_native_part(), job.world, required=job.requested == self.name)


register(HorovodCandidate())
