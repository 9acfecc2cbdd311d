"""Where the buckets of a lane live, and how one is reduced: in host memory by our own algorithms, or on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.group import Group, Steps
from hvdkit.compression import CODECS
from hvdkit.engine.execution import effective
from hvdkit.engine.plan import Bucket
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import DeviceCollectives


@dataclass(frozen=True)
class Reduction:
    """What a plan does to its buckets."""

    op: ReduceOp
    prescale: float
    postscale: float
    codec: str


class Buckets(ABC):
    """Memory that can be sliced and assigned to like a flat array, and its reduction over a group."""

    on_device: bool

    @abstractmethod
    def allocate(self, bucket: Bucket) -> Any:
        """Zeros. The gaps between slots travel too: they must not hold signalling NaNs."""

    @abstractmethod
    def zeros(self, bucket: Bucket) -> Any:
        """What a rank that has joined contributes."""

    @abstractmethod
    def mark(self) -> Any:
        """What the calling thread has done so far; the reduction of what it wrote comes after that."""

    @abstractmethod
    def reduce(self, buffer: Any, marks: Sequence[Any], tag: int) -> Steps[None]:
        """Replace ``buffer`` by its reduction over all ranks."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held for reducing; nothing can be reduced afterwards."""


class HostBuckets(Buckets):
    """numpy arrays in memory of the transport's."""

    on_device = False

    def __init__(self, group: Group, reduction: Reduction) -> None:
        self._group = group
        self._reduction = reduction

    def allocate(self, bucket: Bucket) -> Any:
        buffer = self._group.transport.allocate(bucket.nbytes).view(bucket.dtype)
        buffer[...] = 0
        return buffer

    def zeros(self, bucket: Bucket) -> Any:
        return np.zeros(bucket.elements, bucket.dtype)

    def mark(self) -> Any:
        return None

    def reduce(self, buffer: Any, marks: Sequence[Any], tag: int) -> Steps[None]:
        reduction = self._reduction
        op, scale = effective(reduction.op, reduction.postscale, self._group.size)
        if reduction.prescale != 1.0:
            kernels.scale_into(buffer, buffer, reduction.prescale)
        yield from allreduce(self._group, buffer, op, scale, CODECS[reduction.codec], tag)

    def close(self) -> None:
        """The arrays go with the lane."""


class DeviceBuckets(Buckets):
    """Tensors of a device, reduced by the device's own collectives."""

    on_device = True

    def __init__(self, group: Group, reduction: Reduction, collectives: DeviceCollectives) -> None:
        self._group = group
        self._reduction = reduction
        self._collectives = collectives

    def allocate(self, bucket: Bucket) -> Any:
        return self._collectives.allocate(bucket.elements, str(bucket.dtype))

    def zeros(self, bucket: Bucket) -> Any:
        return self.allocate(bucket)

    def mark(self) -> Any:
        return self._collectives.mark()

    def reduce(self, buffer: Any, marks: Sequence[Any], tag: int) -> Steps[None]:
        reduction, size = self._reduction, self._group.size
        op, scale = effective(reduction.op, reduction.postscale, size)
        transfer = self._collectives.allreduce([buffer], op, reduction.prescale, scale, reduction.codec, marks)
        self._group.bytes_sent += 2 * buffer.nbytes * (size - 1) // size  # as a ring sends, whatever the library does
        yield [transfer]

    def close(self) -> None:
        self._collectives.close()
