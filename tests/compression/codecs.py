"""The codecs that tests go through, and what is true of all of them."""

from __future__ import annotations

import numpy as np

from hvdkit.compression import DGC, CodecState, Int4, Int8, OneBit, PayloadCodec, RandomK, Threshold, TopK
from hvdkit.compression.codec import Array, Bytes
from hvdkit.transports.base import aligned_empty

CODECS: dict[str, PayloadCodec] = {
    "int8": Int8(),
    "int8 stochastic": Int8(stochastic=True, seed=3),
    "int8 block 16": Int8(block=16),
    "int4": Int4(),
    "onebit": OneBit(),
    "topk": TopK(0.05),
    "topk half": TopK(0.5),
    "randomk": RandomK(0.1),
    "threshold": Threshold(1.0),
    "threshold 0": Threshold(0.0),
    "dgc": DGC(0.05, momentum=0.5),
}
WITHOUT_FEEDBACK: dict[str, PayloadCodec] = {
    "int8": Int8(feedback=False),
    "int4": Int4(feedback=False),
    "onebit": OneBit(feedback=False),
    "topk": TopK(0.05, feedback=False),
    "randomk": RandomK(0.1, feedback=False),
    "threshold": Threshold(1.0, feedback=False),
}
LENGTHS = [0, 1, 2, 15, 17, 255, 257, 1000, 1025, 5000]


def memory_for(codec: PayloadCodec, elements: int, seed: int | None = None) -> CodecState:
    """A memory, filled with numbers if there is a seed."""
    memory = CodecState(elements, codec.keeps)
    if seed is not None:
        for array in memory.arrays.values():
            array[...] = np.random.default_rng(seed).standard_normal(elements).astype(np.float32)
    return memory


def encoded(codec: PayloadCodec, values: Array, memory: CodecState) -> Bytes:
    """A payload of its own."""
    payload = aligned_empty(codec.most_bytes(values.size))[: codec.most_bytes(values.size)]
    nbytes = codec.encode_into(payload, values, memory)
    assert 0 <= nbytes <= payload.nbytes
    assert nbytes == payload.nbytes or not codec.fixed
    return payload[:nbytes]


def decoded(codec: PayloadCodec, payload: Bytes, elements: int) -> Array:
    """What a payload stands for."""
    out = np.full(elements, 7.0, dtype=np.float32)
    codec.decode_into(payload, out, 1.0, False)
    return out
