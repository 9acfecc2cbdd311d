"""Compressed gradients for FSDP2, ``torch.distributed.fsdp.fully_shard``, on the backend "hvdkit"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.gradients.compression import check_told_apart, codec_of
from hvdkit.compression import CodecState, PayloadCodec
from hvdkit.torch.distributed.process_group import HvdkitProcessGroup
from hvdkit.torch.distributed.reductions import TorchReduction

__all__ = ["ReduceScatter"]


class ReduceScatter:
    """The reduce-scatter of one module that ``fully_shard`` has wrapped, whose gradients travel encoded by a codec.

    Gradients are encoded between nodes; within a node too with ``compress="everywhere"``. What a codec with error
    feedback does not send is added to the next gradient. It is not saved in checkpoints.
    """

    def __init__(self, compression: Any) -> None:
        """Take one of hvd.Compression whose payloads are summed element by element: int8, int4, onebit, topk, ...

        Raises TypeError for another compression.

        Examples:
            >>> model = fully_shard(model)
            >>> model.set_custom_reduce_scatter(hvdkit.torch.fsdp.ReduceScatter(hvd.Compression.int8))
        """
        codec = codec_of(compression)
        if not isinstance(codec, PayloadCodec):
            raise TypeError(
                "fsdp.ReduceScatter: compression must be one of hvd.Compression with payloads, such as "
                f"hvd.Compression.int8 or hvd.Compression.topk(0.01), got {compression!r}\n"
                "HINT: fp16 and bf16 are MixedPrecisionPolicy(reduce_dtype=...) of fully_shard."
            )
        check_told_apart("fsdp.ReduceScatter", codec)
        self._codec = codec
        self._state = CodecState(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for a gradient; FSDP calls it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce a gradient; FSDP calls it. Returns the Work of an asynchronous operation, else None.

        Raises TypeError for a group of another backend, ValueError if another module uses this object too.
        """
        if not isinstance(group, HvdkitProcessGroup):
            raise TypeError(
                f"fsdp.ReduceScatter: expected a group of the backend hvdkit, got {type(group).__name__}\n"
                'HINT: call torch.distributed.init_process_group("hvdkit").'
            )
        elements = input_tensor.numel()
        if not self._state.elements:
            self._state = CodecState(elements, self._codec.keeps)
        if self._state.elements != elements:
            raise ValueError(
                f"fsdp.ReduceScatter: got a gradient of {elements} elements, after one of {self._state.elements}\n"
                "HINT: make one ReduceScatter for each module that fully_shard has wrapped."
            )
        reduction, operations = TorchReduction(op), group.operations
        work = operations.reduce_scatter_encoded(
            output_tensor, input_tensor, reduction, not async_op, self._codec, self._state
        )
        if work is not None and not async_op:
            work.wait()
            return None
        return work
