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

    @property
    def told(self) -> str:
        """The codec and its parameters: what ranks compare, and people read."""
        if not dataclasses.is_dataclass(self):
            return self.name
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        fields = [f"{name}={value.item() if isinstance(value, np.generic) else value!r}" for name, value in values]
        return f"{self.name}({', '.join(fields)})"
