"""What one rank does in a fault test: rank 1 misbehaves as told, the others print how they learnt of it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import torch

import hvdkit.torch as hvd
from hvdkit.engine.ranks import turns
from hvdkit.engine.session import runtime
from hvdkit.engine.session.ending import ENDING
from hvdkit.engine.steps.node_pass import NodePass
from tests import measured


def misbehave(scenario: str) -> None:
    if scenario == "raises":
        raise RuntimeError("this rank cannot go on")
    if scenario == "exits":
        sys.exit(3)
    if scenario == "exits-late":
        ENDING.abort = lambda code: time.sleep(30)  # somebody else has to end the job
        sys.exit(3)
    if scenario == "killed":
        measured.killed()
    if scenario.startswith("stopped"):
        print(f"stopping {os.getpid()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if scenario == "leaves":
        hvd.shutdown()
        time.sleep(2)
        sys.exit(0)
    if scenario.startswith("keeps the GIL"):
        libc = ctypes.PyDLL(None)  # whose functions keep Python's lock
        libc.sleep(int(scenario.rpartition(" ")[2]))
    if scenario == "late":
        time.sleep(4)
    if scenario == "interrupted":
        NodePass.run = interrupt


def interrupt(*arguments: object) -> None:
    """What Ctrl-C does to the thread that is summing."""
    raise KeyboardInterrupt


def wait_for_rank_1(channel: str, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    if channel in ("named", "repeated"):
        hvd.allreduce(torch.ones(1000), name="grad")
    elif channel == "polled":
        handles = [hvd.allreduce_async(torch.ones(1000), name=f"grad{number}") for number in range(2)]
        while not all(hvd.poll(handle) for handle in handles):  # the engine's own thread must notice
            time.sleep(0.01)
        errors = []
        for handle in handles:
            try:
                hvd.synchronize(handle)
            except hvd.HorovodInternalError as error:
                errors.append(error)
        if errors:
            assert len(errors) == 2, "one of two handles ended well though its rank is lost"
            raise errors[0]
    elif channel == "joined":
        hvd.join()
    else:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def main(scenario: str, channel: str) -> None:
    if channel == "repeated":
        os.sched_getaffinity = lambda process: set(range(64))  # where a rank has no core it asks the coordinator
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    started = time.monotonic()
    try:
        # A good round first, which a slow rank may still be in when rank 1 is through and gone.
        if channel != "joined":
            wait_for_rank_1(channel, optimizer, model)
        else:
            hvd.barrier()
        if channel == "repeated":
            turns.PATIENCE_SECONDS = 60.0  # beside other tests ranks come late
            for _ in range(8):
                wait_for_rank_1(channel, optimizer, model)
            assert runtime.engine().groups.small_reductions[0].reduced >= 8
            turns.PATIENCE_SECONDS = 200e-6
        optimizer.zero_grad()
        if hvd.rank() == 1:
            misbehave(scenario)
        started = time.monotonic()
        try:
            wait_for_rank_1(channel, optimizer, model)
        except KeyboardInterrupt:
            optimizer.step()  # half of the sum is missing
    except hvd.HorovodInternalError as error:
        print(f"RANK {hvd.rank()} NOTICED {time.monotonic() - started:.1f} {error}".replace("\n", " | "), flush=True)
        if scenario.endswith("and-caught"):
            return  # and end as if nothing had happened
        sys.exit(7)
    print(f"RANK {hvd.rank()} WENT ON", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
