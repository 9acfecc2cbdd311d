"""Horovod's engine as a transport of PyTorch's CPU tensors; another transport carries the messages.

The CPU is a device here: buckets and named operations go through ``DeviceCollectives``. Process sets, which every
rank of the job would have to make in Horovod, buckets of lossy codecs and CUDA tensors go by the transport below. Sums
have an order of Horovod's own: all ranks hold the same bits, but not those of another transport. Halves are summed here
in fp32, in rank order; 8 bits are summed as 32. Horovod does not name a lost rank; the transport below does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.environments.launchers import HOROVODRUN
from hvdkit.transports import AUTO, Candidate, Job, choose, register

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport


class HorovodCandidate(Candidate):
    """The candidate for PyTorch's tensors. Ranks learn at its start whether Horovod is installed."""

    name = "horovod"
    controller = None

    def unavailable(self, job: Job) -> str | None:
        if job.for_torch:
            return None
        return (
            "carries PyTorch's tensors only, but this script uses another framework.\n"
            "HINT: unset HVDKIT_TRANSPORT: the job then uses MPI or Gloo, whichever started it."
        )

    def suits(self, job: Job) -> str:
        return f"started by {job.world.launcher}" if job.for_torch and job.world.launcher == HOROVODRUN else ""

    def open(self, job: Job) -> Transport:
        from hvdkit.plugins.horovod.engine import find_native_part
        from hvdkit.plugins.horovod.transport import HorovodTransport

        plain = replace(job, requested=AUTO, for_torch=False)
        inner = choose(plain)[0].open(plain)
        return HorovodTransport(inner, find_native_part(), job.world, required=job.requested == self.name)


register(HorovodCandidate())
