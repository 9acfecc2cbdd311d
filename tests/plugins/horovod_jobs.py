"""What ranks run in jobs that end badly: ``python -m tests.plugins.horovod_jobs NAME``."""

from __future__ import annotations

import sys
import time

import torch

import hvdkit.torch as hvd
from tests import measured


def lost() -> None:
    """Rank 1 is killed while the others wait for it; then they print what they were told."""
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if hvd.rank() == 1:
        measured.killed()
    started = time.monotonic()
    try:
        while True:
            hvd.allreduce(torch.ones(3), name="step")
    except hvd.HorovodInternalError as error:
        print(f"told after {time.monotonic() - started:.1f} s: {error}", flush=True)
    hvd.shutdown()
    print("ended", flush=True)


def only_some_call_shutdown() -> None:
    """Rank 0 leaves; an operation of the others fails, and they can leave too."""
    hvd.init()
    hvd.allreduce(torch.ones(3))
    if hvd.rank() != 0:
        try:
            hvd.allreduce(torch.ones(3), name="late")
        except hvd.HorovodInternalError as error:
            print(f"told: {error}", flush=True)
    hvd.shutdown()
    print("ended", flush=True)


def does_not_start() -> None:
    """The engine starts on no rank, which rank 1 knows."""
    from hvdkit.plugins.horovod.engine import NativeHorovod

    NativeHorovod.start = lambda self, rank, *_: "it refused" if rank == 1 else ""  # type: ignore[method-assign]
    carried()


def carried() -> None:
    hvd.init()
    from hvdkit.engine.session import runtime

    total = hvd.allreduce(torch.full((3,), hvd.rank() + 1.0), op=hvd.Sum)[0].item()
    print(f"rank {hvd.rank()}: {runtime.engine().transport.name} {total}", flush=True)
    hvd.shutdown()


def more_operations_than_horovods_cache_holds() -> None:
    hvd.init()
    one = torch.ones(2)
    for _ in range(1100):
        assert hvd.allreduce(one, op=hvd.Sum).tolist() == [hvd.size()] * 2
    hvd.shutdown()


def carried_as_horovod() -> None:
    """The same where ``import horovod`` gives hvdkit."""
    import hvdkit

    hvdkit.install_as_horovod()
    import horovod.torch

    assert horovod.torch is hvd
    carried()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
