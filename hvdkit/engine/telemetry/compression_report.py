"""Reports of compression on this rank, by codec and by parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdkit.compression import Tally

# An encoded tensor's name, its codec, the tally, and the norm of the residual on this rank.
Report = tuple[str, str, Tally, float]


@dataclass(frozen=True)
class CodecStatistics:
    """Totals since ``hvd.init()``, or since the parameters of an optimizer were last frozen, unfrozen or added."""

    codec: str
    bytes_before: int  # that this rank would have sent of these gradients in two phases without the codec
    bytes_after: int  # that this rank sent
    encode_seconds: float
    decode_seconds: float
    residual_norm: float  # Euclidean norm of the residual, which this rank has not sent

    @property
    def ratio(self) -> float:
        """Bytes before to bytes after; 1.0 where nothing was sent."""
        return self.bytes_before / self.bytes_after if self.bytes_after else 1.0

    @property
    def pays_below(self) -> float | None:
        """Bandwidth of a network, in bits a second, below which sending less takes less time than encoding adds.

        0.0 for a codec that sends more than it gets, None where encoding is not measured (casts, and on GPUs).
        """
        seconds = self.encode_seconds + self.decode_seconds
        return max(0.0, 8.0 * (self.bytes_before - self.bytes_after) / seconds) if seconds else None

    def __str__(self) -> str:
        if not self.bytes_after:
            return (
                f"{self.codec}: nothing was encoded: no tensor was large enough, or nothing travelled between nodes "
                '(codecs with compress="everywhere" encode on one node too)'
            )
        size = f"{self.ratio:.1f} x less" if self.ratio >= 1 else f"{1 / self.ratio:.1f} x more"
        sent = f"{self.codec}: {_in_words(self.bytes_before)} sent as {_in_words(self.bytes_after)} ({size})"
        if (bandwidth := self.pays_below) is None:
            return sent
        pays = f"pays below {_bandwidth_in_words(bandwidth)}" if bandwidth else "pays on no network"
        seconds = f"encode {self.encode_seconds:.2f} s, decode {self.decode_seconds:.2f} s, {pays}"
        return f"{sent}, {seconds}, residual {self.residual_norm:.3g}"


@dataclass(frozen=True)
class CompressionStatistics:
    """``str`` of it has a line for each codec.

    Bytes and seconds of a bucket are divided among its tensors by their elements; each tensor has its own norm.
    """

    by_codec: dict[str, CodecStatistics]
    by_parameter: dict[str, CodecStatistics]

    def __str__(self) -> str:
        return "\n".join(map(str, self.by_codec.values())) or "nothing was compressed"


def compression_statistics(
    reports: Iterable[tuple[str, Iterable[Report]]], by_name: Mapping[str, Tally]
) -> CompressionStatistics:
    """Return the statistics from the reports of each lane, by name, and the tallies of operations by name, by codec."""
    by_parameter: dict[str, CodecStatistics] = {}
    totals: dict[str, Tally] = {}
    squares: dict[str, float] = defaultdict(float)
    for lane, tensors in reports:
        for tensor, codec, tally, norm in tensors:
            name = tensor if tensor not in by_parameter else f"{tensor} ({lane})"
            by_parameter[name] = _statistics(codec, tally, norm)
            totals.setdefault(codec, Tally()).add(tally)
            squares[codec] += norm * norm
    for codec, tally in by_name.items():
        totals.setdefault(codec, Tally()).add(tally)
    by_codec = {codec: _statistics(codec, tally, squares[codec] ** 0.5) for codec, tally in totals.items()}
    return CompressionStatistics(by_codec, by_parameter)


def timeline_fields(tally: Tally, norm: float | None) -> dict[str, Any]:
    """Return the arguments of an encoded bucket in the timeline."""
    return {
        "bytes_before": int(tally.bytes_before),
        "bytes_after": int(tally.bytes_after),
        "ratio": round(tally.bytes_before / tally.bytes_after, 2) if tally.bytes_after else 1.0,
        "encode_us": round(tally.encode_seconds * 1e6),
        "decode_us": round(tally.decode_seconds * 1e6),
    } | ({} if norm is None else {"residual_norm": norm})


def _in_words(size: int) -> str:
    """Return bytes in the unit in which they round to less than a thousand: 999,960 are 1.0 MB."""
    if size < 1000:
        return f"{size} byte{'' if size == 1 else 's'}"
    return f"{size / 1e3:.1f} kB" if size < 999_950 else f"{size / 1e6:.1f} MB"


def _bandwidth_in_words(bits: float) -> str:
    """Return bits a second in the unit in which networks are sold."""
    return f"{bits / 1e9:.1f} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"


def _statistics(codec: str, tally: Tally, norm: float) -> CodecStatistics:
    before, after = round(tally.bytes_before), round(tally.bytes_after)
    return CodecStatistics(codec, before, after, tally.encode_seconds, tally.decode_seconds, norm)
