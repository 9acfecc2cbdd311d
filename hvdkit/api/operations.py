"""Operations by name on tensors of any framework: buffers for the engine, handles for users, and results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from hvdkit.api import checks
from hvdkit.api.framework import Framework
from hvdkit.engine.ops.batch import Handle, reduces_directly
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet
from hvdkit.errors import HorovodInternalError, cut_off
from hvdkit.kernels.reduce_op import ReduceOp

T = TypeVar("T")

LONGEST_TEXT = 500  # that other ranks get about wrong splits, which may be a long list


class HandleTable:
    """Operations in flight by number. No number is used twice, so a stale one cannot mean another operation."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Handle, Callable[[Any], Any]]] = {}

    def add(self, handle: Handle, finish: Callable[[Any], Any]) -> int:
        """Keep an operation; ``finish`` turns the engine's result into that of ``synchronize``."""
        number = next(self._numbers)
        self._pending[number] = handle, finish
        return number

    def poll(self, number: int) -> bool:
        """True if ``synchronize(number)`` returns at once. Raises ValueError for an unknown or finished number."""
        if number not in self._pending:
            raise ValueError(f"poll: handle {number} was not created or has been synchronized already")
        return self._pending[number][0].done()

    def synchronize(self, number: int) -> Any:
        """Wait for an operation and return its result, or None for an unknown or finished number."""
        handle, finish = self._pending.pop(number, (None, None))
        return None if handle is None or finish is None else finish(handle.wait())

    def clear(self) -> None:
        """Forget all operations, as at shutdown."""
        self._pending.clear()


HANDLES = HandleTable()


def gradient_name(name: str | None) -> str | None:
    """Return the name under which the gradient of the operation ``name`` travels."""
    return None if name is None else f"{name}.gradient"


class Invocation(NamedTuple):
    """A user's call of a public function: the arguments that all operations share, unchecked."""

    function: str
    name: str | None
    process_set: ProcessSet
    waits: bool = False  # the caller waits at once, and drives the engine itself
    single: bool = False  # the result is one tensor, not a tuple
    ignore_name_scope: bool = False  # leave the name scope of TensorFlow's graph out of the name

    def call(self, device: str) -> Call:
        """Return the engine's form. Raises TypeError or ValueError for a wrong name or process set."""
        checks.check_name(self.function, self.name)
        process_set_id = checks.check_process_set(self.function, self.process_set)
        return Call(self.name, process_set_id, device, not self.waits)

    def of_gradient(self) -> Invocation:
        """Return the invocation that carries this operation's gradient."""
        return self._replace(name=gradient_name(self.name))


class Operations(Generic[T]):
    """The operations of one framework. Each takes tensors that the adapter has checked and returns a number.

    ``HANDLES.synchronize`` gives the result for the number: a tuple of tensors, or one tensor if the invocation is
    ``single``. All raise NotInitializedError before init, and TypeError or ValueError for wrong arguments.
    """

    def __init__(self, framework: Framework[T]) -> None:
        self._framework = framework
        self.reduced_elements = 0  # elements that this rank has given to reductions

    def allreduce(
        self, invocation: Invocation, tensors: Sequence[T], request: ReduceRequest, in_place: bool = False
    ) -> int:
        """Start a reduction over all ranks. ``in_place``: the tensors themselves get the results."""
        engine, framework = runtime.engine(), self._framework
        on_device = framework.on_device(engine, tensors)
        if on_device is not None and reduces_directly(request, map(framework.dtype, tensors)):
            framework = on_device
        call = invocation.call(framework.device(tensors[0]))
        if request.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            dtypes = list(map(framework.dtype, tensors))
            checks.check_op_for(invocation.function, request.op, dtypes)
            if request.op == ReduceOp.ADASUM:
                checks.check_adasum(invocation.function, dtypes, invocation.process_set, engine.topology.size)
        sources = None
        if in_place:
            framework.check_writable(invocation.function, tensors)
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
        return _add(handle, framework, invocation, tensors, buffers, in_place, writes=in_place)

    def broadcast(self, invocation: Invocation, tensors: Sequence[T], root_rank: Any, in_place: bool = False) -> int:
        """Start a broadcast. ``in_place``: the tensors themselves get the root's values."""
        engine = runtime.engine()
        framework = self._framework.on_device(engine, tensors) or self._framework
        call = invocation.call(framework.device(tensors[0]))
        root = checks.check_root(invocation.function, root_rank, invocation.process_set, engine.topology.size)
        is_root = root == engine.topology.rank
        if in_place:
            framework.check_writable(invocation.function, tensors)
            buffers = framework.views(tensors)
        elif is_root or framework.is_device:
            buffers = framework.copies(tensors)
        else:
            buffers = framework.likes(tensors)
        handle = engine.named.broadcast(framework.arrays(buffers), root, call)
        return _add(handle, framework, invocation, tensors, buffers, in_place, writes=in_place and not is_root)

    def allgather(self, invocation: Invocation, tensors: Sequence[T]) -> int:
        """Start an allgather of tensors that do not change until it is done."""
        engine = runtime.engine()
        framework = self._framework.on_device(engine, tensors) or self._framework
        call = invocation.call(framework.device(tensors[0]))
        arrays = framework.arrays(framework.views(tensors))
        checks.check_has_rows(invocation.function, [array.shape for array in arrays], framework.scalar_to_row)
        return _add(engine.named.allgather(arrays, call), framework, invocation, tensors)

    def reducescatter(self, invocation: Invocation, tensors: Sequence[T], request: ReduceRequest) -> int:
        """Start a reducescatter."""
        engine, framework = runtime.engine(), self._framework
        call = invocation.call(framework.device(tensors[0]))
        arrays = framework.arrays(framework.copies(tensors))  # the engine uses them up
        checks.check_has_rows(invocation.function, [array.shape for array in arrays], framework.scalar_to_row)
        for array in arrays:
            self.reduced_elements += math.prod(array.shape)
        return _add(engine.named.reducescatter(arrays, request, call), framework, invocation, tensors)

    def alltoall(self, invocation: Invocation, tensor: T, splits: Callable[[], Any]) -> int:
        """Start an alltoall of a tensor that does not change until it is done. The result: rows, and rows of each rank.

        ``splits`` returns the caller's splits, or raises an error about them, which the other ranks get too.
        """
        engine, framework = runtime.engine(), self._framework
        call = invocation.call(framework.device(tensor))
        (rows,) = framework.arrays(framework.views([tensor]))
        checks.check_has_rows(invocation.function, [rows.shape], framework.scalar_to_row)
        try:
            given = splits()
            size = checks.size_of(invocation.process_set)
            shares = checks.check_splits(invocation.function, given, rows.shape[0], size)
        except (TypeError, ValueError) as problem:
            # The other ranks, which would wait, get an error too, about this text in place of splits.
            try:
                engine.named.alltoall(rows, cut_off(str(problem), LONGEST_TEXT), call).wait()
            except HorovodInternalError as error:
                raise problem from error
            raise AssertionError(f"an alltoall ran with wrong splits: {problem}") from problem
        handle = engine.named.alltoall(rows if shares is None else rows[: sum(shares)], shares, call)
        device = framework.device_of(tensor)

        def finish(result: tuple[Any, Sequence[int]]) -> tuple[T, T]:
            output, received = result
            return framework.results([device], [output])[0], framework.integers(received, given, device)

        return HANDLES.add(handle, finish)


def _add(
    handle: Handle,
    framework: Framework[T],
    invocation: Invocation,
    tensors: Sequence[T],
    buffers: Sequence[Any] | None = None,
    in_place: bool = False,
    writes: bool = False,
) -> int:
    """Return the number of an operation. The results are in ``buffers``, or returned by the engine if that is None.

    ``in_place``: the user gets the tensors themselves; ``writes``: the results must be copied into them. Otherwise no
    reference to the tensors is kept, so that their memory is free when the user drops them in flight.
    """
    targets = tensors if in_place else None
    devices = [] if in_place else [framework.device_of(tensor) for tensor in tensors]
    filled = None if framework.is_device else buffers

    def finish(results: Sequence[Any]) -> T | tuple[T, ...]:
        made = results if filled is None else filled
        if targets is not None and writes:
            framework.write(targets, made)
        outputs = framework.results(devices, made) if targets is None else targets
        return outputs[0] if invocation.single else tuple(outputs)

    return HANDLES.add(handle, finish)
