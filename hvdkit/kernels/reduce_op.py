"""Reductions, with Horovod's numbers."""

from __future__ import annotations

from enum import IntEnum


class ReduceOp(IntEnum):
    """Reductions of the tensors of several ranks. AVERAGE is SUM with a scale; ADASUM is an algorithm, not a kernel."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
