"""A small named operation costs what Python calls cost, so their number is held: times differ between machines."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import hvdkit
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session.session import Session
from hvdkit.kernels import ReduceOp
from tests.threads import on_threads

HVDKIT = os.path.dirname(hvdkit.__file__) + os.sep


def calls_of(action: Callable[[], Any]) -> Counter[str]:
    """The Python functions that a thread enters, generators each time that they go on."""
    entered: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Comprehensions are functions or not, as the version of Python has it.
        if event == "call" and code.co_filename.startswith(HVDKIT) and not code.co_name.startswith("<"):
            entered[code.co_name] += 1

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return entered


def test_a_small_allreduce_by_name_enters_no_more_than_seventy_functions():
    def run(session: Session) -> Counter[str]:
        array, request = np.ones(4, np.float32), ReduceRequest(ReduceOp.AVERAGE)

        def operation() -> None:
            session.engine.named.allreduce([array], request, Call("loss")).wait()

        operation()  # the first one makes what all need
        return calls_of(operation)

    (entered,) = on_threads(1, run)
    assert entered is not None
    assert entered.total() <= 70, entered.most_common()


def test_a_round_in_which_nothing_happens_enters_no_more_than_eight_functions():
    def run(session: Session) -> Counter[str]:
        engine = session.engine
        engine.driver.stop()
        engine.rounds.run()
        return min(
            (calls_of(engine.rounds.run) for _ in range(3)), key=Counter.total
        )  # some rounds look for lost ranks

    for entered in on_threads(2, run):
        assert entered is not None
        assert entered.total() <= 8, entered.most_common()
