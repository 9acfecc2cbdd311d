"""Codecs as a communication hook of torch's DistributedDataParallel.

In a session of the hook's own the model's gradients are a lane, for which the hook's worker thread waits.
"""
# No postponed annotations here: DDP compares a hook's annotations with its classes.

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from hvdkit.api.gradients.compression import check_told_apart, codec_of
from hvdkit.compression import Codec
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session.core import Engine
from hvdkit.engine.steps.lane import Lane
from hvdkit.errors import HorovodInternalError
from hvdkit.torch.data_parallel.gradients import HookBucket, ModelGradients, PinnedCopies, checked
from hvdkit.torch.data_parallel.group import Worker, hooks_text, open_session

FUNCTION = "ddp_hook"


class DDPHook:
    """A hook, made by ``hvd.ddp_hook``, that averages the buckets of one DistributedDataParallel, encoded by a codec.

    ``register(model)`` gives it to a model. Where other code registers hooks, as Lightning's DDPStrategy does, the hook
    is the state: ``model.register_comm_hook(hook, hvd.DDPHook.reduce)``.
    """

    def __init__(self, codec: Codec, process_group: Any, timeout: timedelta | None) -> None:
        self._codec = codec
        self._process_group = process_group
        self._timeout = timeout
        self._rank, self._ranks = -1, [-1]  # this rank in the job and the process group's ranks, once connected
        self._gradients = ModelGradients(codec)
        self._copies = PinnedCopies()
        self._loaded: list[Any] = []  # states that the lane has not taken yet
        self._worker: Worker | None = None
        self._step: list[HookBucket] = []  # the buckets of this step; only the worker's thread uses it
        self._broken: str | None = None  # the error that ended the hook

    def register(self, model: DistributedDataParallel) -> None:
        """Average a model's gradients by this hook; call it before the first backward pass, on all ranks of the model.

        Args:
            model: a DistributedDataParallel.

        Raises:
            TypeError, ValueError: for another kind of model, a second one, or one on other ranks.
            HorovodInternalError: if ranks have different codecs, or not all ranks call it.

        The example is that of hvd.ddp_hook().
        """
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"{FUNCTION}: register: expected a DistributedDataParallel, got {type(model).__name__}\n"
                "HINT: for a plain module there is hvd.DistributedOptimizer(..., compression=...)."
            )
        if self._gradients.have_model:
            raise ValueError(f"{FUNCTION}: register: this hook has a model already\nHINT: make one for each model.")
        if self._process_group is None:
            self._process_group = model.process_group
        ranks, of_model = map(dist.get_process_group_ranks, (self._process_group, model.process_group))
        if ranks != of_model:
            raise ValueError(
                f"{FUNCTION}: register: the model is on ranks {of_model}, but process_group has ranks {ranks}\n"
                "HINT: leave process_group out; it is the model's then."
            )
        model.register_comm_hook(self, DDPHook.reduce)
        self._gradients.name(model.module)
        if self._worker is None:
            self._open()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket; DDP calls it.

        Args:
            bucket: a bucket of gradients, float16, bfloat16, float32 or float64, on a CPU or CUDA, in a flat tensor.

        Returns:
            A Future of the bucket's tensor, of the same shape, averaged in place.

        Raises:
            RuntimeError, ValueError: if a rank is lost or ranks differ; for other gradients, or another model's.

        The example is that of hvd.ddp_hook().
        """
        index, is_last, flat, parameters = bucket.index(), bucket.is_last(), bucket.buffer(), bucket.parameters()
        self._gradients.check(index, flat, parameters)
        worker = self._worker or self._open()
        handed = self._copies.bucket(index, flat, parameters)
        averaged = handed.future.then(handed.result)
        worker.run(lambda: self._take(handed, index == 0, is_last))
        return averaged

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's codec between two steps: lists, numbers, strings, and tensors on the host.

        Each rank has its own state: save all. ``torch.load`` takes it with ``weights_only=True``.

        Returns:
            A dict with the ``codec``, the ``rank`` of ``size`` ranks, the number of steps as ``turn``, the ``shapes``
            of gradients in memory, and what codecs have ``kept``, as an optimizer's state_dict under "compression".

        Raises:
            HorovodInternalError: during a step, and after a step that failed when a part of it was encoded.
        """
        if self._worker is None:
            rank, size = dist.get_rank(self._group()), dist.get_world_size(self._group())
        else:
            topology = self._worker.session.engine.topology
            rank, size = topology.rank, topology.size
        if self._loaded:
            kept = [entry for state in self._loaded for entry in state["kept"] if entry["rank"] % size == rank]
            return {**self._loaded[0], "rank": rank, "size": size, "kept": kept}
        is_still = self._broken is None or self._worker is None or self._worker.has_left()
        if not is_still or not self._gradients.can_be_saved(self._broken is not None):
            why = "that was not completed" if self._broken is None else f"that failed: {self._broken}"
            raise HorovodInternalError(
                f"{FUNCTION}: state_dict: what the codec keeps is in the midst of a step {why}\n"
                "HINT: call it after each step, and go on from what it returned last."
            )
        return self._gradients.saved(rank, size)

    def load_state_dict(self, state: Any) -> None:
        """Go on from a state of ``state_dict``; call it on all ranks, between two steps or before the first step.

        With as many ranks as before, each goes on from its own state with the same bits. With another number, the state
        of rank r goes to rank r modulo that number, where states are summed, scaled to their part of the average.
        States that are not in the list are lost.

        Args:
            state: this rank's own, or a list of the states of all ranks, in any order.

        Raises:
            TypeError: for anything else.
            ValueError: for states of different steps or jobs; by the next backward pass, for other shapes.

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
        """Return the number of bytes that this rank has sent so far: gradients, and facts that ranks compare."""
        return 0 if self._worker is None else self._worker.session.engine.groups.bytes_sent()

    def _group(self) -> Any:
        process_group = self._process_group or dist.group.WORLD
        if process_group is None:
            raise ValueError(f"{FUNCTION}: call torch.distributed.init_process_group first")
        return process_group

    def _open(self) -> Worker:
        process_group = self._group()
        self._rank, self._ranks = dist.get_rank(), dist.get_process_group_ranks(process_group)
        worker = None
        try:
            session = open_session(process_group, self._timeout)
            worker = Worker(self, session)
            # On the worker's thread, so that the engine knows only this thread and can see a dead-lock.
            worker.call(lambda: self._agree(session.engine, {"codec": self._codec.summary}))
        except HorovodInternalError as error:
            text = hooks_text(error, self._ranks)
            if worker is not None:
                worker.call(partial(worker.leave, text, failed=True))
                worker.tell_to_end()
            raise type(error)(f"{FUNCTION}: rank {self._rank}: {text}") from error
        self._worker = worker
        return worker

    @staticmethod
    def _agree(engine: Engine, facts: dict[str, Any]) -> None:
        """Raise MismatchError on all ranks if their ``facts`` differ."""
        engine.named.submit("barrier", [], facts, Call(FUNCTION)).wait()

    # The methods below run on the worker's thread.

    def _take(self, bucket: HookBucket, is_first: bool, is_last: bool) -> None:
        lane = self._gradients.lane
        assert self._worker is not None
        try:
            self._step.append(bucket)
            if self._broken is not None:
                raise HorovodInternalError(f"an earlier step failed: {self._broken}")
            if is_first and len(self._step) > 1:
                raise HorovodInternalError("an exception ended the last backward pass before all was handed over")
            if is_first and self._loaded and lane is not None:
                self._go_on(lane)
            if bucket.ready is not None:
                self._copies.fill(bucket)
            if lane is not None:
                self._gradients.hand_over(lane, bucket)
            if is_last and lane is None:
                lane = self._gradients.register(self._worker.session.engine, self._step)
                self._go_on(lane)
                for each in self._step:
                    self._gradients.hand_over(lane, each)
            if is_last and lane is not None:
                lane.finish()
                for each in self._step:
                    self._gradients.give_back(lane, each)
                while self._step:
                    self._copies.finish(self._step[0])
                    del self._step[0]
        except BaseException as error:  # any error: without a result the backward pass would wait for ever
            self._fail(error)

    def _go_on(self, lane: Lane) -> None:
        """Load the states, after all ranks agreed that they have states of the same step."""
        assert self._worker is not None
        self._agree(self._worker.session.engine, {"earlier": self._loaded[0]["turn"] if self._loaded else 0})
        if self._loaded:
            self._gradients.load(lane, self._loaded)
            self._loaded = []

    def _fail(self, error: BaseException) -> None:
        """End the step's Futures with an error. All later steps fail too, and no rank waits for this rank any more."""
        text = f"{FUNCTION} on rank {self._rank} with codec {self._codec.summary}: {hooks_text(error, self._ranks)}"
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


def ddp_hook(compression: Any, process_group: Any = None, timeout: timedelta | None = None) -> DDPHook:
    """Return a communication hook that averages the gradients of a DistributedDataParallel, encoded by a codec.

    Everything is encoded, whatever the codec's ``compress`` is. Gradients travel over Gloo, those on CUDA through host
    memory. Save ``hook.state_dict()`` in each rank's checkpoint. hvd.init() is not needed. With DGC, the optimizer must
    have no momentum.

    Args:
        compression: one of hvd.Compression, as it is or with parameters, or a hvdkit.compression.CustomCodec. Biases,
            the weights of norms and small tensors are averaged as they are, unless by fp16, bf16 or DGC.
        process_group: the model's, if not the default process group; Gloo or NCCL.
        timeout: a timedelta, after which waiting for another rank is an error; the process group's, if None.

    Returns:
        A DDPHook, whose ``register(model)`` is called next.

    Raises:
        TypeError, ValueError: for another kind of codec or process group, or no timeout above zero.

    Examples:
        >>> model = torch.nn.parallel.DistributedDataParallel(model)
        >>> hook = hvd.ddp_hook(hvd.Compression.topk(0.01))
        >>> hook.register(model)
        >>> model(x).mean().backward()
        >>> model.module.weight.grad
        tensor([[1.5000, 1.5000]])
    """
    if (codec := codec_of(compression)) is None:
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
