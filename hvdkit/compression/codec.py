"""What stands for gradients on the wire: the parent of all codecs, and what others ask of them."""

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
    """A way to encode gradients. What is answered here is true of casts, whose payloads are plain numbers.

    Others ask, and never look which class it is: what a codec is asked for is all that they need to know of it.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]  # whether anything is lost
    encodes: ClassVar[bool] = False  # as a LossyCodec: what it makes is summed in a way of its own, for floats only
    all_tensors: ClassVar[bool] = True  # whether it is for small tensors too, unless the user says otherwise
    whole_tensors: ClassVar[bool] = False  # whether it must see a tensor as a whole, not a part of it
    needs_state: ClassVar[bool] = False  # whether it is of no use where nothing is kept from step to step
    has_momentum: ClassVar[bool] = False  # whether gradients get from it the momentum that the optimizer must not have

    @property
    def everywhere(self) -> bool:
        """Whether ranks of a node encode for each other too."""
        return False

    @property
    def keeps(self) -> tuple[str, ...]:
        """The arrays that a state must have."""
        return ()

    @property
    def owes(self) -> Mapping[str, float]:
        """By array: which part of it, added to the next gradient, does what the array would have done if kept."""
        return {RESIDUAL: 1.0}

    @property
    def on_device(self) -> bool:
        """Whether gradients on a device are encoded there."""
        return True

    @property
    def warmup_steps(self) -> int:
        """For how many steps it sends more than it will later."""
        return 0

    @property
    def summary(self) -> str:
        """The codec and its parameters: what ranks compare, and people read."""
        if not dataclasses.is_dataclass(self):
            return self.name
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        fields = [f"{name}={value.item() if isinstance(value, np.generic) else value!r}" for name, value in values]
        return f"{self.name}({', '.join(fields)})"

    def parameters_not_in_summary(self) -> list[str]:
        """What an object keeps that is no field of its dataclass: ranks could not tell whether theirs is the same."""
        known: set[str] = set()
        if dataclasses.is_dataclass(self):
            known.update(field.name for field in dataclasses.fields(self))

        def is_parameter(name: str) -> bool:
            made_once = isinstance(getattr(type(self), name, None), functools.cached_property)
            return not (name in known or name.startswith("_") or made_once)

        return sorted(filter(is_parameter, vars(self)))

    def wire_itemsize(self, dtype: np.dtype[Any]) -> int:
        """The bytes of an element of ``dtype`` on the wire, where numbers travel."""
        return dtype.itemsize
