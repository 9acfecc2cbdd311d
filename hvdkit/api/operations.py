"""The operations by name on tensors of any framework: memory for each goes to the engine, and results come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from hvdkit.api import checks
from hvdkit.api.framework import Framework
from hvdkit.api.handles import HANDLES
from hvdkit.engine.ops.batch import Handle, reduces_directly
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet
from hvdkit.errors import HorovodInternalError, cut_off
from hvdkit.kernels.reduce_op import ReduceOp

T = TypeVar("T")

# Of what is wrong with splits, as others are told it: a list of them may be long.
LONGEST_TEXT = 500


def gradient_name(name: str | None) -> str | None:
    """The name under which the gradient of the operation ``name`` travels."""
    return None if name is None else f"{name}.gradient"


class Asked(NamedTuple):
    """What every operation is given, unchecked, under whatever name it is called."""

    function: str
    name: str | None
    process_set: ProcessSet
    waits: bool = False  # the caller waits at once, and drives the engine itself
    single: bool = False  # the result is that of one tensor, not a tuple
    ignore_name_scope: bool = False  # of TensorFlow's graph, where it makes the name

    def call(self, device: str) -> Call:
        """For the engine. Raises TypeError or ValueError for a name or a process set that there cannot be."""
        checks.check_name(self.function, self.name)
        process_set_id = checks.check_process_set(self.function, self.process_set)
        return Call(self.name, process_set_id, device, not self.waits)

    def of_gradient(self) -> Asked:
        """The same for the gradient."""
        return self._replace(name=gradient_name(self.name))


class Operations(Generic[T]):
    """One framework's operations, each up to the number with which ``HANDLES`` give its result: a tuple of tensors.

    All raise NotInitializedError before init, and TypeError or ValueError for arguments that make no sense.
    """

    def __init__(self, framework: Framework[T]) -> None:
        self._framework = framework
        self.reduced_elements = 0  # how many this rank has given to reductions

    def allreduce(self, asked: Asked, tensors: Sequence[T], request: ReduceRequest, in_place: bool = False) -> int:
        """Tensors that adapters have checked. ``in_place``: they themselves get the results."""
        engine, framework = runtime.engine(), self._framework
        on_device = framework.on_device(engine, tensors)
        if on_device is not None and reduces_directly(request, map(framework.dtype, tensors)):
            framework = on_device
        call = asked.call(framework.device(tensors[0]))
        if request.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            dtypes = list(map(framework.dtype, tensors))
            checks.check_op_for(asked.function, request.op, dtypes)
            if request.op == ReduceOp.ADASUM:
                checks.check_adasum(asked.function, dtypes, asked.process_set, engine.topology.size)
        if in_place:
            framework.check_writable(asked.function, tensors)
        sources = None
        if in_place:
            buffers = framework.views(tensors)
        elif framework.is_device or (call.wake and not framework.immutable):
            buffers = framework.copies(tensors)
        else:  # the tensors cannot change before they are read
            views = framework.views(tensors)
            sources, buffers = framework.arrays(views), framework.likes(views)
        arrays = framework.arrays(buffers)
        for array in arrays:
            self.reduced_elements += math.prod(array.shape)
        handle = engine.named.allreduce(arrays, request, call, sources)
        return _add(handle, framework, asked, tensors, buffers, in_place, writes=in_place)

    def broadcast(self, asked: Asked, tensors: Sequence[T], root_rank: Any, in_place: bool = False) -> int:
        """Tensors that adapters have checked. ``in_place``: they themselves get the root's values."""
        engine = runtime.engine()
        framework = self._framework.on_device(engine, tensors) or self._framework
        call = asked.call(framework.device(tensors[0]))
        root = checks.check_root(asked.function, root_rank, asked.process_set, engine.topology.size)
        is_root = root == engine.topology.rank
        if in_place:
            framework.check_writable(asked.function, tensors)
            buffers = framework.views(tensors)
        elif is_root or framework.is_device:
            buffers = framework.copies(tensors)
        else:
            buffers = framework.likes(tensors)
        handle = engine.named.broadcast(framework.arrays(buffers), root, call)
        return _add(handle, framework, asked, tensors, buffers, in_place, writes=in_place and not is_root)

    def allgather(self, asked: Asked, tensors: Sequence[T]) -> int:
        """Tensors that adapters have checked and that do not change until the operation is done."""
        engine = runtime.engine()
        framework = self._framework.on_device(engine, tensors) or self._framework
        call = asked.call(framework.device(tensors[0]))
        arrays = framework.arrays(framework.views(tensors))
        checks.check_has_rows(asked.function, [array.shape for array in arrays], framework.scalar_to_row)
        return _add(engine.named.allgather(arrays, call), framework, asked, tensors)

    def reducescatter(self, asked: Asked, tensors: Sequence[T], request: ReduceRequest) -> int:
        """Tensors that adapters have checked."""
        engine, framework = runtime.engine(), self._framework
        call = asked.call(framework.device(tensors[0]))
        arrays = framework.arrays(framework.copies(tensors))  # the engine uses them up
        checks.check_has_rows(asked.function, [array.shape for array in arrays], framework.scalar_to_row)
        for array in arrays:
            self.reduced_elements += math.prod(array.shape)
        return _add(engine.named.reducescatter(arrays, request, call), framework, asked, tensors)

    def alltoall(self, asked: Asked, tensor: T, splits: Callable[[], Any]) -> int:
        """A tensor that the adapter has checked and that does not change until the operation is done.

        ``splits`` returns the caller's, or raises what is wrong with them, of which the other ranks are told.
        The result is a pair: rows, and how many came from each rank.
        """
        engine, framework = runtime.engine(), self._framework
        call = asked.call(framework.device(tensor))
        (rows,) = framework.arrays(framework.views([tensor]))
        checks.check_has_rows(asked.function, [rows.shape], framework.scalar_to_row)
        try:
            wanted = splits()
            shares = checks.check_splits(asked.function, wanted, rows.shape[0], checks.size_of(asked.process_set))
        except (TypeError, ValueError) as problem:
            _refuse(problem, lambda words: engine.named.alltoall(rows, words, call))
        handle = engine.named.alltoall(rows if shares is None else rows[: sum(shares)], shares, call)
        device = framework.device_of(tensor)

        def finish(result: tuple[Any, Sequence[int]]) -> tuple[T, T]:
            output, received = result
            return framework.results([device], [output])[0], framework.integers(received, wanted, device)

        return HANDLES.add(handle, finish)


def _add(
    handle: Handle,
    framework: Framework[T],
    asked: Asked,
    tensors: Sequence[T],
    buffers: Sequence[Any] | None = None,
    in_place: bool = False,
    writes: bool = False,
) -> int:
    """The number of an operation. Its results are in ``buffers``, or what the engine returns if there are none.

    ``in_place``: what is returned are the tensors themselves, and ``writes``: the results must be brought there. Other
    tensors are not kept: who let go of one while the operation is in flight has its memory back.
    """
    targets = tensors if in_place else None
    devices = [] if in_place else [framework.device_of(tensor) for tensor in tensors]
    made_before = None if framework.is_device else buffers

    def finish(results: Sequence[Any]) -> T | tuple[T, ...]:
        made = results if made_before is None else made_before
        if targets is not None and writes:
            framework.write(targets, made)
        outputs = framework.results(devices, made) if targets is None else targets
        return outputs[0] if asked.single else tuple(outputs)

    return HANDLES.add(handle, finish)


def _refuse(problem: Exception, submit: Callable[[str], Handle]) -> NoReturn:
    """Raise ``problem``, wrong splits of one rank, once all others are told of it, who get a HorovodInternalError.

    They would wait for this rank else. ``submit`` announces the alltoall with words in place of splits.
    """
    try:
        submit(cut_off(str(problem), LONGEST_TEXT)).wait()
    except HorovodInternalError as error:
        raise problem from error
    raise AssertionError(f"an alltoall ran with wrong splits: {problem}")
