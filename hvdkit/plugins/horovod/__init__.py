"""Horovod's engine carries buffers, for which another transport carries messages: a candidate in the list of those."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.environments import horovodrun
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
        """Horovod's own launcher decides for it."""
        return f"started by {job.world.launcher}" if job.world.launcher == horovodrun.name else ""

    def open(self, job: Job) -> Transport:
        """Connect the ranks by what would carry them without."""
        from hvdkit.plugins.horovod.library import find_native_part
        from hvdkit.plugins.horovod.transport import HorovodTransport

        plain = replace(job, asked=AUTO, for_torch=False)
        inner = choose(plain)[0].open(plain)
        return HorovodTransport(inner, find_native_part(), job.world, required=job.asked == self.name)


register(Horovods())
