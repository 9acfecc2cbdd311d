"""A rank of a job that a fault strikes: it trains, sums by name, saves and leaves, and checks all numbers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd
from tests import measured
from tests.faults.injection import SLOW_SECONDS, Fault

STEPS = 6
ELEMENTS = 1 << 20  # 4 MiB: it takes a while
PATTERN = torch.arange(ELEMENTS) % 251 + 1.0  # whole numbers, so that sums are exact
UNSEEN_SECONDS = 60
CUT_SECONDS = 3


class Striker:
    """Has the fault strike when this rank comes to its moment."""

    def __init__(self, fault: Fault, rank: int) -> None:
        self._fault = fault if rank == fault.rank else None
        self._timer: threading.Timer | None = None

    def done(self) -> None:
        """Whatever was to strike by now has struck."""
        if self._timer is not None:
            self._timer.join()

    def at(self, moment: str) -> None:
        fault = self._fault
        if fault is None or fault.moment != moment:
            return
        self._fault = None
        if fault.kind in ("killed", "stopped"):
            # On another thread, so that it strikes whatever this one does by then.
            self._timer = threading.Timer(fault.delay, self._signal, [fault.kind])
            self._timer.start()
            if moment == "shutdown":
                self.done()  # after its goodbye nobody waits for this rank but MPI_Finalize, without end
            return
        time.sleep(fault.delay)
        tell("STRIKES", time.monotonic())
        if fault.kind == "raises":
            raise RuntimeError("this rank cannot go on")
        if fault.kind == "slow":
            time.sleep(SLOW_SECONDS)
        elif fault.kind == "launcher killed":
            time.sleep(UNSEEN_SECONDS)  # somebody else does it when they read this
        elif fault.kind == "cut":
            time.sleep(CUT_SECONDS)  # the same; whoever is cut off goes on by itself, and must notice too

    def _signal(self, kind: str) -> None:
        tell("STRIKES", time.monotonic())
        if kind == "killed":
            measured.killed()
        os.kill(os.getpid(), signal.SIGSTOP)


def tell(*words: object) -> None:
    """One line in one write, so that the lines of two ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def check(is_right: bool, what: str) -> None:
    if not is_right:
        tell("WRONG", what)
        measured.exited(99)


def work(fault: Fault, folder: Path) -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HVDKIT_RANK") or os.environ["HOROVOD_RANK"])
    striker = Striker(fault, rank)
    if fault.kind == "full disk":
        tell("STRIKES", time.monotonic())  # /dev/full is the timeline's file from the start
    striker.at("init")
    hvd.init()
    check(hvd.rank() == rank, "rank")
    parameter = torch.nn.Parameter(torch.full((ELEMENTS,), float(rank)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("weight", parameter)], op=hvd.Sum)
    striker.at("broadcast")
    hvd.broadcast_parameters([("weight", parameter)], root_rank=0)
    check(bool(parameter.eq(0).all()), "broadcast")
    factors = sum(range(1, hvd.size() + 1))
    for step in range(1, STEPS + 1):
        if step == 1:
            striker.at("first step")
        optimizer.zero_grad()
        ((parameter * PATTERN).sum() * step * (rank + 1)).backward()
        optimizer.step()
        check(torch.equal(parameter.grad, PATTERN * step * factors), f"step {step}")
        if step == STEPS // 2:
            striker.at("allreduce")
        total = hvd.allreduce(PATTERN * step * (rank + 1), op=hvd.Sum, name="large")
        check(torch.equal(total, PATTERN * step * factors), f"allreduce {step}")
        if step == STEPS - 1:
            striker.at("checkpoint")
            if hvd.rank() == 0:
                torch.save(parameter.detach(), folder / "checkpoint")
            hvd.barrier()
    tell("RANK", rank, "LEAVING", time.monotonic())
    striker.done()
    striker.at("shutdown")
    hvd.shutdown()


def main(fault_text: str, folder: str) -> None:
    fault = Fault.loads(fault_text)
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("HVDKIT_RANK") or os.environ["HOROVOD_RANK"]
    try:
        work(fault, Path(folder))
    except (hvd.HorovodInternalError, OSError) as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " | ")
        tell("RANK", rank, "NOTICED", time.monotonic(), text)
        sys.exit(7)
    tell("RANK", rank, "ENDED WELL", time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
