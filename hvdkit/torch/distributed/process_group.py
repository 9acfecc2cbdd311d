"""The process group of torch.distributed that runs on hvdkit: torch's names for the operations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from hvdkit.engine.ordered.group import OrderedGroup
from hvdkit.engine.session.session import Session
from hvdkit.errors import PeerLostError
from hvdkit.torch.distributed.from_cpp import leave_untraced, reach_python, torch_version
from hvdkit.torch.distributed.inner import InnerGroups
from hvdkit.torch.distributed.memory import GroupMemory, bytes_of
from hvdkit.torch.distributed.monitored import monitored_barrier
from hvdkit.torch.distributed.operations import TensorOperations
from hvdkit.torch.distributed.reductions import TorchReduction
from hvdkit.torch.distributed.session import MEETING, close_session, open_session
from hvdkit.torch.distributed.work import HvdkitWork
from hvdkit.transports.security.admission import absent_after

_GROUPS_KEY, _NUMBER_KEY = "hvdkit/groups", "hvdkit/number"
_ProcessGroup: Any = dist.ProcessGroup  # its stubs have overloads that nothing calls


class HvdkitProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of ranks whose tensors on the CPU are communicated by hvdkit."""

    def __init__(self, options: Any, session: Session | None) -> None:
        """Make a group of ``options``: the default group if ``session`` is None, else one in its session."""
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        # torch gives a later group the same part of the store, if its name or the job's address comes again.
        again = int(options.store.add(f"hvdkit/made/{rank}", 1))
        self._store, self._rank, self._size = c10d.PrefixStore(f"hvdkit/{again}", options.store), rank, size
        seconds = options.timeout.total_seconds()
        self._owns_session = session is None
        self.session = session or open_session(self._store, size, rank, seconds)
        engine = self.session.engine
        ranks = list(range(size)) if self._owns_session else list(options.global_ranks_in_group)
        number = 1 if self._owns_session else self._agree_on_number(self._store, ranks, seconds, MEETING)
        self._ordered = engine.ordered_group(ranks, number, options.group_id, seconds)
        self.operations = TensorOperations(self._ordered)
        self._messages = engine.messages
        self._inner = InnerGroups(self._store, rank, size, lambda: self.seconds)
        self._memory = GroupMemory()
        self._name, self._description = str(options.group_id), "undefined"

    def _agree_on_number(self, store: Any, ranks: Sequence[int], seconds: float, purpose: str) -> int:
        """Return a number that no other group of the session has, the same on all ``ranks`` of a new one.

        Raises PeerLostError, with ``purpose``, if the first of them does not come within ``seconds``.
        """
        if self._rank == 0:
            first = self if self._owns_session else DEFAULT[0]
            store.set(_NUMBER_KEY, str(1 + int(first._store.add(_GROUPS_KEY, 1))))
        if absent_after(store, [_NUMBER_KEY], seconds):
            raise PeerLostError(f"rank {ranks[self._rank]} waited {seconds:g} s for ranks {ranks[:1]} {purpose}")
        return int(store.get(_NUMBER_KEY))

    def another_group(self, name: str, seconds: float, purpose: str) -> OrderedGroup:
        """Return one more group of ordered operations, in the same session, of the same ranks; collective, and blocks.

        Raises PeerLostError, with ``purpose``, if the first rank does not come within ``seconds``.
        """
        count = self._store.add(f"hvdkit/more/{self._rank}", 1)
        store, ranks = c10d.PrefixStore(f"hvdkit/more/{count}", self._store), list(self._ordered.group.members)
        number = self._agree_on_number(store, ranks, seconds, purpose)
        return self.session.engine.ordered_group(ranks, number, name, seconds)

    @property
    def seconds(self) -> float:
        """The timeout of an operation."""
        return self._ordered.seconds

    def getBackendName(self) -> str:
        return "hvdkit"

    # The C++ of these methods asks the group's backends; this group has none.
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
        """Return the backend of a device: NCCL's for GPUs; for the CPU the allocator that FSDP asks for memory."""
        return self._inner.nccl() if device.type == "cuda" else self._memory

    _device_types = property(lambda self: [torch.device("cpu")])

    def set_timeout(self, timeout: timedelta) -> None:
        self._ordered.seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """End the group on this rank; the default group's end is that of the session."""
        self._end("")

    def _end(self, failure: str) -> None:
        self.operations.close()
        self._inner.shutdown()
        if self._owns_session:
            close_session(self.session, failure, failed=bool(failure))
            DEFAULT[:] = [group for group in DEFAULT if group is not self]

    def abort(self) -> None:
        """End the group at once; the default group's other ranks get an error that says so."""
        self._end("it called abort()")

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _as_list(tensors), opts or c10d.AllreduceOptions()
        if (inner := self._inner.for_call("allreduce", tensors, opts.reduceOp)) is not None:
            return inner.allreduce(tensors, opts)
        return self.operations.all_reduce(tensors, TorchReduction(opts.reduceOp), not opts.asyncOp)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if (inner := self._inner.for_call("allreduce_coalesced", tensors, opts.reduceOp)) is not None:
            return inner.allreduce_coalesced(tensors, opts)
        return self.operations.all_reduce(tensors, TorchReduction(opts.reduceOp), not opts.asyncOp)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _as_list(tensors), opts or c10d.ReduceOptions()
        if (inner := self._inner.for_call("reduce", tensors, opts.reduceOp)) is not None:
            return inner.reduce(tensors, opts)
        return self.operations.reduce(tensors[0], opts.rootRank, TorchReduction(opts.reduceOp), not opts.asyncOp)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        tensors, opts = _as_list(tensors), opts or c10d.BroadcastOptions()
        if (inner := self._inner.for_call("broadcast", tensors)) is not None:
            return inner.broadcast(tensors, opts)
        return self.operations.broadcast(tensors, opts.rootRank, not opts.asyncOp)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if (inner := self._inner.for_call("allgather", inputs)) is not None:
            return inner.allgather(outputs, inputs, opts)
        return self.operations.all_gather(outputs[0], inputs[0], not opts.asyncOp)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if (inner := self._inner.for_call("allgather_coalesced", inputs)) is not None:
            return inner.allgather_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())
        works = [
            self.operations.all_gather([output[index] for output in outputs], tensor, False)
            for index, tensor in enumerate(inputs)
        ]
        return works[-1]

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.AllgatherOptions()
        if (inner := self._inner.for_call("all_gather_single", [tensor])) is not None:
            return inner._allgather_base(output, tensor, opts)
        return self.operations.all_gather_single([output], [tensor], not opts.asyncOp)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if (inner := self._inner.for_call("all_gather_single_coalesced", inputs)) is not None:
            return inner.allgather_into_tensor_coalesced(outputs, inputs, opts or c10d.AllgatherOptions())
        return self.operations.all_gather_single(outputs, inputs, False)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.GatherOptions()
        if (inner := self._inner.for_call("gather", inputs)) is not None:
            return inner.gather(outputs, inputs, opts)
        return self.operations.gather(outputs[0] if outputs else [], inputs[0], opts.rootRank, not opts.asyncOp)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ScatterOptions()
        if (inner := self._inner.for_call("scatter", outputs)) is not None:
            return inner.scatter(outputs, inputs, opts)
        return self.operations.scatter(outputs[0], inputs[0] if inputs else [], opts.rootRank, not opts.asyncOp)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (inner := self._inner.for_call("reduce_scatter", inputs[0], opts.reduceOp)) is not None:
            return inner.reduce_scatter(outputs, inputs, opts)
        return self.operations.reduce_scatter(outputs[0], inputs[0], TorchReduction(opts.reduceOp), not opts.asyncOp)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (inner := self._inner.for_call("reduce_scatter_single", [tensor], opts.reduceOp)) is not None:
            return inner._reduce_scatter_base(output, tensor, opts)
        reduction = TorchReduction(opts.reduceOp)
        return self.operations.reduce_scatter_single([output], [tensor], reduction, not opts.asyncOp)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        if (inner := self._inner.for_call("reduce_scatter_single_coalesced", inputs, opts.reduceOp)) is not None:
            return inner.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        return self.operations.reduce_scatter_single(outputs, inputs, TorchReduction(opts.reduceOp), False)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        opts = opts or c10d.AllToAllOptions()
        if (inner := self._inner.for_call("all_to_all_single", [tensor])) is not None:
            return inner.alltoall_base(output, tensor, output_splits, input_splits, opts)
        return self.operations.all_to_all_single(output, tensor, output_splits, input_splits, not opts.asyncOp)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        opts = opts or c10d.AllToAllOptions()
        if (inner := self._inner.for_call("alltoall", inputs)) is not None:
            return inner.alltoall(outputs, inputs, opts)
        return self.operations.all_to_all(outputs, inputs, not opts.asyncOp)

    def barrier(self, opts: Any = None) -> Any:
        return self.operations.barrier(opts is not None and not opts.asyncOp)

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        (tensor,) = tensors = _as_list(tensors)
        if (inner := self._inner.for_call("send", tensors)) is not None:
            return inner.send(tensors, to, tag)
        return HvdkitWork(self._messages.send(self._ordered, bytes_of("send", tensor.contiguous()), to, tag), tensors)

    def recv(self, tensors: Any, source: int | None, tag: int) -> Any:
        (tensor,) = tensors = _as_list(tensors)
        if (inner := self._inner.for_call("recv", tensors)) is not None:
            return inner.recv(tensors, source, tag)
        return HvdkitWork(self._messages.receive(self._ordered, bytes_of("recv", tensor), source, tag), tensors)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        return self.recv(tensors, None, tag)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 raises StallError with the first, or all, that do not come within ``timeout``."""
        monitored_barrier(self._messages, self._ordered, timeout or timedelta(seconds=self.seconds), wait_all_ranks)

    def _get_sequence_number_for_group(self) -> int:
        return self._ordered.calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: groups count from 0."""


DEFAULT: list[HvdkitProcessGroup] = []  # the default group, if it is of hvdkit


def new_group(options: Any, pg_options: Any = None) -> HvdkitProcessGroup:
    """Return a group for torch.distributed, as the creator of backend "hvdkit"."""
    if torch_version() < (2, 13):
        raise RuntimeError(
            f"the backend hvdkit needs PyTorch 2.13 or later, this is {torch.__version__}\n"
            'HINT: use backend "gloo", or hvd.DistributedOptimizer, which older versions have too.'
        )
    reach_python(HvdkitProcessGroup)
    leave_untraced(HvdkitProcessGroup, TensorOperations, HvdkitWork)
    if options.global_ranks_in_group and DEFAULT:
        return HvdkitProcessGroup(options, DEFAULT[0].session)
    group = HvdkitProcessGroup(options, None)  # beside a default group of another backend, a session of its own
    if not options.global_ranks_in_group:
        DEFAULT[:] = [group]
    return group


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
