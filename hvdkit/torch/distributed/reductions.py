"""Reductions and dtypes of torch.distributed in the terms of the engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvdkit.engine.ordered.calls import DTYPES
from hvdkit.kernels import ReduceOp

# By number in torch's RedOpType: the name, and the kernels' operation. The other numbers are bitwise operations.
REDUCTIONS = {
    0: ("sum", ReduceOp.SUM),
    1: ("avg", ReduceOp.SUM),
    2: ("product", ReduceOp.PRODUCT),
    3: ("min", ReduceOp.MIN),
    4: ("max", ReduceOp.MAX),
    8: ("premul_sum", ReduceOp.SUM),
}
AVERAGE, PREMULTIPLIED = 1, 8


class TorchReduction:
    """A reduction that the caller asked for: its number in torch's RedOpType, and the factor of a PREMUL_SUM."""

    __slots__ = ("factor", "number")

    def __init__(self, op: Any) -> None:
        # A ReduceOp equals its RedOpType and has another hash; the hash of a RedOpType costs more than its number.
        self.number = int(getattr(op, "op", op))
        self.factor = op.__getstate__()[1] if self.number == PREMULTIPLIED else None

    def scaled(self, tensor: Tensor) -> Tensor:
        """Return the tensor that is summed: a new one where each rank multiplies its own by a factor first."""
        return tensor if self.factor is None else tensor * self.factor


def name_of(tensor: Tensor) -> str:
    """Return a tensor's dtype for descriptions."""
    name = str(tensor.dtype)[6:]
    return name if name in _KNOWN else "bytes"


_KNOWN = frozenset(DTYPES[1:-1])
