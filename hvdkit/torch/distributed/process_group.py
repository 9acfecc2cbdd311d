"""The process group of torch.distributed that runs on hvdkit: torch's names for the operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from hvdkit.engine.session.session import Session
from hvdkit.environments.base import World
from hvdkit.torch.distributed.from_cpp import leave_untraced, reach_python
from hvdkit.torch.distributed.memory import GroupMemory, bytes_of
from hvdkit.torch.distributed.operations import TensorOperations
from hvdkit.torch.distributed.reductions import REDUCTIONS, TorchReduction
from hvdkit.torch.distributed.session import LAUNCHER, close_session, open_session
from hvdkit.torch.distributed.work import HvdkitWork
from hvdkit.transports.security.listening import addresses_for

_GROUPS_KEY, _NUMBER_KEY = "hvdkit/groups", "hvdkit/number"
# How often hvdkit ran each operation, by torch's name, and how often a group of Gloo or NCCL did: Gloo runs bitwise
# reductions, reductions of sparse tensors and monitored_barrier, NCCL all that is on GPUs.
COUNTS: Counter[tuple[str, str]] = Counter()


_ProcessGroup: Any = dist.ProcessGroup  # whose stubs have overloads that nothing calls


class HvdkitProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks whose tensors on the CPU are communicated by hvdkit."""

    def __init__(self, options: Any, session: Session | None) -> None:
        """Make a group of ``options``: the default group if ``session`` is None, else one in its session."""
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._store, self._rank, self._size = options.store, rank, size
        seconds = options.timeout.total_seconds()
        self._owns_session = session is None
        self.session = session or open_session(options.store, size, rank, seconds)
        engine, ranks = self.session.engine, list(options.global_ranks_in_group) or list(range(size))
        self._ordered = engine.ordered_group(ranks, self._agree_on_number(rank, size), options.group_id, seconds)
        self.operations = TensorOperations(self._ordered)
        self._messages = engine.messages
        self._inner_groups: dict[str, Any] = {}
        self._memory = GroupMemory()
        self._name, self._description = str(options.group_id), "undefined"

    def _agree_on_number(self, rank: int, size: int) -> int:
        """Return a number that no other group of the job has, the same on all its ranks."""
        if self._owns_session:
            return 1
        if rank == 0:
            number = 1 + int(DEFAULT[0]._store.add(_GROUPS_KEY, 1))
            self._store.set(_NUMBER_KEY, str(number))
            return number
        return int(self._store.get(_NUMBER_KEY))

    @property
    def seconds(self) -> float:
        """The timeout of an operation."""
        return self._ordered.seconds

    def getBackendName(self) -> str:
        return "hvdkit"

    # C++ asks the backends of a group for its name, of which this group has none.
    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> Any:
        """Return what Python asks of a group's backend: NCCL's own for GPUs, else memory out of the arena for FSDP."""
        return self._inner_nccl() if device.type == "cuda" else self._memory

    _device_types = property(lambda self: [torch.device("cpu")])

    def set_timeout(self, timeout: timedelta) -> None:
        self._ordered.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """End the group on this rank; the default group's end is that of the session."""
        self.operations.close()
        for inner in self._inner_groups.values():
            inner.shutdown()
        self._inner_groups.clear()
        if self._owns_session:
            close_session(self.session)
            DEFAULT.clear()

    def abort(self) -> None:
        self.shutdown()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _as_list(tensors), opts or c10d.AllreduceOptions()
        if (inner := self._inner("allreduce", tensors, opts.reduceOp)) is not None:
            return inner.allreduce(tensors, opts)
        return self.operations.all_reduce(tensors, TorchReduction(opts.reduceOp), not opts.asyncOp)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if (inner := self._inner("allreduce_coalesced", tensors, opts.reduceOp)) is not None:
            return inner.allreduce_coalesced(tensors, opts)
        return self.operations.all_reduce(tensors, TorchReduction(opts.reduceOp), not opts.asyncOp)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _as_list(tensors), opts or c10d.ReduceOptions()
        if (inner := self._inner("reduce", tensors, opts.reduceOp)) is not None:
            return inner.reduce(tensors, opts)
        return self.operations.reduce(tensors[0], opts.rootRank, TorchReduction(opts.reduceOp), not opts.asyncOp)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _as_list(tensors), opts or c10d.BroadcastOptions()
        if (inner := self._inner("broadcast", tensors)) is not None:
            return inner.broadcast(tensors, opts)
        return self.operations.broadcast(tensors, opts.rootRank, not opts.asyncOp)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if (inner := self._inner("allgather", inputs)) is not None:
            return inner.allgather(outputs, inputs, opts)
        return self.operations.all_gather(outputs[0], inputs[0], not opts.asyncOp)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if (inner := self._inner("allgather_coalesced", inputs)) is not None:
            return inner.allgather_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())
        works = [
            self.operations.all_gather([output[index] for output in outputs], tensor, False)
            for index, tensor in enumerate(inputs)
        ]
        return works[-1]

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if (inner := self._inner("all_gather_single", [tensor])) is not None:
            return inner._allgather_base(output, tensor, opts)
        return self.operations.all_gather_single([output], [tensor], not opts.asyncOp)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if (inner := self._inner("all_gather_single_coalesced", inputs)) is not None:
            return inner.allgather_into_tensor_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())
        return self.operations.all_gather_single(outputs, inputs, False)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        if (inner := self._inner("gather", inputs)) is not None:
            return inner.gather(outputs, inputs, opts)
        return self.operations.gather(outputs[0] if outputs else [], inputs[0], opts.rootRank, not opts.asyncOp)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        if (inner := self._inner("scatter", outputs)) is not None:
            return inner.scatter(outputs, inputs, opts)
        return self.operations.scatter(outputs[0], inputs[0] if inputs else [], opts.rootRank, not opts.asyncOp)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (inner := self._inner("reduce_scatter", inputs[0], opts.reduceOp)) is not None:
            return inner.reduce_scatter(outputs, inputs, opts)
        return self.operations.reduce_scatter(outputs[0], inputs[0], TorchReduction(opts.reduceOp), not opts.asyncOp)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (inner := self._inner("reduce_scatter_single", [tensor], opts.reduceOp)) is not None:
            return inner._reduce_scatter_base(output, tensor, opts)
        reduction = TorchReduction(opts.reduceOp)
        return self.operations.reduce_scatter_single([output], [tensor], reduction, not opts.asyncOp)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (inner := self._inner("reduce_scatter_single_coalesced", inputs, opts.reduceOp)) is not None:
            return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self.operations.reduce_scatter_single(outputs, inputs, TorchReduction(opts.reduceOp), False)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllToAllOptions()
        if (inner := self._inner("all_to_all_single", [tensor])) is not None:
            return inner.alltoall_base(output, tensor, output_splits, input_splits, opts)
        return self.operations.all_to_all_single(output, tensor, output_splits, input_splits, not opts.asyncOp)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllToAllOptions()
        if (inner := self._inner("alltoall", inputs)) is not None:
            return inner.alltoall(outputs, inputs, opts)
        return self.operations.all_to_all(outputs, inputs, not opts.asyncOp)

    def barrier(self, opts: Any = None) -> Any:
        return self.operations.barrier(opts is not None and not opts.asyncOp)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        (tensor,) = tensors = _as_list(tensors)
        if (inner := self._inner("send", tensors)) is not None:
            return inner.send(tensors, to, tag)
        return HvdkitWork(self._messages.send(self._ordered, bytes_of("send", tensor.contiguous()), to, tag), tensors)

    def recv(self, tensors: Any, source: int | None, tag: int) -> Any:
        (tensor,) = tensors = _as_list(tensors)
        if (inner := self._inner("recv", tensors)) is not None:
            return inner.recv(tensors, source, tag)
        return HvdkitWork(self._messages.receive(self._ordered, bytes_of("recv", tensor), source, tag), tensors)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self.recv(tensors, None, tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        COUNTS["monitored_barrier", "gloo"] += 1
        self._inner_gloo().monitored_barrier(timeout or timedelta(seconds=self.seconds), wait_all_ranks)

    def _get_sequence_number_for_group(self) -> int:
        return self._ordered.calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: groups count from 0."""

    def _inner(self, function: str, tensors: Sequence[Tensor], op: Any = None) -> Any:
        """Return the group of torch's own that runs a call, None if hvdkit does."""
        device = tensors[0].device.type
        if device == "cuda":
            COUNTS[function, "nccl"] += 1
            return self._inner_nccl()
        if (op is not None and TorchReduction(op).number not in REDUCTIONS) or any(
            tensor.is_sparse for tensor in tensors
        ):
            COUNTS[function, "gloo"] += 1
            return self._inner_gloo()
        COUNTS[function, "hvdkit"] += 1
        return None

    def _inner_gloo(self) -> Any:
        """Return a group of Gloo among the same ranks. The first call is collective."""
        if "gloo" not in self._inner_groups:
            gloo: Any = dist.ProcessGroupGloo  # the stubs lack its options
            options = gloo._Options()
            address = addresses_for(World(LAUNCHER, self._rank, self._size))[0]
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout, options._threads = timedelta(seconds=self.seconds), 2
            made = gloo(c10d.PrefixStore("inner/gloo", self._store), self._rank, self._size, options)
            made._set_sequence_number_for_group()
            self._inner_groups["gloo"] = made
        return self._inner_groups["gloo"]

    def _inner_nccl(self) -> Any:
        """Return a group of NCCL among the same ranks, for tensors on GPUs. The first call is collective."""
        if "nccl" not in self._inner_groups:
            if not dist.is_nccl_available():
                raise ValueError("hvdkit: this PyTorch has no NCCL for tensors on GPUs\nHINT: give tensor.cpu().")
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=self.seconds)
            store = c10d.PrefixStore("inner/nccl", self._store)
            self._inner_groups["nccl"] = nccl(store, self._rank, self._size, options)
        return self._inner_groups["nccl"]


DEFAULT: list[HvdkitProcessGroup] = []  # the default group, if it is of hvdkit


def new_group(options: Any, pg_options: Any = None) -> HvdkitProcessGroup:
    """Return a group for torch.distributed, as the creator of backend "hvdkit"."""
    if not options.global_ranks_in_group:
        reach_python(HvdkitProcessGroup)
        group = HvdkitProcessGroup(options, None)
        DEFAULT[:] = [group]
        return group
    return HvdkitProcessGroup(options, DEFAULT[0].session)


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


leave_untraced(HvdkitProcessGroup, TensorOperations, HvdkitWork)
