"""Codecs as a communication hook of torch's DistributedDataParallel.

The gradients of a model are a lane of a session of the hook's own, as those of an optimizer are one of hvd.init()'s:
buckets are handed over in the midst of the backward pass, and a thread of the hook's own waits for the step's end.
"""
# No postponed annotations here: DDP compares those of a hook with the classes.

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hvdkit.api.gradients.compression import check_told_apart, codec_of
from hvdkit.compression import Codec
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session.core import Engine
from hvdkit.engine.steps.lane import Lane
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.data_parallel.gradients import Bucket, Gradients, checked, share_of
from hvdkit.torch.data_parallel.group import Worker, open_session, timeout_of

FUNCTION = "ddp_hook"
# What the engine's users know by another name, or set elsewhere.
WORDS = {
    "HVDKIT_TIMEOUT_SECONDS": "the hook's timeout",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "the hook's timeout",
    f"optimizer '{FUNCTION}'": FUNCTION,
    "hvd.init()": FUNCTION,
}


class DDPHook:
    """Averages the buckets of one DistributedDataParallel, encoded by a codec; ``hvd.ddp_hook`` makes it.

    ``register(model)`` gives it to a model. Where something else registers hooks, as Lightning's DDPStrategy does, it
    is the state and ``hvd.DDPHook.reduce`` the hook: ``model.register_comm_hook(hook, hvd.DDPHook.reduce)``.
    """

    def __init__(self, codec: Codec, process_group: Any, timeout: timedelta | None) -> None:
        self._codec = codec
        self._process_group = process_group
        self._timeout = timeout
        self._rank, self._ranks = -1, [-1]  # in the job, and those of the process group, once they are connected
        self._gradients = Gradients(codec)
        self._loaded: list[Any] = []  # states, until they are the lane's
        self._worker: Worker | None = None
        self._step: list[Bucket] = []  # what was handed over in this step; the worker's
        self._broken: str | None = None
        self._streams: dict[torch.device, Any] = {}
        self._staging: dict[int, Tensor] = {}  # by index of the bucket: page-locked memory

    # -- what users call ----------------------------------------------------------------------------------------------

    def register(self, model: DistributedDataParallel) -> None:
        """Have a model average its gradients by this hook: before its first backward pass, on all of its ranks.

        Args:
            model: a DistributedDataParallel.

        Raises:
            TypeError: for another kind of model.
            ValueError: if the hook has one already or the process group of other ranks.
            HorovodInternalError: where ranks have different codecs, or not all of them come.

        Examples:
            >>> model = torch.nn.parallel.DistributedDataParallel(model)
            >>> hook = hvd.ddp_hook(hvd.Compression.fp16)
            >>> hook.register(model)
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{FUNCTION}: register: expected a DistributedDataParallel, got {type(model).__name__}\n"
                "HINT: for a plain module there is hvd.DistributedOptimizer(..., compression=...)."
            )
        if self._gradients.knows_any:
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
        self._gradients.name(model.module)
        if self._worker is None:
            self._open()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The hook, which DDP calls.

        Args:
            bucket: a bucket of gradients, float16, bfloat16, float32 or float64, on a CPU or CUDA, in a flat tensor.

        Returns:
            A Future of the bucket's tensor, of the same shape, averaged in place.

        Raises:
            RuntimeError: here or in the backward pass, where a rank is lost or ranks differ.
            ValueError: for gradients of other dtypes or devices, or of another model.

        Examples:
            >>> model = torch.nn.parallel.DistributedDataParallel(model)
            >>> model.register_comm_hook(hvd.ddp_hook(hvd.Compression.fp16), hvd.DDPHook.reduce)
            >>> model(x).mean().backward()
            >>> model.module.weight.grad
            tensor([[1.5000, 1.5000]])
        """
        index, is_last, flat, parameters = bucket.index(), bucket.is_last(), bucket.buffer(), bucket.parameters()
        self._gradients.check(index, flat, parameters)
        worker = self._worker or self._open()
        on_device = flat.device.type == "cuda"
        ready = torch.cuda.current_stream(flat.device).record_event() if on_device else None
        future: Future[Tensor] = Future(devices=[flat.device] if on_device else None)
        handed = Bucket(flat, parameters, ready, future, self._staged(index, flat) if on_device else flat)

        def result(done: Future[Tensor]) -> Tensor:
            # DDP waits in C++, where an error arrives that a callback raises, but none of Future.set_exception.
            if handed.errors:
                raise handed.errors[0]
            return done.value()

        averaged = future.then(result)
        worker.run(lambda: self._take(handed, index == 0, is_last))
        return averaged

    def state_dict(self) -> dict[str, Any]:
        """What this rank's codec keeps, between two steps: lists, numbers, strings, and tensors in host memory.

        Each rank has its own: save them all. ``torch.load`` takes it with ``weights_only=True``.

        Returns:
            A dict of which ``codec``, ``rank`` and ``size`` say whose it is, ``turn`` how many steps there were,
            ``shapes`` how gradients lie in memory, in the order of the model's parameters. ``kept`` has what an
            optimizer's state_dict has under "compression", if the codec keeps anything.

        Raises:
            HorovodInternalError: in the midst of a step, also of one that failed when some of it was encoded.
        """
        rank, size = self._rank_and_size()
        if self._loaded:
            return share_of(self._loaded, rank, size)
        is_still = self._broken is None or self._worker is None or self._worker.has_left()
        if not is_still or not self._gradients.can_be_saved(self._broken is not None):
            why = "that was not completed" if self._broken is None else f"that failed: {self._broken}"
            raise HorovodInternalError(
                f"{FUNCTION}: state_dict: what the codec keeps is in the midst of a step {why}\n"
                "HINT: call it after each step, and go on from what it returned last."
            )
        return self._gradients.saved(rank, size)

    def load_state_dict(self, state: Any) -> None:
        """Go on from what ``state_dict`` returned: on all ranks alike, between two steps or before the first.

        With as many ranks as there were, each takes its own and goes on with the same bits. With another number of
        ranks, what rank r kept goes to rank r modulo the ranks there are now and is summed there, in what it adds to
        the average. What is not in the list is lost.

        Args:
            state: this rank's own, or a list of those of all ranks, in any order.

        Raises:
            TypeError: for anything else.
            ValueError: for states of different steps or jobs; and by the next backward pass where parameters have other
                shapes.

        Examples:
            >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
            >>> hook = hvd.ddp_hook(hvd.Compression.topk(0.1))
            >>> hook.register(model)
            >>> model(torch.ones(1, 64)).mean().backward()
            >>> torch.save(hook.state_dict(), f"hook.{hvd.rank()}.pt")
            >>> again = hvd.ddp_hook(hvd.Compression.topk(0.1))
            >>> again.load_state_dict(torch.load(f"hook.{hvd.rank()}.pt"))
        """
        self._loaded = checked(state)

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent to others so far: gradients, and what ranks compare."""
        return 0 if self._worker is None else self._worker.session.engine.groups.bytes_sent()

    # -- connecting ---------------------------------------------------------------------------------------------------

    def _rank_and_size(self) -> tuple[int, int]:
        if self._worker is not None:
            topology = self._worker.session.engine.topology
            return topology.rank, topology.size
        if not dist.is_initialized():
            raise ValueError(f"{FUNCTION}: call torch.distributed.init_process_group first")
        return dist.get_rank(self._process_group), dist.get_world_size(self._process_group)

    def _open(self) -> Worker:
        process_group = self._process_group or dist.group.WORLD
        if process_group is None:
            raise ValueError(f"{FUNCTION}: call torch.distributed.init_process_group first")
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(process_group)
        worker = None
        try:
            session = open_session(process_group, self._timeout or timeout_of(process_group))
            worker = Worker(self, session)
            # There, so that the engine knows no other thread of this rank, and sees a dead-lock of what that waits for.
            worker.call(lambda: self._agree(session.engine, {"codec": self._codec.summary}))
        except HorovodInternalError as error:
            text = self._text_of(error)
            if worker is not None:
                worker.call(partial(worker.leave, text, failed=True))
                worker.tell_to_end()
            raise type(error)(f"{FUNCTION}: rank {self._rank}: {text}") from error
        self._worker = worker
        return worker

    @staticmethod
    def _agree(engine: Engine, facts: dict[str, Any]) -> None:
        """Raises MismatchError on all ranks if they differ in these."""
        engine.named.submit("barrier", [], facts, Call(FUNCTION)).wait()

    # -- on the worker's thread ---------------------------------------------------------------------------------------

    def _take(self, bucket: Bucket, is_first: bool, is_last: bool) -> None:
        lane = self._gradients.lane
        try:
            self._step.append(bucket)
            if self._broken is not None:
                raise HorovodInternalError(f"an earlier step failed: {self._broken}")
            if is_first and len(self._step) > 1:  # which DDP itself seldom allows
                raise HorovodInternalError("an exception ended the last backward pass before all was handed over")
            if is_first and self._loaded and lane is not None:
                self._go_on(lane)
            if bucket.ready is not None:
                stream = self._stream(bucket)
                with torch.cuda.stream(stream):
                    stream.wait_event(bucket.ready)
                    bucket.host.copy_(bucket.flat, non_blocking=True)
                    stream.synchronize()
            if lane is not None:
                self._gradients.hand_over(lane, bucket)
            if is_last:
                self._finish(lane or self._register())
        except BaseException as error:  # any: without a result the backward pass would wait for ever
            self._fail(error)

    def _register(self) -> Lane:
        assert self._worker is not None
        lane = self._gradients.register(self._worker.session.engine, self._step)
        self._go_on(lane)
        for bucket in self._step:
            self._gradients.hand_over(lane, bucket)
        return lane

    def _go_on(self, lane: Lane) -> None:
        """From what was loaded, on all ranks after as many steps."""
        assert self._worker is not None
        self._agree(self._worker.session.engine, {"earlier": self._loaded[0]["turn"] if self._loaded else 0})
        if self._loaded:
            self._gradients.load(lane, self._loaded)
            self._loaded = []

    def _finish(self, lane: Lane) -> None:
        lane.finish()
        for bucket in self._step:
            self._gradients.give_back(lane, bucket)
        while self._step:
            self._end(self._step[0])
            del self._step[0]

    def _end(self, bucket: Bucket) -> None:
        if bucket.ready is None:
            bucket.future.set_result(bucket.flat)
        else:
            with torch.cuda.stream(self._stream(bucket)):
                bucket.flat.copy_(bucket.host, non_blocking=True)
                bucket.future.set_result(bucket.flat)

    def _fail(self, error: BaseException) -> None:
        """Name in the error what failed. All later steps fail too, and no rank waits for this one any more."""
        text = f"{FUNCTION} on rank {self._rank} with codec {self._codec.summary}: {self._text_of(error)}"
        text += self._gradients.under_way()
        is_first, self._broken = self._broken is None, self._broken or text
        buckets, self._step = self._step, []
        try:
            for bucket in buckets:
                bucket.fail((ValueError if isinstance(error, ValueError) else HorovodInternalError)(text))
        finally:
            if is_first:
                assert self._worker is not None
                self._worker.leave(text, failed=True)

    def _text_of(self, error: BaseException) -> str:
        """An error, for who knows the process group and the arguments of hvd.ddp_hook."""
        text = str(error) or repr(error)
        for name, ours in WORDS.items():
            text = text.replace(name, ours)
        if self._ranks != list(range(len(self._ranks))):
            text += f"\nRanks are counted in the process group, which has ranks {self._ranks}."
        return text

    def _stream(self, bucket: Bucket) -> Any:
        """The hook's own order of work on a bucket's device; DDP's wait for the Future includes it."""
        device = bucket.flat.device
        if device not in self._streams:
            stream: Any = torch.cuda.Stream
            self._streams[device] = stream(device)
        return self._streams[device]

    def _staged(self, index: int, flat: Tensor) -> Tensor:
        """Host memory for a bucket. What was copied out of it in the step before is through: it is the same stream."""
        host = self._staging.get(index)
        if host is None or host.shape != flat.shape or host.dtype != flat.dtype:
            host = self._staging[index] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return host


def ddp_hook(compression: Any, process_group: Any = None, timeout: timedelta | None = None) -> DDPHook:
    """A communication hook that averages the gradients of a DistributedDataParallel, encoded by a codec.

    DDP does not know which ranks share a node, so everything is encoded, whatever the codec's ``compress`` says.
    Gradients travel over Gloo, those on CUDA through memory of the host. ``hook.state_dict()`` belongs in each rank's
    checkpoint. hvd.init() is not needed. With DGC, the optimizer must have no momentum.

    Args:
        compression: one of hvd.Compression, as it is or with parameters, or a hvdkit.compression.CustomCodec. What does
            not pay (biases, the weights of norms and small tensors) is averaged as it is, unless by fp16, bf16 or DGC.
        process_group: the model's, if not the default one; Gloo or NCCL.
        timeout: a timedelta, what a rank waits for another before that is an error; the process group's, if None.

    Returns:
        A DDPHook, whose ``register(model)`` is called next.

    Raises:
        TypeError: for what is no codec, process group or timedelta.
        ValueError: for a timeout that is not above zero.

    Examples:
        >>> model = torch.nn.parallel.DistributedDataParallel(model)
        >>> hook = hvd.ddp_hook(hvd.Compression.topk(0.01))
        >>> hook.register(model)
        >>> model(x).mean().backward()
        >>> model.module.weight.grad
        tensor([[1.5000, 1.5000]])
    """
    codec = codec_of(compression)
    if codec is None:
        raise TypeError(
            f"{FUNCTION}: compression must be one of hvd.Compression, such as hvd.Compression.fp16 or "
            f"hvd.Compression.topk(0.01), or a hvdkit.compression.CustomCodec, got {compression!r}"
        )
    check_told_apart(FUNCTION, codec)
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
