"""The parent of all codecs, with the questions that other modules ask of a codec."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvdkit.compression.state import RESIDUAL

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Codec(ABC):
    """A way to encode gradients. The answers here are those of casts, whose payloads are plain numbers.

    Other modules ask a codec, and never test its class.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]  # payloads lose something
    encodes: ClassVar[bool] = False  # it is a LossyCodec: sums of payloads have a way of their own, for floats only
    all_tensors: ClassVar[bool] = True  # it encodes small tensors too, unless the user says otherwise
    whole_tensors: ClassVar[bool] = False  # it must encode a tensor as a whole, not a part of it
    needs_state: ClassVar[bool] = False  # it is of no use where nothing is kept from step to step
    has_momentum: ClassVar[bool] = False  # it gives gradients the momentum, which the optimizer must not have

    @property
    def everywhere(self) -> bool:
        """True if ranks encode for the other ranks of their node too."""
        return False

    @property
    def keeps(self) -> tuple[str, ...]:
        """The kinds of arrays in the codec's state."""
        return ()

    @property
    def owes(self) -> Mapping[str, float]:
        """The factor of each kind of array with which it can be added to the next gradient in place of being kept."""
        return {RESIDUAL: 1.0}

    @property
    def on_device(self) -> bool:
        """True if gradients on a device are encoded there."""
        return True

    @property
    def warmup_steps(self) -> int:
        """The number of first steps in which it sends more than later."""
        return 0

    @property
    def summary(self) -> str:
        """The codec and its parameters, for ranks to compare and people to read."""
        if not dataclasses.is_dataclass(self):
            return self.name
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        fields = [f"{name}={value.item() if isinstance(value, np.generic) else value!r}" for name, value in values]
        return f"{self.name}({', '.join(fields)})"

    def parameters_not_in_summary(self) -> list[str]:
        """Return attributes that are no fields of the dataclass, which ranks could not compare."""
        fields: list[str] = []
        if dataclasses.is_dataclass(self):
            fields = [field.name for field in dataclasses.fields(self)]

        def is_parameter(name: str) -> bool:
            is_cached = isinstance(getattr(type(self), name, None), functools.cached_property)
            return not (name in fields or name.startswith("_") or is_cached)

        return sorted(filter(is_parameter, vars(self)))

    def wire_itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes of an element of ``dtype`` on the wire, where numbers travel."""
        return dtype.itemsize
