"""Collective operations on tensors, as calls of a group of ordered operations."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hvdkit.collectives.compressed import reduce_scatter_encoded
from hvdkit.collectives.group import partition
from hvdkit.collectives.hierarchical import nodes_of
from hvdkit.compression import CodecState, PayloadCodec
from hvdkit.engine.ordered.calls import NO_ARRAY, Collective, CollectiveKind, Description, nothing_left
from hvdkit.engine.ordered.group import OrderedGroup
from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.torch.distributed.memory import Adoption, array_of, bytes_of
from hvdkit.torch.distributed.reductions import AVERAGE, REDUCTIONS, TorchReduction, name_of
from hvdkit.torch.distributed.tensors import (
    call_with_parts,
    check_count,
    check_same_dtype,
    check_sizes,
    copier_to,
    dense_output,
    separate_source,
    with_result_in,
)
from hvdkit.torch.distributed.work import HvdkitWork

# Smaller tensors, such as the buckets of DistributedDataParallel, overlap with each other.
PIECE_BYTES, MOST_PIECES = 16 << 20, 4
_FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64


class TensorOperations:
    """The collective operations of one group. Each returns None if it is done, which only happens to ``waits``.

    ``waits``: the caller waits for the result at once.
    """

    def __init__(self, group: OrderedGroup) -> None:
        self.group = group
        self._rank, self._size = group.group.rank, group.group.size
        self._adoption = Adoption()

    def close(self) -> None:
        """End all operations of the group on this rank."""
        self.group.close()
        self._adoption.close()

    def all_reduce(self, tensors: Sequence[Tensor], reduction: TorchReduction, waits: bool) -> HvdkitWork | None:
        """Reduce each tensor over the ranks, in place."""
        calls = []
        for tensor in tensors:
            dense = reduction.scaled(tensor).contiguous()
            call = self._reducing("all_reduce", CollectiveKind.ALL_REDUCE, dense, dense, reduction)
            calls += self._pieces_of(with_result_in(call, tensor, dense))
        return self._run(calls, tensors, waits)

    def reduce(self, tensor: Tensor, root: int, reduction: TorchReduction, waits: bool) -> HvdkitWork | None:
        """Reduce a tensor over the ranks into that of ``root``."""
        dense = reduction.scaled(tensor).contiguous()
        call = self._reducing("reduce", CollectiveKind.REDUCE, dense, dense, reduction, root)
        if self._rank == root:
            with_result_in(call, tensor, dense)
        else:
            call.target = NO_ARRAY
        return self._run([call], [tensor], waits)

    def broadcast(self, tensors: Sequence[Tensor], root: int, waits: bool) -> HvdkitWork | None:
        """Replace each tensor by that of ``root``."""
        calls = []
        for tensor in tensors:
            dense, is_root = tensor.contiguous(), self._rank == root
            array = bytes_of("broadcast", dense)
            description = Description(CollectiveKind.BROADCAST, name_of(tensor), tensor.numel(), root=root)
            call = Collective(description, array if is_root else NO_ARRAY, NO_ARRAY if is_root else array)
            calls.append(call if is_root else with_result_in(call, tensor, dense))
        return self._run(calls, tensors, waits)

    def all_gather_single(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], waits: bool) -> HvdkitWork | None:
        """Fill each output with the inputs of all ranks, one after the other."""
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            function = "all_gather_into_tensor"
            check_sizes(function, output, tensor.numel() * self._size, f"{self._size} times the input's elements")
            check_same_dtype(function, output, tensor)
            self._adoption.see(tensor)
            into = dense_output(output)
            description = Description(CollectiveKind.ALL_GATHER, name_of(tensor), tensor.numel())
            source = separate_source(tensor.contiguous(), into, self._rank)
            call = Collective(description, bytes_of(function, source), bytes_of(function, into))
            calls.append(with_result_in(call, output, into))
        return self._run(calls, outputs, waits)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, waits: bool) -> HvdkitWork | None:
        """Fill ``outputs[r]`` with the tensor of rank r; the ranks' tensors may have sizes of their own."""
        function = "all_gather"
        check_count(function, outputs, self._size)
        for output in outputs:
            check_same_dtype(function, output, tensor)
        check_sizes(function, outputs[self._rank], tensor.numel(), "the elements of this rank's input")
        source = bytes_of(function, tensor.contiguous())
        if any(output.numel() != tensor.numel() for output in outputs):
            call = call_with_parts(CollectiveKind.ALL_GATHER, tensor, [source] * self._size, outputs)
        else:
            whole = tensor.new_empty(self._size * tensor.numel())
            description = Description(CollectiveKind.ALL_GATHER, name_of(tensor), tensor.numel())
            call = Collective(description, source, bytes_of(function, whole), finished=copier_to(outputs, whole))
        return self._run([call], outputs, waits)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int, waits: bool) -> HvdkitWork | None:
        """Fill ``outputs[r]`` on the root with the tensor of rank r."""
        description = Description(CollectiveKind.GATHER, name_of(tensor), tensor.numel(), root=root)
        call = Collective(description, bytes_of("gather", tensor.contiguous()), NO_ARRAY)
        if self._rank == root:
            check_count("gather", outputs, self._size)
            for output in outputs:
                check_same_dtype("gather", output, tensor)
                check_sizes("gather", output, tensor.numel(), "the input's elements")
            whole = tensor.new_empty(self._size * tensor.numel())
            call.target, call.finished = bytes_of("gather", whole), copier_to(outputs, whole)
        return self._run([call], outputs, waits)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int, waits: bool) -> HvdkitWork | None:
        """Fill the output of rank r with ``inputs[r]`` of the root."""
        source = NO_ARRAY
        if self._rank == root:
            check_count("scatter", inputs, self._size)
            for tensor in inputs:
                check_same_dtype("scatter", output, tensor)
                check_sizes("scatter", tensor, output.numel(), "the output's elements")
            source = bytes_of("scatter", torch.cat([tensor.reshape(-1) for tensor in inputs]))
        into = dense_output(output)
        description = Description(CollectiveKind.SCATTER, name_of(output), output.numel(), root=root)
        call = with_result_in(Collective(description, source, bytes_of("scatter", into)), output, into)
        return self._run([call], [output], waits)

    def reduce_scatter_single(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: TorchReduction, waits: bool
    ) -> HvdkitWork | None:
        """Fill each output of rank r with part r of the reduction of the ranks' inputs."""
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            function = "reduce_scatter_tensor"
            check_sizes(function, tensor, output.numel() * self._size, f"{self._size} times the output's elements")
            check_same_dtype(function, output, tensor)
            into = dense_output(output)
            source = separate_source(reduction.scaled(tensor).contiguous(), into, self._rank)
            call = self._reducing(function, CollectiveKind.REDUCE_SCATTER, source, into, reduction)
            calls.append(with_result_in(call, output, into))
        return self._run(calls, outputs, waits)

    def reduce_scatter_encoded(
        self,
        output: Tensor,
        tensor: Tensor,
        reduction: TorchReduction,
        waits: bool,
        codec: PayloadCodec,
        state: CodecState,
    ) -> HvdkitWork | None:
        """Reduce as ``reduce_scatter_single``, with the gradients encoded by a codec that keeps ``state``."""
        function = "fsdp.ReduceScatter"
        if REDUCTIONS.get(reduction.number, ("", None))[1] != ReduceOp.SUM or tensor.dtype not in _FLOATS:
            raise ValueError(f"{function}: expected a sum or an average of floats, got {tensor.dtype}")
        call = self._reducing(function, CollectiveKind.REDUCE_SCATTER, reduction.scaled(tensor), output, reduction)
        call.description = call.description._replace(codec=zlib.crc32(codec.summary.encode()))
        group = self.group.group
        if codec.everywhere or nodes_of(group) > 1:
            arguments = group, call.source, call.target, call.scale, codec, state
            call.steps = partial(reduce_scatter_encoded, *arguments)
        return self._run([call], [output], waits)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: TorchReduction, waits: bool
    ) -> HvdkitWork | None:
        """Fill the output of rank r with the reduction of the ranks' ``inputs[r]``, which may differ in size."""
        function = "reduce_scatter"
        check_count(function, inputs, self._size)
        check_sizes(function, output, inputs[self._rank].numel(), "the elements of this rank's input")
        for tensor in inputs:
            check_same_dtype(function, output, tensor)
        whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
        if all(tensor.numel() == output.numel() for tensor in inputs):
            return self.reduce_scatter_single([output], [whole], reduction, waits)
        whole = reduction.scaled(whole)
        call = self._reducing(function, CollectiveKind.ALL_REDUCE, whole, whole, reduction)
        part = torch.split(whole, [tensor.numel() for tensor in inputs])[self._rank]
        return self._run([with_result_in(call, output, part)], [output], waits)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], waits: bool
    ) -> HvdkitWork | None:
        """Send ``input_splits[r]`` rows of the input to rank r, and receive ``output_splits[r]`` rows of its input."""
        function = "all_to_all_single"
        check_same_dtype(function, output, tensor)
        into = dense_output(output)
        source = separate_source(tensor.contiguous(), into)
        if output_splits or input_splits:
            outgoing = self._rows(source, input_splits, "input_split_sizes")
            call = call_with_parts(
                CollectiveKind.ALL_TO_ALL,
                tensor,
                [bytes_of(function, rows) for rows in outgoing],
                self._rows(into, output_splits, "output_split_sizes"),
            )
        else:
            for each in (output, tensor):
                if each.dim() and each.shape[0] % self._size:
                    raise ValueError(
                        f"{function}: the first dimension, {each.shape[0]}, is no multiple of the {self._size} ranks\n"
                        "HINT: give input_split_sizes and output_split_sizes."
                    )
            check_sizes(function, output, tensor.numel(), "the input's elements")
            description = Description(CollectiveKind.ALL_TO_ALL, name_of(tensor), tensor.numel())
            call = Collective(description, bytes_of(function, source), bytes_of(function, into))
        return self._run([with_result_in(call, output, into)], [output], waits)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], waits: bool) -> HvdkitWork | None:
        """Send ``inputs[r]`` to rank r, and receive its tensor for this rank in ``outputs[r]``."""
        check_count("all_to_all", outputs, self._size)
        check_count("all_to_all", inputs, self._size)
        for tensor in (*inputs, *outputs):
            check_same_dtype("all_to_all", tensor, inputs[0])
        outgoing = [bytes_of("all_to_all", tensor.contiguous()) for tensor in inputs]
        return self._run([call_with_parts(CollectiveKind.ALL_TO_ALL, inputs[0], outgoing, outputs)], outputs, waits)

    def barrier(self, waits: bool) -> HvdkitWork | None:
        """Return when all ranks have called this."""
        return self._run([Collective(Description(CollectiveKind.BARRIER), NO_ARRAY, NO_ARRAY)], [], waits)

    def _run(self, calls: Sequence[Collective], tensors: Sequence[Tensor], waits: bool) -> HvdkitWork | None:
        """Run calls in order. The last to be done is the last call, and an error of one is that of all after it."""
        if waits and len(calls) == 1:
            operation = self.group.run(calls[0])
            return None if operation is None else HvdkitWork(operation, tensors)
        operation = None
        for call in calls:
            operation = self.group.start(call)
        for call in calls:
            if call.kind == CollectiveKind.ALL_REDUCE and operation is not None:
                self._adoption.keep(call.source, operation)  # until the last one: a call may be a piece of a tensor
        return HvdkitWork(operation, tensors)

    def _pieces_of(self, call: Collective) -> list[Collective]:
        """Return an allreduce as the pieces that overlap on the way between nodes, the last of which completes it."""
        group, source, target = self.group.group, call.source, call.target
        count = min(MOST_PIECES, source.nbytes // PIECE_BYTES)
        if nodes_of(group) == 1 or count <= 1:
            return [call]
        runs = [slice(*run) for run in partition(source.size, count, source.itemsize)]
        *others, last = (replace(call, source=source[run], target=target[run]) for run in runs)
        return [*(replace(piece, finished=nothing_left) for piece in others), last]

    def _reducing(
        self,
        function: str,
        kind: CollectiveKind,
        source: Tensor,
        target: Tensor,
        reduction: TorchReduction,
        root: int = 0,
    ) -> Collective:
        if source.dtype is torch.bool and reduction.number not in (0, 3, 4):
            raise ValueError(f"{function}: expected a sum, minimum or maximum of boolean tensors")
        if source.is_complex():
            if REDUCTIONS[reduction.number][1] != ReduceOp.SUM:
                raise ValueError(f"{function}: expected a sum or an average of complex tensors")
            source, target = torch.view_as_real(source), torch.view_as_real(target)
        self._adoption.see(source, adopts=kind == CollectiveKind.ALL_REDUCE)
        arrays = array_of(function, source), array_of(function, target)
        name, op = REDUCTIONS[reduction.number]
        description = Description(kind, name_of(source), target.numel(), name, root)
        return Collective(description, *arrays, op, Scale(1.0, self._size) if reduction.number == AVERAGE else ONE)

    def _rows(self, tensor: Tensor, splits: Sequence[int], argument: str) -> Sequence[Tensor]:
        """Return the rows for, or of, each rank."""
        rows = tensor.shape[0] if tensor.dim() else 0
        splits = list(splits) or [rows // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single: {argument}: expected {self._size} numbers with the sum {rows}, got {splits}"
            )
        return torch.split(tensor, splits)
