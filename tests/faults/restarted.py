"""A rank of a job of torchrun that sums; one of them dies in each of its first starts, and torchrun starts all anew."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd
from tests import measured
from tests.waiting import until

WAITING_SECONDS = 20.0


def wait_for_others(folder: Path, me: str, start: int) -> None:
    """Until another rank is about to call init, so that it has probably said so when this one dies."""
    others = f"in start {start} of {me}, that another rank begins"
    until(lambda: any(path.name.split(".")[1] != me for path in folder.glob("begins.*")), WAITING_SECONDS, others)
    time.sleep(0.1)


def main(folder: Path, dying: str, moments: list[str]) -> None:
    me = f"{os.environ['AGENT']}{os.environ['LOCAL_RANK']}"
    start = len(list(folder.glob(f"start.{me}.*")))
    (folder / f"start.{me}.{start}").touch()
    moment = moments[start] if me == dying and start < len(moments) else ""
    if moment == "before init":
        wait_for_others(folder, me, start)
        measured.exited(3)
    begins = folder / f"begins.{me}.{os.getpid()}"
    begins.touch()
    hvd.init()
    begins.unlink()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    assert total == sum(range(hvd.size() + 1)), total
    if moment == "after a sum":
        measured.exited(3)
    hvd.barrier()  # nobody ends well in an attempt in which somebody dies
    print(f"RANK {hvd.rank()} of {me} ENDED WELL in start {start} of its own", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
