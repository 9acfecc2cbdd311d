"""The parents of lossy codecs, of hvdkit's and of users' own, and checks of their arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdkit.compression.codec import Array, Bytes, Codec
from hvdkit.compression.state import RESIDUAL, CodecState
from hvdkit.kernels import Scale

BETWEEN_NODES, EVERYWHERE = "between_nodes", "everywhere"
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class LossyCodec(Codec):
    """A codec that sends less than the sum of gradients, and keeps the rest.

    With ``feedback``, the rest stays in the state's residual and is added to the next gradient
    (Seide et al., 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training
    of speech DNNs"; Karimireddy et al., 2019, "Error feedback fixes SignSGD and other gradient compression schemes").
    """

    feedback: bool = True
    compress: str = BETWEEN_NODES  # where a node's ranks sum where gradients lie, which costs less than any codec

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
        """Return the way of ``collectives.compressed`` for so many elements and ranks, and why, alike on all ranks."""

    @abstractmethod
    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        """Return the approximate bytes sent for so many elements at the state's turn, alike on all ranks."""

    def prepare(self, values: Array, state: CodecState, ranks: int) -> None:
        """Change this rank's gradient, in place, before it is summed with those of ``ranks`` ranks."""


@dataclass(frozen=True, kw_only=True)
class PayloadCodec(LossyCodec):
    """A codec of float32 gradients into payloads of bytes, which the receivers decode and sum in float32."""

    fixed: ClassVar[bool] = True  # payloads of equally many elements have equally many bytes
    sparse: ClassVar[bool] = False  # a part of the elements is sent as it is

    def way(self, elements: int, ranks: int) -> tuple[str, str]:
        if not self.sparse:  # a payload of a sum is as long as those of its operands, so two phases send the least
            return "two_phase", "payloads are dense"
        payload = self.sent_bytes(elements)
        gather, two_phase = (ranks - 1) * payload, 2 * (ranks - 1) * payload // ranks
        name = "gather" if gather <= two_phase else "two_phase"
        return name, f"payloads of about {payload} bytes x {ranks} ranks: gather {gather}, two_phase {two_phase} bytes"

    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        return self.most_bytes(elements)

    def usual_bytes(self, elements: int) -> int:
        """Return the bytes of a payload of variable length that travel first; a longer one takes a second trip."""
        return 0

    @abstractmethod
    def most_bytes(self, elements: int) -> int:
        """Return the bytes of the largest payload of so many elements; of each payload if ``fixed``."""

    @abstractmethod
    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        """Write the payload of ``values`` plus residual, leave in the residual what it lacks, and return its bytes.

        ``payload`` has ``most_bytes`` bytes, aligned to 64. For a value that is not finite, a decoded value near it is
        not finite either, and the residual stays finite.
        """

    @abstractmethod
    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """Compute ``out = scale * decoded``, or add it. Raises ValueError for a payload that no encoder wrote."""

    def decode_sum_into(self, payloads: Sequence[Bytes], out: Array, scale: Scale) -> bool:
        """True if ``out`` is ``scale * (sum of payloads, in order)`` now, with the bits of decoding one by one."""
        return False


class CustomCodec(PayloadCodec):
    """The base class of codecs that users write: ``encode`` and ``decode``, and that is all.

    Ranks compare codecs by the ``name`` of the class and, if it is a dataclass, its fields; a codec with parameters
    elsewhere is refused. ``feedback``, ``compress`` and errors are those of Compression. ``largest_ratio`` of the class
    is the largest ratio of a payload's bytes to the gradient's.

    Examples:
        >>> class Halves(hvd.CustomCodec):
        ...     name = "halves"
        ...     def encode(self, values):
        ...         return values.astype(np.float16)
        ...     def decode(self, payload, elements):
        ...         return payload.view(np.float16).astype(np.float32)
        >>> codec = Halves()
        >>> codec.decode(codec.encode(np.ones(3, np.float32)).view(np.uint8), 3).tolist()
        [1.0, 1.0, 1.0]
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=codec)
    """

    fixed: ClassVar[bool] = False
    largest_ratio: ClassVar[float] = 1.0

    @abstractmethod
    def encode(self, values: Array) -> Array:
        """Encode values; you write it, and the example is that of CustomCodec.

        Args:
            values: of shape (elements,), float32, not to be changed.

        Returns:
            A payload, a flat array of any dtype.

        Raises:
            Exception: any; all ranks then get a HorovodInternalError that tells it, and the job cannot go on.
        """

    @abstractmethod
    def decode(self, payload: Bytes, elements: int) -> Array:
        """Decode what some rank's ``encode`` returned; you write it, and the example is that of CustomCodec.

        Args:
            payload: the bytes, a flat array of uint8.
            elements: how many values they stand for.

        Returns:
            The values, of shape (elements,), float32; for a value that was not finite, one that is not.

        Raises:
            Exception: as in ``encode``.
        """

    def most_bytes(self, elements: int) -> int:
        return int(4 * elements * self.largest_ratio) + 1024  # for headers of the user's

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        residual = state.residual
        with np.errstate(all="ignore"):
            total = values.copy() if residual is None else values + residual
            encoded = np.ascontiguousarray(self.encode(total)).reshape(-1).view(np.uint8)
            if encoded.nbytes > payload.nbytes:
                raise TypeError(
                    f"{self.summary}: encode returned {encoded.nbytes} bytes, more than the {payload.nbytes} that "
                    "most_bytes allows\n"
                    "HINT: set largest_ratio of the class to the largest ratio of payload bytes to gradient bytes."
                )
            payload[: encoded.nbytes] = encoded
            if residual is not None:
                lost = total - self._decoded(encoded, total.size)
                np.copyto(residual, lost, where=np.isfinite(lost))
        return encoded.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        with np.errstate(all="ignore"):
            put(out, self._decoded(payload, out.size), scale, add)

    def _decoded(self, payload: Bytes, elements: int) -> Array:
        decoded = np.asarray(self.decode(payload, elements))
        if decoded.shape != (elements,) or decoded.dtype != np.float32:
            raise TypeError(
                f"{self.summary}: decode must return {elements} values in a flat float32 array, "
                f"got {decoded.dtype}{list(decoded.shape)}"
            )
        return decoded


def put(out: Array, decoded: Array, scale: float, add: bool) -> None:
    """Compute ``out = scale * decoded``, or ``out += scale * decoded``."""
    with np.errstate(all="ignore"):
        if add:
            out += decoded * np.float32(scale)
        else:
            np.multiply(decoded, np.float32(scale), out=out)


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
