"""The reductions that users name, with Horovod's numbers."""

from __future__ import annotations

from enum import IntEnum


class ReduceOp(IntEnum):
    """How tensors of several ranks become one. AVERAGE is SUM with a scale; ADASUM is an algorithm, not a kernel."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
