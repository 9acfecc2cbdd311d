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
import time
from contextlib import suppress

import pytest

import hvdkit.torch as hvd
from hvdkit.arena import ARENA
from tests import measured
from tests.faults.mid_pass import FAULTY_ROUND, Fault, Training, strike_in_lanes

LATE_RANK_ENDS_WITHIN_SECONDS = 60
WAKES_EVERY_MILLISECONDS = 200


def hashes(training: Training) -> list[str]:
    """Return hashes of all that a late rank could reach: gradients and weights."""
    tensors = [tensor for one in training.parameters for tensor in (one.grad, one.detach())]
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]


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
    before = hashes(training)
    wake_and_outlive(late)
    print(f"RANK {hvd.rank()} {'KEPT ALL' if hashes(training) == before else 'WAS CHANGED'}", flush=True)
    if not goes_on:
        return
    with suppress(hvd.HorovodInternalError):  # rank 1 never said goodbye
        hvd.shutdown()
    survivors = [rank for rank in range(int(os.environ["WORLD_SIZE"])) if rank != 1]
    hvd.init(comm=survivors)
    assert hvd.size() == len(survivors)
    with pytest.raises(ValueError, match=r"(?s)was left by a step that failed.*HINT"):
        training.optimizer.step()
    training.backward(1)  # it adds to what was left
    with pytest.raises(ValueError, match=r"(?s)was left by a step that failed.*HINT"):
        training.optimizer.step()
    for number, set_to_none in ((5, False), (6, False), (7, True), (8, True)):
        training.round(number, set_to_none)
    print(f"RANK {survivors[hvd.rank()]} WENT ON", flush=True)
    hvd.shutdown()


def main(scenario: str) -> None:
    hvd.init()
    late = os.pidfd_open(hvd.allgather_object(os.getpid())[1])
    training, fault = Training(), Fault("stopped")
    strike_in_lanes(fault)
    if scenario == "unprotected":  # shows that rank 1 does write
        ARENA.make_private = lambda offsets: None
    for number in range(1, FAULTY_ROUND + 1):
        fault.armed = number == FAULTY_ROUND
        try:
            training.round(number)
            assert all(ARENA.contains(one.grad.data_ptr()) for one in training.parameters)
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
