"""What stands for gradients on the wire: the parent of all codecs."""

from __future__ import annotations

import dataclasses
from abc import ABC
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Codec(ABC):
    """A way to encode gradients. Casts go with every reduction, payload codecs with sums and averages of floats."""

    name: ClassVar[str]
    lossy: ClassVar[bool]
    keeps_zeros: ClassVar[bool] = True  # whether zeros are zeros after decoding

    @property
    def told(self) -> str:
        """The codec and its parameters: what ranks compare, and people read."""
        if not dataclasses.is_dataclass(self):
            return self.name
        fields = [f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self)]
        return f"{self.name}({', '.join(fields)})"
