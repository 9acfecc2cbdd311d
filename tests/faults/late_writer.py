"""What one rank does where rank 1 is stopped in the middle of a pass over gradients in the arena, outlived, and woken.

Rank 1 stops with one half of its share summed. The others give the step up, wake it, wait for its end, and look whether
it has changed a byte of what they have; then they train on without it.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

import hvdkit.torch as hvd
from hvdkit.arena import ARENA
from hvdkit.engine.steps.node_pass import NodePass
from tests import measured

ELEMENTS = 1 << 18  # 1 MiB
TENSORS = 4
FAULTY_ROUND = 3
PATTERN = torch.arange(ELEMENTS) % 251 + 1.0  # whole numbers, so that sums are exact
LATE_RANK_ENDS_WITHIN_SECONDS = 60
WAKES_EVERY_MILLISECONDS = 200


class Training:
    """Steps of an optimizer whose gradients are summed in the arena."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(ELEMENTS)) for _ in range(TENSORS)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=1.0), op=hvd.Sum)

    def backward(self, number: int) -> None:
        loss = sum((one * PATTERN).sum() for one in self.parameters)
        (loss * number * (hvd.rank() + 1)).backward()

    def round(self, number: int, set_to_none: bool = True) -> None:
        """One step, whose gradients are the exact sums."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.backward(number)
        assert hvd.size() == 1 or all(ARENA.contains(one.grad.data_ptr()) for one in self.parameters)
        self.optimizer.step()
        self.check_sums(number)

    def check_sums(self, number: int) -> None:
        for one in self.parameters:
            assert torch.equal(one.grad, PATTERN * number * sum(range(1, hvd.size() + 1))), "a sum is wrong"

    def told(self) -> list[str]:
        """Hashes of all that a late rank could reach: gradients and weights."""
        tensors = [tensor for one in self.parameters for tensor in (one.grad, one.detach())]
        return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]


def stop_rank_1_in_its_next_pass() -> None:
    """With one half of its share summed."""
    run = NodePass.run

    def run_in_two_halves(
        self: NodePass, direction: Any, slots: Any, offsets: Any, share: tuple[int, int], *arguments: Any
    ) -> None:
        NodePass.run = run  # once
        begin, end = share
        middle = (begin + end) // 2
        run(self, direction, slots, offsets, (begin, middle), *arguments)
        print("RANK 1 STOPS", flush=True)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # to this thread, which so goes no further
        run(self, direction, slots, offsets, (middle, end), *arguments)
        print("RANK 1 HAS WRITTEN", flush=True)

    NodePass.run = run_in_two_halves


def wake_and_outlive(late: int) -> None:
    """Wake rank 1 and return when it has ended; ``late`` is its pidfd, of before another rank may have woken it."""
    deadline = time.monotonic() + LATE_RANK_ENDS_WITHIN_SECONDS
    poll = select.poll()
    poll.register(late, select.POLLIN)
    ended = False
    while not ended and time.monotonic() < deadline:
        with suppress(ProcessLookupError):  # again, since it may stop only after others take it for lost
            signal.pidfd_send_signal(late, signal.SIGCONT)
        ended = bool(poll.poll(WAKES_EVERY_MILLISECONDS))
    assert ended, "the rank that was woken does not end"


def outlive(training: Training, late: int, error: hvd.HorovodInternalError, goes_on: bool) -> None:
    print(f"RANK {hvd.rank()} NOTICED {error}".replace("\n", " | "), flush=True)
    before = training.told()
    wake_and_outlive(late)
    print(f"RANK {hvd.rank()} {'KEPT ALL' if training.told() == before else 'WAS CHANGED'}", flush=True)
    if not goes_on:
        return
    with suppress(hvd.HorovodInternalError):  # rank 1 never said goodbye
        hvd.shutdown()
    survivors = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != 1]
    hvd.init(comm=survivors)
    assert hvd.size() == len(survivors)
    with pytest.raises(ValueError, match=r"(?s)what a step that failed left.*HINT"):
        training.optimizer.step()
    training.backward(1)  # it adds to what was left
    with pytest.raises(ValueError, match=r"(?s)what a step that failed left.*HINT"):
        training.optimizer.step()
    for number, set_to_none in ((5, False), (6, False), (7, True), (8, True)):
        training.round(number, set_to_none)
    print(f"RANK {survivors[hvd.rank()]} WENT ON", flush=True)
    hvd.shutdown()


def main(scenario: str) -> None:
    hvd.init()
    late = os.pidfd_open(hvd.allgather_object(os.getpid())[1])
    training = Training()
    if scenario == "unprotected":  # shows that rank 1 does write
        ARENA.make_private = lambda offsets: None
    for number in range(1, FAULTY_ROUND + 1):
        if number == FAULTY_ROUND and hvd.rank() == 1:
            stop_rank_1_in_its_next_pass()
        try:
            training.round(number)
        except hvd.HorovodInternalError as error:
            if hvd.rank() != 1:
                outlive(training, late, error, goes_on=scenario == "protected")
                measured.exited(0)  # without the end of a job that has failed
            print(f"RANK 1 NOTICED {error}".replace("\n", " | "), flush=True)
            measured.exited(0)
    print(f"RANK {hvd.rank()} TOOK ALL STEPS", flush=True)
    measured.exited(0)


if __name__ == "__main__":
    main(sys.argv[1])
