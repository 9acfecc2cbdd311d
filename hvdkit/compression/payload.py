"""The parents of codecs that send payloads of bytes: hvdkit's, and those of users."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdkit.compression.codec import Array, Bytes
from hvdkit.compression.lossy import LossyCodec
from hvdkit.compression.state import CodecState
from hvdkit.kernels import Scale


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
        """Return the bytes of a payload of variable length that travel first, before the receiver knows the length.

        The same on all ranks in all steps. A shorter payload is filled up, a longer one takes a second trip.
        """
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
        """Compute ``out = scale * (sum of payloads, in order)`` in one pass, with the bits of decoding one by one.

        Return False where that is not possible, also if no encoder wrote a payload; ``out`` may hold anything then.
        """
        return False


def put(out: Array, decoded: Array, scale: float, add: bool) -> None:
    """Compute ``out = scale * decoded``, or ``out += scale * decoded``."""
    with np.errstate(all="ignore"):
        if add:
            out += decoded * np.float32(scale)
        else:
            np.multiply(decoded, np.float32(scale), out=out)


class CustomCodec(PayloadCodec):
    """The base class of codecs that users write: ``encode`` and ``decode``, and that is all.

    Ranks compare codecs by the ``name`` of the class and, if it is a dataclass, its fields, which must be the same on
    all ranks; a codec with parameters elsewhere is refused. Error feedback is added, unless an object is made with
    ``feedback=False``. ``feedback`` and ``compress`` are those of Compression, as are errors. ``largest_ratio`` of the
    class is the largest ratio of a payload's bytes to the gradient's.

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

        A value that is not finite decodes to one that is not.

        Args:
            payload: the bytes, a flat array of uint8.
            elements: how many values they stand for.

        Returns:
            The values, of shape (elements,), float32.

        Raises:
            Exception: as in ``encode``.
        """

    def most_bytes(self, elements: int) -> int:
        return int(4 * elements * self.largest_ratio) + 1024  # for headers of the user's

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        residual = state.residual
        with np.errstate(all="ignore"):
            total = values.copy() if residual is None else values + residual
            encoded = self._bytes(self.encode(total), payload.nbytes)
            payload[: encoded.nbytes] = encoded
            if residual is not None:
                lost = total - self._decoded(encoded, total.size)
                np.copyto(residual, lost, where=np.isfinite(lost))
        return encoded.nbytes

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        with np.errstate(all="ignore"):
            put(out, self._decoded(payload, out.size), scale, add)

    def _bytes(self, encoded: Any, most: int) -> Bytes:
        flat = np.ascontiguousarray(encoded).reshape(-1).view(np.uint8)
        if flat.nbytes > most:
            raise TypeError(
                f"{self.summary}: encode returned {flat.nbytes} bytes, more than the {most} that most_bytes allows\n"
                "HINT: set largest_ratio of the class to the most that a payload may have of the gradient's bytes."
            )
        return flat

    def _decoded(self, payload: Bytes, elements: int) -> Array:
        decoded = np.asarray(self.decode(payload, elements))
        if decoded.shape != (elements,) or decoded.dtype != np.float32:
            raise TypeError(
                f"{self.summary}: decode must return {elements} values in a flat float32 array, "
                f"got {decoded.dtype}{list(decoded.shape)}"
            )
        return decoded
