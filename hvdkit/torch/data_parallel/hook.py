"""Codecs as a communication hook of torch's DistributedDataParallel: each piece of gradients is an ordered call."""
# No postponed annotations here: DDP compares a hook's annotations with its classes.

from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from hvdkit.api.gradients.compression import check_told_apart, codec_of
from hvdkit.compression import Codec
from hvdkit.engine.loop.completion import Completion
from hvdkit.engine.ordered.facts import agree
from hvdkit.engine.session.session import GOODBYE_SECONDS
from hvdkit.errors import HorovodInternalError, MismatchError
from hvdkit.torch.data_parallel.bucket import HookBucket
from hvdkit.torch.data_parallel.gradients import ModelGradients, checked
from hvdkit.torch.data_parallel.group import NAME as FUNCTION
from hvdkit.torch.data_parallel.group import HookGroup, hooks_text, ranks_beside
from hvdkit.torch.distributed import callbacks


class DDPHook:
    """A hook, made by ``hvd.ddp_hook``, that averages the buckets of one DistributedDataParallel, encoded by a codec.

    ``register(model)`` gives it to a model. Where other code registers hooks, as Lightning's DDPStrategy does, the hook
    is the state: ``model.register_comm_hook(hook, hvd.DDPHook.reduce)``.
    """

    def __init__(self, codec: Codec, process_group: Any, timeout: timedelta | None) -> None:
        self._codec = codec
        self._process_group = process_group
        self._timeout = timeout
        self._rank = -1  # in the job, once connected
        self._ranks: list[int] | None = None  # see ranks_beside
        self._gradients = ModelGradients(codec)
        self._loaded: list[Any] = []  # states from which the next step goes on
        self._group: HookGroup | None = None
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
                "HINT: for a plain module, use hvd.DistributedOptimizer(..., compression=...)."
            )
        if self._gradients.have_model:
            raise ValueError(f"{FUNCTION}: register: this hook has a model already\nHINT: make a hook for each model.")
        if self._process_group is None:
            self._process_group = model.process_group
        ranks, of_model = map(dist.get_process_group_ranks, (self._process_group, model.process_group))
        if ranks != of_model:
            raise ValueError(
                f"{FUNCTION}: register: the model is on ranks {of_model}, but process_group has ranks {ranks}\n"
                "HINT: leave process_group out; then the hook uses the model's."
            )
        model.register_comm_hook(self, DDPHook.reduce)
        self._gradients.name(model.module)
        if self._group is None:
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
        group = self._group or self._open()
        devices = None if flat.device.type == "cpu" else [flat.device]
        handed = HookBucket(flat, parameters, torch.futures.Future(devices=devices))  # type: ignore[arg-type]
        averaged = handed.future.then(handed.result)
        self._take(group, handed, index == 0, is_last)
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
        if self._group is None:
            process_group = self._of_model()
            rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        else:
            rank, size = self._group.ordered.group.rank, self._group.ordered.group.size
        if self._loaded:
            kept = [entry for state in self._loaded for entry in state["kept"] if entry["rank"] % size == rank]
            return {**self._loaded[0], "rank": rank, "size": size, "kept": kept}
        if self._broken is not None and self._group is not None:
            self._group.has_ended.wait(GOODBYE_SECONDS)
        if not self._gradients.can_be_saved(self._broken is not None):
            why = "that was not completed" if self._broken is None else f"that failed: {self._broken}"
            raise HorovodInternalError(
                f"{FUNCTION}: state_dict: the codec's state is in the middle of a step {why}\n"
                "HINT: call state_dict() after each step, and continue from the last one that it returned."
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
        """Return the number of bytes of gradients that this rank has sent so far."""
        return 0 if self._group is None else self._group.ordered.group.bytes_sent

    def _of_model(self) -> Any:
        process_group = self._process_group or dist.group.WORLD
        if process_group is None:
            raise ValueError(f"{FUNCTION}: call torch.distributed.init_process_group first")
        return process_group

    def _open(self) -> HookGroup:
        process_group = self._of_model()
        self._rank, self._ranks = dist.get_rank(), ranks_beside(process_group)
        group = None
        try:
            group = HookGroup(self, process_group, self._timeout)
            agree(group.ordered, FUNCTION, {"codec": self._codec.summary, "slots": []})
        except HorovodInternalError as error:
            text = hooks_text(error, self._ranks)
            if group is not None:
                group.leave(text)
            raise type(error)(f"{FUNCTION}: rank {self._rank}: {text}") from error
        self._group = group
        return group

    def _take(self, group: HookGroup, bucket: HookBucket, is_first: bool, is_last: bool) -> None:
        """Average a bucket, in the first step with all others once DDP has handed over the last."""
        gradients = self._gradients
        is_new = not gradients.in_flight
        gradients.take(bucket)
        try:
            if self._broken is not None:  # now that _fail would find the bucket
                raise HorovodInternalError(f"an earlier step failed: {self._broken}")
            if is_first and not is_new:
                raise HorovodInternalError("an exception ended the backward pass before this one")
            buckets = [bucket]
            if not gradients.is_registered:
                if not is_last:
                    return
                if self._loaded:
                    gradients.turn = self._loaded[0]["turn"]
                gradients.register(group)
                buckets = list(gradients.step)
            if self._loaded:
                gradients.load(self._loaded)
                self._loaded = []
            operation = None
            for each in buckets:
                for index in gradients.hand_over(each):
                    operation = group.ordered.start(gradients.call(index))
                    operation.call_when_done(partial(self._piece_ended, index))
            if is_last and operation is not None:
                # DDP waits for the Futures at the end of the backward pass, without driving the engine meanwhile.
                with suppress(RuntimeError):  # outside of a backward pass, in DDP's join
                    Variable._execution_engine.queue_callback(partial(_drive, operation))
        except BaseException as error:  # any error: without a result the backward pass would wait for ever
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _piece_ended(self, index: int, operation: Completion) -> None:
        try:
            if (error := operation.error) is not None:
                about = f"It averages the gradients of {self._gradients.names_in(index)}."
                if isinstance(error, MismatchError):
                    about += " The number after 'codec' is a hash of parameters, codecs and the number of steps."
                raise HorovodInternalError(f"{error}\n{about}")
            for bucket in self._gradients.piece_ended(index):
                callbacks.run(bucket.finish)  # the Future's own callbacks may wait for other operations
        except BaseException as error:  # any error, as above
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: BaseException) -> None:
        """End the step's Futures with an error. All later steps fail too, and no rank waits for this rank any more."""
        text = f"{FUNCTION} on rank {self._rank} with codec {self._codec.summary}: {hooks_text(error, self._ranks)}"
        is_first, self._broken = self._broken is None, self._broken or text
        for bucket in self._gradients.drop():
            bucket.fail((ValueError if isinstance(error, ValueError) else HorovodInternalError)(text))
        if is_first and self._group is not None:
            self._group.leave(text)


def _drive(operation: Completion) -> None:
    with suppress(HorovodInternalError):  # which the Futures raise
        operation.wait()


def ddp_hook(compression: Any, process_group: Any = None, timeout: timedelta | None = None) -> DDPHook:
    """Return a communication hook that averages the gradients of a DistributedDataParallel, encoded by a codec.

    Everything is encoded, whatever the codec's ``compress`` is. Gradients travel over the connections of the backend
    "hvdkit", or over Gloo beside another backend; those on CUDA through host memory. Save ``hook.state_dict()`` in each
    rank's checkpoint. hvd.init() is not needed. With DGC, the optimizer must have no momentum.

    Args:
        compression: one of hvd.Compression, as it is or with parameters, or a hvdkit.compression.CustomCodec. Biases,
            the weights of norms and small tensors are averaged as they are, unless by fp16, bf16 or DGC.
        process_group: the model's, if not the default process group; hvdkit, Gloo or NCCL.
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
            f"{FUNCTION}: process_group must be a process group with this rank, or None, got {process_group!r}\n"
            "HINT: give the process group of the DistributedDataParallel."
        )
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"{FUNCTION}: timeout must be a datetime.timedelta or None, got {timeout!r}")
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"{FUNCTION}: timeout must be above zero, got {timeout}")
    return DDPHook(codec, process_group, timeout)
