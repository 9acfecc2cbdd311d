"""The parents of lossy codecs, which send less than a sum, and checks of their arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array, Codec
from hvdkit.compression.state import RESIDUAL, CodecState
from hvdkit.kernels import Scale

BETWEEN_NODES, EVERYWHERE = "between_nodes", "everywhere"


@dataclass(frozen=True, kw_only=True)
class LossyCodec(Codec):
    """A codec that sends less than the sum of gradients, and keeps the rest.

    With ``feedback``, the rest stays in the state's residual and is added to the next gradient
    (Seide et al., 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training
    of speech DNNs"; Karimireddy et al., 2019, "Error feedback fixes SignSGD and other gradient compression schemes").
    ``compress`` says where: "between_nodes" (within a node gradients are summed where they lie, which costs less than
    any codec), or "everywhere".
    """

    feedback: bool = True
    compress: str = BETWEEN_NODES

    lossy: ClassVar[bool] = True
    encodes: ClassVar[bool] = True
    all_tensors: ClassVar[bool] = False
    # Gradients on a device can be encoded there. Not inherited, since a subclass may do anything.
    has_device_twin: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_flag(self.name, "feedback", self.feedback)
        if self.compress not in (BETWEEN_NODES, EVERYWHERE):
            choices = f"{BETWEEN_NODES!r} or {EVERYWHERE!r}"
            raise ValueError(f"Compression.{self.name}: compress must be {choices}, got {self.compress!r}")

    @property
    def everywhere(self) -> bool:
        return self.compress == EVERYWHERE

    @property
    def keeps(self) -> tuple[str, ...]:
        return (RESIDUAL,) if self.feedback else ()

    @property
    def on_device(self) -> bool:
        # Not with a warm-up: ranks that took over different turns would send different numbers of values.
        return bool(vars(type(self)).get("has_device_twin", False)) and not self.warmup_steps

    @abstractmethod
    def way(self, elements: int, ranks: int) -> tuple[str, str]:
        """Return the way in which so many elements are summed over so many ranks, and the reason, alike on all ranks.

        "two_phase" and "gather" are ways of payloads, "sums" is that of vectors; see ``collectives.compressed``.
        """

    @abstractmethod
    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        """Return the approximate bytes sent for so many elements at the state's turn, alike on all ranks."""

    def prepare(self, values: Array, state: CodecState, ranks: int) -> None:
        """Change this rank's gradient, in place, before it is summed with those of ``ranks`` ranks."""


@dataclass(frozen=True, kw_only=True)
class LinearCodec(LossyCodec):
    """A codec that sends vectors, of which plain sums are taken one after the other."""

    @abstractmethod
    def sums(self, values: Array, scale: Scale, state: CodecState) -> Iterator[Array]:
        """Replace ``values`` (flat float32) by ``scale`` times the approximation of their sum over all ranks.

        Yields at most two flat float32 vectors, of lengths that all ranks know, which the caller replaces by their sums
        over all ranks before it continues. ``state`` has the places of the tensors.
        """

    def way(self, elements: int, ranks: int) -> tuple[str, str]:
        return "sums", "vectors are summed"


def as_float32(values: Array) -> Array:
    """Return ``values`` in float32: themselves if they are."""
    if values.dtype == np.float32:
        return values
    converted = np.empty(values.shape, dtype=np.float32)
    kernels.convert_into(converted, values)
    return converted


def check_flag(codec: str, argument: str, value: Any) -> None:
    """Raise TypeError unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"Compression.{codec}: {argument} must be True or False, got {value!r}")


def check_integer(codec: str, argument: str, value: Any, least: int, most: int) -> None:
    """Raise TypeError unless a value is an integer, ValueError unless it is from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Compression.{codec}: {argument} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"Compression.{codec}: {argument} must be from {least} to {most}, got {value}")


def check_seed(codec: str, seed: Any) -> None:
    """Raise TypeError or ValueError unless a seed is an integer of 32 bits."""
    check_integer(codec, "seed", seed, 0, 2**32 - 1)


def check_number(codec: str, argument: str, value: Any) -> float:
    """Return a value as float. Raises TypeError unless it is a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Compression.{codec}: {argument} must be a number, got {value!r}")
    return float(value)


def check_ratio(codec: str, ratio: Any) -> None:
    """Raise TypeError unless a ratio is a number, ValueError unless it is above 0 and at most 1."""
    if not 0.0 < check_number(codec, "ratio", ratio) <= 1.0:
        raise ValueError(
            f"Compression.{codec}: ratio must be above 0 and at most 1 (0.01 sends one value of 100), got {ratio}"
        )
