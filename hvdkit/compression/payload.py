"""Codecs that send payloads of bytes: what is asked of them, and how one writes one's own."""

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
    """Encodes float32 gradients into payloads of bytes, which are decoded and summed in float32 on the other side."""

    # Whether payloads of equally many elements have equally many bytes, so that nobody must tell how many come.
    fixed: ClassVar[bool] = True
    # Whether a part of the elements is sent as it is: sums then go to all at once where few ranks take part.
    sparse: ClassVar[bool] = False

    def way(self, elements: int, ranks: int) -> tuple[str, str]:
        """Dense payloads are as long for a sum as for what is summed, so two phases send the least.

        Sparse ones are sent as they are, and nothing is lost of their sum, where that sends no more.
        """
        if not self.sparse:
            return "two_phase", "payloads are dense"
        payload = self.sent_bytes(elements)
        gather, two_phase = (ranks - 1) * payload, 2 * (ranks - 1) * payload // ranks
        name = "gather" if gather <= two_phase else "two_phase"
        return name, f"payloads of about {payload} bytes x {ranks} ranks: gather {gather}, two_phase {two_phase} bytes"

    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        """About how many bytes a payload has."""
        return self.most_bytes(elements)

    def usual_bytes(self, elements: int) -> int:
        """Of a payload whose length varies: how much travels at once, before it is known how long it is.

        The same on all ranks in all steps. What is shorter than that is filled up, what is longer takes a trip more.
        """
        return 0

    @abstractmethod
    def most_bytes(self, elements: int) -> int:
        """The bytes of the largest payload of so many elements; of every one if ``fixed``."""

    @abstractmethod
    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        """Write the payload of ``values`` plus residual; returns its bytes. Leaves in the residual what it lacks.

        ``payload`` has ``most_bytes`` bytes, aligned to 64. Where a value is not finite, what is decoded is not finite
        either, somewhere near it, and the residual stays finite.
        """

    @abstractmethod
    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        """``out = scale * decoded``, or ``out += scale * decoded``. Raises ValueError for what no encoder wrote."""

    def decode_sum_into(self, payloads: Sequence[Bytes], out: Array, scale: Scale) -> bool:
        """``out = scale * (the sum of what is decoded, in order)`` in one pass, with the bits of decoding one by one.

        False where that cannot be done, also for what no encoder wrote; ``out`` may hold anything then.
        """
        return False


def put(out: Array, decoded: Array, scale: float, add: bool) -> None:
    """``out = scale * decoded``, or ``out += scale * decoded``."""
    with np.errstate(all="ignore"):
        if add:
            out += decoded * np.float32(scale)
        else:
            np.multiply(decoded, np.float32(scale), out=out)


class CustomCodec(PayloadCodec):
    """The base class of codecs that are written outside of this package: ``encode`` and ``decode``, and that is all.

    Codecs are told apart by the ``name`` of the class and, if it is a dataclass, its fields: they must be the same on
    all ranks, and one that keeps parameters elsewhere is refused. Error feedback is added around it, unless an object
    is made with ``feedback=False``. ``feedback`` and ``compress`` are those of Compression, as are errors.
    ``largest_ratio`` of the class is the most that a payload may have of the gradient's bytes.

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
    largest_ratio: ClassVar[float] = 1.0  # of a payload's bytes to those of the gradient

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
        """As ``largest_ratio`` says, and a little for headers of its own."""
        return int(4 * elements * self.largest_ratio) + 1024

    def encode_into(self, payload: Bytes, values: Array, state: CodecState) -> int:
        """Encode the values and what was kept, and keep what that loses."""
        residual = state.residual
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
