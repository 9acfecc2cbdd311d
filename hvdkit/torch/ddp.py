"""Codecs as a communication hook of torch's DistributedDataParallel.

Buckets go to a thread of the hook's own, in the order in which DDP hands them over, which is the same on all ranks. It
brings each one to its end before it begins the next, over a connection of its own: so neither two buckets nor a bucket
and the model's process group can cross, and the backward pass goes on meanwhile.
"""
# No postponed annotations here: DDP compares those of a hook with the classes.

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hvdkit.api.compression import codec_of
from hvdkit.collectives.group import Group
from hvdkit.compression import Codec
from hvdkit.errors import HorovodInternalError
from hvdkit.torch import ddp_state
from hvdkit.torch.arrays import as_array
from hvdkit.torch.ddp_buckets import Bucket, Describer, reduce_bucket
from hvdkit.torch.ddp_group import GroupTransport, MismatchError, agree, drive, timeout_of
from hvdkit.torch.ddp_units import Units
from hvdkit.torch.ddp_worker import Worker

FUNCTION = "ddp_hook"


@dataclass(frozen=True)
class _Opened:
    """What a hook has once its ranks are connected."""

    transport: GroupTransport
    group: Group
    worker: Worker
    timeout: timedelta


class DDPHook:
    """Averages the buckets of one DistributedDataParallel, encoded by a codec; ``hvd.ddp_hook`` makes it.

    ``register(model)`` gives it to a model. Where something else registers hooks, as Lightning's DDPStrategy does, it
    is the state and ``hvd.DDPHook.reduce`` the hook: ``model.register_comm_hook(hook, hvd.DDPHook.reduce)``.
    """

    def __init__(self, codec: Codec, process_group: Any, timeout: timedelta | None) -> None:
        self._codec = codec
        self._process_group = process_group
        self._timeout = timeout
        self._units = Units(codec) if codec.encodes else None
        self._loaded: ddp_state.Saved | None = None  # until it is known which rank this is
        self._describer = Describer(codec)
        self._agreed: dict[int, Bucket] = {}  # by index: what is known to be alike on all ranks
        self._opened: _Opened | None = None
        self._broken: str | None = None
        self._errors: list[BaseException] = []  # their tracebacks hold what Gloo may still write to
        self._streams: dict[torch.device, Any] = {}
        self._staging: dict[int, Tensor] = {}  # by index of the bucket: page-locked memory

    # -- what users call ----------------------------------------------------------------------------------------------

    def register(self, model: DistributedDataParallel) -> None:
        """Have ``model`` average its gradients by this hook: before its first backward pass, on all of its ranks.

        Raises TypeError for another kind of model, ValueError if the hook has one already or the process group of other
        ranks, HorovodInternalError where ranks have different codecs, or not all of them come.
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{FUNCTION}: register: expected a DistributedDataParallel, got {type(model).__name__}\n"
                "HINT: for a plain module there is hvd.DistributedOptimizer(..., compression=...)."
            )
        if self._describer.knows_any:
            raise ValueError(f"{FUNCTION}: register: this hook has a model already\nHINT: make one for each model.")
        if self._process_group is None:
            self._process_group = model.process_group
        ranks, theirs = map(dist.get_process_group_ranks, (self._process_group, model.process_group))
        if ranks != theirs:
            raise ValueError(
                f"{FUNCTION}: register: the model is on ranks {theirs}, but process_group has ranks {ranks}\n"
                "HINT: leave process_group out; it is the model's then."
            )
        model.register_comm_hook(self, DDPHook.reduce)
        self._describer.name(model.module)
        if self._opened is None:
            self._open()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook: a Future of the bucket's flat tensor, averaged in place. DDP calls it.

        Raises, or lets the backward pass raise, RuntimeError where a rank is lost or ranks differ, ValueError for
        gradients that are not float16, bfloat16, float32 or float64 on a CPU or CUDA, or of another model.
        """
        described, buffer = self._describer.describe(bucket), bucket.buffer()
        opened = self._opened or self._open()
        on_device = buffer.device.type == "cuda"
        ready = torch.cuda.current_stream(buffer.device).record_event() if on_device else None
        future: Future[Tensor] = Future(devices=[buffer.device] if on_device else None)
        errors: list[BaseException] = []

        def job() -> None:
            try:
                with self._stream(buffer):
                    self._reduce(opened, described, buffer, ready)
                    future.set_result(buffer)
            except BaseException as error:  # any: without a result the backward pass would wait for ever
                errors.append(error)
                self._failed(opened, described, errors)
                if not future.done():
                    future.set_result(torch.empty(0))  # which nobody sees

        def result(done: Future[Tensor]) -> Tensor:
            # DDP waits in C++, where an error arrives that a callback raises, but none of Future.set_exception.
            if errors:
                raise errors[0]
            return done.value()

        averaged = future.then(result)
        opened.worker.run(job)
        return averaged

    def state_dict(self) -> dict[str, Any]:
        """What this rank's codec keeps, between two steps: lists, numbers, strings, and tensors in host memory.

        ``codec``, ``rank`` and ``size`` say whose it is, ``turn`` how many steps there were. ``units`` has for each run
        of gradients that are encoded together the places of its parameters, counted from the model's last, with rows
        and columns, its arrays (``kept``, float32, one after the other in this order), and what the codec knows of the
        run. Each rank has its own: save them all. ``torch.load`` takes it with ``weights_only=True``.
        """
        rank, size = self._rank_and_size()
        units = self._units
        if units is not None and self._loaded is not None:
            units = Units(units.codec)
            self._loaded.restore(units, self._codec, rank, size)
        return ddp_state.save(units, self._codec, rank, size)

    def load_state_dict(self, state: Any) -> None:
        """Go on from what ``state_dict`` returned: on all ranks alike, between two steps or before the first.

        ``state``: this rank's own, or a list of those of all ranks, in any order. With as many ranks as there were,
        each takes its own and goes on with the same bits, unless it was saved after the first step of all, since DDP
        lays out its buckets anew then. With another number of ranks, what rank r kept goes to rank r modulo the ranks
        there are now and is summed there, in what it adds to the average. What is not in the list is lost.

        Raises TypeError for anything else, ValueError for states of different steps or jobs, or where the codec has
        no place for what was kept. The first backward pass raises ValueError where parameters have other shapes.
        """
        self._loaded = ddp_state.check(state, self._codec)
        if self._opened is not None:
            self._restore(self._opened.group)

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent to others so far: gradients, and what ranks compare."""
        return 0 if self._opened is None else self._opened.group.bytes_sent

    # -- connecting ---------------------------------------------------------------------------------------------------

    def _rank_and_size(self) -> tuple[int, int]:
        if self._opened is not None:
            return self._opened.group.rank, self._opened.group.size
        if not dist.is_initialized():
            raise ValueError(f"{FUNCTION}: call torch.distributed.init_process_group first")
        return dist.get_rank(self._process_group), dist.get_world_size(self._process_group)

    def _open(self) -> _Opened:
        process_group = self._process_group or dist.group.WORLD
        if process_group is None:
            raise ValueError(f"{FUNCTION}: call torch.distributed.init_process_group first")
        timeout = self._timeout or timeout_of(process_group)
        transport = GroupTransport(process_group, timeout)
        group = Group(transport, transport.ranks)
        try:
            drive(agree(group, {"codec": self._codec.told}), timeout)
        except HorovodInternalError as error:
            raise type(error)(f"{FUNCTION}: rank {transport.rank}: {error}") from error
        self._restore(group)
        self._opened = _Opened(transport, group, Worker(self, transport.break_connections), timeout)
        return self._opened

    def _restore(self, group: Group) -> None:
        if self._loaded is not None and self._units is not None:
            self._loaded.restore(self._units, self._codec, group.rank, group.size)
            self._agreed.clear()
        self._loaded = None

    # -- on the worker's thread ---------------------------------------------------------------------------------------

    def _reduce(self, opened: _Opened, bucket: Bucket, buffer: Tensor, ready: Any) -> None:
        if self._broken is not None:
            raise HorovodInternalError(f"an earlier bucket failed: {self._broken}")
        host = buffer
        if ready is not None:
            host = self._staged(bucket, buffer)
            stream = torch.cuda.current_stream(buffer.device)
            stream.wait_event(ready)
            host.copy_(buffer, non_blocking=True)
            stream.synchronize()
        agreed = self._agreed.get(bucket.index) == bucket
        steps = reduce_bucket(opened.group, as_array(host), bucket, self._codec, self._units, agreed)
        drive(steps, opened.timeout)
        self._agreed[bucket.index] = bucket
        if ready is not None:
            buffer.copy_(host, non_blocking=True)

    def _failed(self, opened: _Opened, bucket: Bucket, errors: list[BaseException]) -> None:
        """Name in the error what failed. All later buckets fail too, and no rank waits for this one any more."""
        error = errors[0]
        told = f"{FUNCTION}: {bucket.told} on rank {opened.transport.rank} with codec {self._codec.told}: {error}"
        kind = ValueError if isinstance(error, ValueError) else HorovodInternalError
        errors[0] = kind(told)
        if self._broken is None:
            self._broken = told
            self._errors.append(error)
            if not isinstance(error, MismatchError):  # which every rank finds by itself
                opened.transport.break_connections()

    def _stream(self, buffer: Tensor) -> contextlib.AbstractContextManager[Any]:
        """In it, work on the buffer's device has an order of its own; DDP's wait for the Future includes it."""
        if buffer.device.type != "cuda":
            return contextlib.nullcontext()
        if buffer.device not in self._streams:
            stream: Any = torch.cuda.Stream
            self._streams[buffer.device] = stream(buffer.device)
        return torch.cuda.stream(self._streams[buffer.device])

    def _staged(self, bucket: Bucket, buffer: Tensor) -> Tensor:
        """Host memory for a bucket. What was copied out of it in the step before is through: it is the same stream."""
        host = self._staging.get(bucket.index)
        if host is None or host.shape != buffer.shape or host.dtype != buffer.dtype:
            host = self._staging[bucket.index] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        return host


def ddp_hook(compression: Any, process_group: Any = None, timeout: timedelta | None = None) -> DDPHook:
    """A communication hook that averages the gradients of a DistributedDataParallel, encoded by a codec.

    ``compression``: one of hvd.Compression, as it is or with parameters, or a hvdkit.compression.CustomCodec. What
    does not pay (biases, the weights of norms and small tensors) is averaged as it is, unless by fp16, bf16 or DGC; all
    else in a bucket is encoded together. DDP does not know which ranks share a node, so everything is encoded, whatever
    the codec's ``compress`` says. ``process_group``: the model's, if not the default one; Gloo or NCCL. ``timeout``:
    what a rank waits for another before that is an error; the process group's, if None. Gradients travel over Gloo,
    those on CUDA through host memory.

        model = DistributedDataParallel(model)
        hook = hvd.ddp_hook(hvd.Compression.topk(0.01))
        hook.register(model)

    ``hook.state_dict()`` belongs in each rank's checkpoint. hvd.init() is not needed. With DGC, the optimizer must have
    no momentum. Raises TypeError for what is no codec, process group or timedelta, ValueError for a timeout that is not
    above zero.
    """
    codec = codec_of(compression)
    if codec is None:
        raise TypeError(
            f"{FUNCTION}: compression must be one of hvd.Compression, such as hvd.Compression.fp16 or "
            f"hvd.Compression.topk(0.01), or a hvdkit.compression.CustomCodec, got {compression!r}"
        )
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"{FUNCTION}: process_group must be one that this rank is in, or None, got {process_group!r}\n"
            "HINT: give the process group of the DistributedDataParallel."
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"{FUNCTION}: timeout must be a datetime.timedelta or None, got {timeout!r}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"{FUNCTION}: timeout must be above zero, got {timeout}")
    return DDPHook(codec, process_group, timeout)
