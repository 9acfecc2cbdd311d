"""What one rank does in a fault test: rank 1 misbehaves in the middle of a pass through memory that ranks share."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.engine.steps.node_pass import NodePass
from tests import measured

ROUNDS = 12
FAULTY_ROUND = 3
LATE_SECONDS = 2.0
TENSOR_ELEMENTS = 1 << 18  # 1 MiB
TENSORS = 8
# Whole numbers, so that sums are exact, and different ones, so that nothing can lie in a wrong place unseen.
PATTERN = torch.arange(TENSOR_ELEMENTS) % 251 + 1.0


class Fault:
    """What rank 1 does, once, when it is armed and gets to the place in question."""

    def __init__(self, scenario: str) -> None:
        self._scenario = scenario
        self.armed = False

    def strike(self) -> None:
        if not self.armed:
            return
        self.armed = False
        print(f"STRIKES {time.monotonic()} {os.getpid()}", flush=True)
        if self._scenario == "killed":
            measured.killed()
        elif self._scenario == "stopped":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread, which so goes no further
        else:
            time.sleep(LATE_SECONDS)


def strike_in_lanes(fault: Fault) -> None:
    """With one half of this rank's share summed; or, if it has no share, before it says that it is done."""
    if hvd.rank() != 1:
        return
    run, done = NodePass.run, NodePass.done

    def run_in_two_halves(
        self: NodePass, direction: Any, slots: Any, offsets: Any, share: tuple[int, int], *arguments: Any
    ) -> None:
        begin, end = share
        middle = (begin + end) // 2 if fault.armed else end
        run(self, direction, slots, offsets, (begin, middle), *arguments)
        if middle < end:
            fault.strike()
            run(self, direction, slots, offsets, (middle, end), *arguments)
            print("RANK 1 HAS WRITTEN", flush=True)

    def strike_before_done(self: NodePass, number: int) -> list[Any]:
        fault.strike()
        return done(self, number)

    NodePass.run = run_in_two_halves
    NodePass.done = strike_before_done


class Training:
    """Steps of an optimizer, whose gradients are summed in a lane."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(TENSOR_ELEMENTS)) for _ in range(TENSORS)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=1.0), op=hvd.Sum)

    def backward(self, number: int) -> None:
        loss = sum((one * PATTERN).sum() for one in self.parameters)
        (loss * number * (hvd.rank() + 1)).backward()

    def round(self, number: int, set_to_none: bool = True) -> None:
        """Take a step, whose gradients must be the exact sums."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.backward(number)
        self.optimizer.step()
        for one in self.parameters:
            assert torch.equal(one.grad, PATTERN * number * sum_of_ranks()), "a sum is wrong"

    def check_after(self, rounds: int) -> None:
        steps = sum(range(rounds + 1))
        for one in self.parameters:
            assert torch.equal(one.detach(), -PATTERN * steps * sum_of_ranks())


def sum_of_ranks() -> int:
    return sum(range(1, hvd.size() + 1))


def main(scenario: str) -> None:
    hvd.init()
    fault, training = Fault(scenario), Training()
    strike_in_lanes(fault)
    for number in range(1, ROUNDS + 1):
        if number == FAULTY_ROUND:
            fault.armed = True
        try:
            training.round(number)
        except hvd.HorovodInternalError as error:
            print(f"RANK {hvd.rank()} NOTICED {time.monotonic()} {error}".replace("\n", " | "), flush=True)
            training.check_after(number - 1)  # nothing was done with sums of which only a part is there
            print(f"RANK {hvd.rank()} KEPT", flush=True)
            sys.exit(7)
        training.check_after(number)
    print(f"RANK {hvd.rank()} WENT ON", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
