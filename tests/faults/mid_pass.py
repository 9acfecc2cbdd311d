"""What one rank does in a fault test: rank 1 misbehaves in the middle of a pass through memory that ranks share.

A pass has two halves: a rank offers its part to the others, and later says that it is through with theirs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.collectives.staging import Pass, Staging
from hvdkit.engine.steps.node_pass import NodePass
from tests import measured

ROUNDS = 12
FAULTY_ROUND = 3
LATE_SECONDS = 2.0
HOLD_UP_SECONDS = 0.05
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

    def hold_up(self) -> None:
        """What the other ranks of its node do, so that it must wait for them."""
        if self.armed:
            time.sleep(HOLD_UP_SECONDS)


class Halting:
    """A pass that does something when it has to wait for others for the first time.

    These have nothing else in flight, so all slots were free and this rank has put chunks into them; and as it waits
    for more, there are chunks left.
    """

    def __init__(self, inner: Pass, halt: Callable[[], None]) -> None:
        self._inner, self._halt = inner, halt
        self._has_waited = False
        self.peer, self.awaited = inner.peer, inner.awaited

    def done(self) -> bool:
        finished = bool(self._inner._staged.advance(0.0))  # without watching for what is about to come
        if not finished and not self._has_waited:
            self._has_waited = True
            self._halt()
        return finished


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

    def strike_before_done(self: NodePass, number: int) -> list[Any]:
        fault.strike()
        return done(self, number)

    NodePass.run = run_in_two_halves
    NodePass.done = strike_before_done


def strike_in_staging(fault: Fault, struck_half: int) -> None:
    """With some chunks of a large tensor handed over, on the way to the node's sums (0) or back from them (1)."""
    run, halt = Staging.run, fault.strike if hvd.rank() == 1 else fault.hold_up

    def run_and_halt(self: Staging, half: int, *arguments: Any) -> Iterator[list[Any]]:
        for waits in run(self, half, *arguments):
            halts = half == struck_half
            yield [Halting(wait, halt) if halts and isinstance(wait, Pass) else wait for wait in waits]

    Staging.run = run_and_halt


class Training:
    """Steps of an optimizer, whose gradients are summed in a lane."""

    def __init__(self) -> None:
        self._parameters = [torch.nn.Parameter(torch.zeros(TENSOR_ELEMENTS)) for _ in range(TENSORS)]
        self._optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self._parameters, lr=1.0), op=hvd.Sum)

    def round(self, number: int) -> None:
        self._optimizer.zero_grad()
        loss = sum((one * PATTERN).sum() for one in self._parameters)
        (loss * number * (hvd.rank() + 1)).backward()
        self._optimizer.step()
        for one in self._parameters:
            assert torch.equal(one.grad, PATTERN * number * sum_of_ranks())
        self.check_after(number)

    def check_after(self, rounds: int) -> None:
        """The weights have taken exactly so many steps."""
        steps = sum(range(rounds + 1))
        for one in self._parameters:
            assert torch.equal(one.detach(), -PATTERN * steps * sum_of_ranks())


class Calls:
    """Large tensors that are summed by name."""

    def round(self, number: int) -> None:
        self._tensor = PATTERN.repeat(TENSORS) * number * (hvd.rank() + 1)
        result = hvd.allreduce(self._tensor, op=hvd.Sum, name="large")
        assert torch.equal(result, PATTERN.repeat(TENSORS) * number * sum_of_ranks())

    def check_after(self, rounds: int) -> None:
        """What the failed round was given is as it was."""
        assert torch.equal(self._tensor, PATTERN.repeat(TENSORS) * (rounds + 1) * (hvd.rank() + 1))


def sum_of_ranks() -> int:
    """All ranks' factors."""
    return sum(range(1, hvd.size() + 1))


def run_rounds(work: Training | Calls, fault: Fault) -> None:
    for number in range(1, ROUNDS + 1):
        if number == FAULTY_ROUND:
            fault.armed = True  # in a pass of this round or, if none had to wait for others, of a later one
        try:
            work.round(number)
        except hvd.HorovodInternalError as error:
            print(f"RANK {hvd.rank()} NOTICED {time.monotonic()} {error}".replace("\n", " | "), flush=True)
            work.check_after(number - 1)  # nothing was done with sums of which only a part is there
            print(f"RANK {hvd.rank()} KEPT", flush=True)
            sys.exit(7)


def main(scenario: str, channels: Sequence[str]) -> None:
    hvd.init()
    for channel in channels:
        fault = Fault(scenario)
        CHANNELS[channel](fault)
        run_rounds(Training() if channel == "lane" else Calls(), fault)
    print(f"RANK {hvd.rank()} WENT ON", flush=True)
    hvd.shutdown()


CHANNELS = {
    "lane": strike_in_lanes,
    "first pass": lambda fault: strike_in_staging(fault, 0),
    "second pass": lambda fault: strike_in_staging(fault, 1),
}

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
