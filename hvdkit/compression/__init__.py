"""Codecs: the bytes that stand for a gradient on the wire, and the state kept of what they do not carry.

- A codec is a frozen dataclass. Its ``summary`` (name and parameters) is what ranks compare when they register a plan.
  A bucket has slots of one codec. The adapter's policy (``api/gradients/compression``) chooses the codecs.
- The ranks of a node sum densely, and each encodes its share between nodes; with "everywhere" each rank encodes its own
  gradients. ``collectives/compressed`` has the ways in which encoded gradients are summed.
- A run gives the same bits each time: blocks, thresholds and residuals depend on what is encoded together, so nothing
  measured decides the buckets of lossy codecs. Encoded operations by name are never fused.
- A value that is not finite is decoded as something not finite near it on all ranks; the state stays as it was.
- On a device (``transports/gpu/device_compression``) torch's operations encode, with payloads of sizes that all ranks
  know; the state lives there, and the host's copy is read and written between two steps.
"""

import ast

from hvdkit.compression.codec import CASTS, Cast, Codec
from hvdkit.compression.dgc import DGC
from hvdkit.compression.lossy import CustomCodec, LossyCodec, PayloadCodec
from hvdkit.compression.low_rank import PowerSGD
from hvdkit.compression.quantised import Int4, Int8, OneBit
from hvdkit.compression.random_k import RandomK
from hvdkit.compression.sparse import Threshold, TopK
from hvdkit.compression.state import CodecState, Tally

__all__ = [
    "CASTS", "DGC", "Cast", "Codec", "CodecState", "Codecs", "CustomCodec", "Int4", "Int8", "LossyCodec", "OneBit",
    "PayloadCodec", "PowerSGD", "RandomK", "Tally", "Threshold", "TopK", "codec_with_summary",
]  # fmt: skip


class Codecs:
    """The built-in lossy codecs, by the names that users write."""

    int8 = Int8
    int4 = Int4
    onebit = OneBit
    topk = TopK
    threshold = Threshold
    randomk = RandomK
    dgc = DGC
    powersgd = PowerSGD


def _classes() -> dict[str, type[LossyCodec]]:
    """Return all lossy codecs of this process by name; a name of a built-in codec is that codec."""
    classes: list[type[LossyCodec]] = [codec for codec in vars(Codecs).values() if isinstance(codec, type)]
    below = LossyCodec.__subclasses__()
    while below:
        classes.append(below.pop())
        below += classes[-1].__subclasses__()
    return {codec.name: codec for codec in reversed(classes) if hasattr(codec, "name")}


def codec_with_summary(summary: str) -> Codec:
    """Return the codec with this ``Codec.summary``. Raises ValueError where this process has no such codec."""
    if summary in CASTS:
        return CASTS[summary]
    name, _, fields = summary.removesuffix(")").partition("(")
    codec_class = _classes().get(name)
    if codec_class is None:
        raise ValueError(
            f"there is no codec '{name}' in this process\nHINT: import the module that defines it before hvd.join()."
        )
    call = ast.parse(f"codec({fields})", mode="eval").body
    assert isinstance(call, ast.Call)
    codec = codec_class(**{str(field.arg): ast.literal_eval(field.value) for field in call.keywords})
    if codec.summary != summary:
        raise ValueError(f"the codec '{name}' is {codec.summary} here, but {summary} on other ranks")
    return codec
