"""Horovod's engine carries buffers, for which another transport carries messages: a candidate in the list of those.

Under the ``horovod`` transport the CPU is a device: buckets of gradients and named allreduce, broadcast and allgather
of all ranks go by the same ``TorchDeviceCollectives``, over a ``HorovodGroup`` in the place of a process group and
threads in the place of a stream. Horovod puts together what ranks give it by name, so launches number the names, in the
one order of the lane or the coordinator, and each runs on a thread of its own. Its native part is loaded without its
Python, so ``import horovod`` may give hvdkit.

- Start: when the transport below has connected all ranks (``Transport.start``), they tell each other what stands in the
  way. The engine starts on all of them or on none. Under MPI it uses MPI's ranks; elsewhere, rank 0 serves keys and
  values over HTTP, to the job's hosts only, until its Gloo has connected all. It finds its place and options in the
  environment only while it starts (``environments/horovod_engine``). Its own fusion is off: buckets are fused already,
  and what is fused by chance is summed in another order. Its cache is on, though no name comes twice: without it, its
  ranks exchange whole lists in every idle cycle. Since an operation costs it cycles, buckets are larger than elsewhere
  (``Transport.worthwhile_bytes``).
- What it is not given: process sets, since Horovod can only make one with all ranks of the job, and a lost rank would
  then end the others' processes; buckets of lossy codecs, which our kernels encode in host memory; what CUDA tensors do
  not do by NCCL either. These go by the transport below and by the node's memory.
- Halves are exchanged by its alltoall and allgather and summed here in fp32, in rank order; 8 bits are summed as 32.
- A lost rank: Horovod says that something failed, not who. The failed operation waits up to a second for the transport
  below to name the rank. An engine that cannot stop within 5 s is left behind, and a later ``hvd.init()`` says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.environments.launchers import HOROVODRUN
from hvdkit.transports import AUTO, Candidate, Job, choose, register

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport


class Horovods(Candidate):
    """All ranks see when it starts whether it is there."""

    name = "horovod"
    controller = None

    def unavailable(self, job: Job) -> str | None:
        """Whether tensors are another framework's."""
        if job.for_torch:
            return None
        return (
            "carries PyTorch's tensors, and this script uses another framework.\n"
            "HINT: unset HVDKIT_TRANSPORT: the job goes by MPI or Gloo, whichever started it."
        )

    def suits(self, job: Job) -> str:
        """Horovod's own launcher decides for it, where tensors are PyTorch's."""
        return f"started by {job.world.launcher}" if job.for_torch and job.world.launcher == HOROVODRUN else ""

    def open(self, job: Job) -> Transport:
        """Connect the ranks by what would carry them without."""
        from hvdkit.plugins.horovod.library import find_native_part
        from hvdkit.plugins.horovod.transport import HorovodTransport

        plain = replace(job, requested=AUTO, for_torch=False)
        inner = choose(plain)[0].open(plain)
        return HorovodTransport(inner, find_native_part(), job.world, required=job.requested == self.name)


register(Horovods())
