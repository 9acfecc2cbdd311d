"""Codecs whose payload is more than an array of numbers: what the engine asks of them, and how one writes one's own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.checks import check_choice, check_flag
from hvdkit.compression.codec import Array, Bytes, Codec
from hvdkit.compression.memory import RESIDUAL, Memory

BETWEEN_NODES, EVERYWHERE = "between_nodes", "everywhere"


@dataclass(frozen=True, kw_only=True)
class LossyCodec(Codec):
    """Sends less than the sum of gradients, and keeps what it does not send.

    With ``feedback``, what is not sent stays in the memory's residual and is added to the next gradient
    (Seide et al., 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training
    of speech DNNs"; Karimireddy et al., 2019, "Error feedback fixes SignSGD and other gradient compression schemes").
    ``compress`` says where: "between_nodes" (within a node gradients are summed where they lie, which costs less than
    any codec), or "everywhere".
    """

    feedback: bool = True
    compress: str = BETWEEN_NODES

    lossy: ClassVar[bool] = True
    whole_tensors: ClassVar[bool] = False  # whether it must see a tensor as a whole, not a part of it
    all_tensors: ClassVar[bool] = False  # whether it is for small tensors too, unless the user says otherwise

    @property
    def on_device(self) -> bool:
        """Whether gradients on a device can be encoded there. False for a subclass, which may do anything."""
        return False

    @property
    def warmup_steps(self) -> int:
        """For how many steps it sends more than it will later."""
        return 0

    @property
    def gain(self) -> float:
        """What comes of a gradient in the end, in gradients."""
        return 1.0

    def __post_init__(self) -> None:
        check_flag(self.name, "feedback", self.feedback)
        check_choice(self.name, "compress", self.compress, (BETWEEN_NODES, EVERYWHERE))

    @property
    def everywhere(self) -> bool:
        """Whether ranks of a node encode for each other too."""
        return self.compress == EVERYWHERE

    @property
    def keeps(self) -> tuple[str, ...]:
        """The arrays that a memory must have."""
        return (RESIDUAL,) if self.feedback else ()

    def prepare(self, values: Array, memory: Memory, ranks: int) -> None:
        """Change this rank's gradient, in place, before it is summed with those of ``ranks`` ranks."""


@dataclass(frozen=True, kw_only=True)
class PayloadCodec(LossyCodec):
    """Encodes float32 gradients into payloads of bytes, which are decoded and summed in float32 on the other side."""

    # Whether payloads of equally many elements have equally many bytes, so that nobody must tell how many come.
    fixed: ClassVar[bool] = True
    # Whether a part of the elements is sent as it is: sums then go to all at once where few ranks take part.
    sparse: ClassVar[bool] = False

    @abstractmethod
    def most_bytes(self, elements: int) -> int:
        """The bytes of the largest payload of so many elements; of every one if ``fixed``."""

    @abstractmethod
    def encode_into(self, payload: Bytes, values: Array, memory: Memory) -> int:
        """Write the payload of ``values`` plus residual; returns its bytes. Leaves in the residual what it lacks.

        ``payload`` has ``most_bytes`` bytes, aligned to 64. Where a value is not finite, what is decoded is not finite
        either, somewhere near it, and the residual stays finite.
        """

    @abstractmethod
    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """``out = scale * decoded``, or ``out += scale * decoded``. Raises ValueError for what no encoder wrote."""

    def told_bytes(self, elements: int) -> int:
        """About how many bytes a payload has, for decisions that all ranks make alike."""
        return self.most_bytes(elements)


class CustomCodec(PayloadCodec):
    """The base class of codecs that are written outside of this package: ``encode`` and ``decode``, and that is all.

    Codecs are told apart by the ``name`` of the class and, if it is a dataclass, its fields: they must be the same on
    all ranks. Error feedback is added around it, unless an object is made with ``feedback=False``.
    """

    fixed: ClassVar[bool] = False
    largest_ratio: ClassVar[float] = 1.0  # of a payload's bytes to those of the gradient

    @abstractmethod
    def encode(self, values: Array) -> Array:
        """A payload for ``values`` (flat float32, not to be changed): a flat array of any dtype."""

    @abstractmethod
    def decode(self, payload: Bytes, elements: int) -> Array:
        """The ``elements`` float32 values that stand for what was encoded into ``payload``, a flat array of uint8.

        The payload is one that some rank's ``encode`` returned.
        """

    def most_bytes(self, elements: int) -> int:
        """As ``largest_ratio`` says, and a little for headers of its own."""
        return int(4 * elements * self.largest_ratio) + 1024

    def encode_into(self, payload: Bytes, values: Array, memory: Memory) -> int:
        """Encode the values and what was kept, and keep what that loses."""
        residual = memory.residual
        with np.errstate(all="ignore"):
            wanted = values.copy() if residual is None else values + residual
            encoded = self._bytes(self.encode(wanted), payload.nbytes)
            payload[: encoded.nbytes] = encoded
            if residual is not None:
                lost = wanted - self._decoded(encoded, wanted.size)
                np.copyto(residual, lost, where=np.isfinite(lost))
        return encoded.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """Decode, scale, and set or add."""
        with np.errstate(all="ignore"):
            decoded = self._decoded(payload, out.size)
            if add:
                out += decoded * np.float32(scale)
            else:
                np.multiply(decoded, np.float32(scale), out=out)

    def _bytes(self, encoded: Any, most: int) -> Bytes:
        flat = np.ascontiguousarray(encoded).reshape(-1).view(np.uint8)
        if flat.nbytes > most:
            raise TypeError(
                f"{self.told}: encode returned {flat.nbytes} bytes, more than the {most} that most_bytes allows\n"
                "HINT: set largest_ratio of the class to the most that a payload may have of the gradient's bytes."
            )
        return flat

    def _decoded(self, payload: Bytes, elements: int) -> Array:
        decoded = np.asarray(self.decode(payload, elements))
        if decoded.shape != (elements,) or decoded.dtype != np.float32:
            raise TypeError(
                f"{self.told}: decode must return {elements} values in a flat float32 array, "
                f"got {decoded.dtype}{list(decoded.shape)}"
            )
        return decoded


def as_float32(values: Array) -> Array:
    """``values`` in float32: themselves if they are."""
    if values.dtype == np.float32:
        return values
    converted = np.empty(values.shape, dtype=np.float32)
    kernels.convert_into(converted, values)
    return converted
