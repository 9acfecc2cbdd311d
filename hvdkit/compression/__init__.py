"""Codecs: the bytes that stand for a gradient on the wire, and the state kept of what they do not carry.

- A codec is a frozen dataclass. Its ``summary`` (name and parameters) is what ranks compare when they register a plan.
  A bucket has slots of one codec. The adapter's policy (``api/gradients/compression_policy``) chooses the codecs.
- The ranks of a node sum densely, and each encodes its share between nodes; with "everywhere" each rank encodes its own
  gradients. ``collectives/compressed`` has the ways in which encoded gradients are summed.
- A run gives the same bits each time: blocks, thresholds and residuals depend on what is encoded together, so nothing
  measured decides the buckets of lossy codecs. Encoded operations by name are never fused.
- A value that is not finite is decoded as something not finite near it on all ranks; the state stays as it was.
- On a device (``transports/gpu/device_compression``) torch's operations encode, with payloads of sizes that all ranks
  know; the state lives there, and the host's copy is read and written between two steps.
"""

from hvdkit.compression.casts import CASTS, Cast
from hvdkit.compression.codec import Codec
from hvdkit.compression.dgc import DGC
from hvdkit.compression.lossy import LinearCodec, LossyCodec
from hvdkit.compression.low_rank import PowerSGD
from hvdkit.compression.payload import CustomCodec, PayloadCodec
from hvdkit.compression.quantised import Int4, Int8, OneBit
from hvdkit.compression.random_k import RandomK
from hvdkit.compression.registry import Codecs, codec_with_summary
from hvdkit.compression.sparse import Threshold, TopK
from hvdkit.compression.state import CodecState, Tally

__all__ = [
    "CASTS",
    "DGC",
    "Cast",
    "Codec",
    "CodecState",
    "Codecs",
    "CustomCodec",
    "Int4",
    "Int8",
    "LinearCodec",
    "LossyCodec",
    "OneBit",
    "PayloadCodec",
    "PowerSGD",
    "RandomK",
    "Tally",
    "Threshold",
    "TopK",
    "codec_with_summary",
]
