"""Exceptions of operations: as exceptions of TensorFlow too, and unchanged from inside of a graph.

TensorFlow turns an exception that is raised inside of a graph into text. So the operation raises text that ends with a
number, and the function by which TensorFlow runs graphs raises the exception that was kept under this number.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import DuplicateNameError, HorovodInternalError, MismatchError, NotInitializedError

KEPT = 64  # exceptions: more than can be on their way at a time. Of older exceptions only the text is left.
RUNNING: set[int] = set()  # the threads that run a graph now, and wait for its end

# Each kind of exception, and the exception of TensorFlow that Horovod's engine raised in its place.
_TENSORFLOW_KINDS: tuple[tuple[type[Exception], Any], ...] = (
    (MismatchError, tf.errors.FailedPreconditionError),
    (NotInitializedError, tf.errors.FailedPreconditionError),
    (DuplicateNameError, tf.errors.InvalidArgumentError),
    (HorovodInternalError, tf.errors.UnknownError),
    (ValueError, tf.errors.InvalidArgumentError),
    (TypeError, tf.errors.InvalidArgumentError),
)

_numbers = itertools.count(1)
_kept: dict[int, BaseException] = {}
_MARK = re.compile(r"\(hvdkit exception (\d+)\)")
_NO_XLA = (
    "jit_compile=True: XLA cannot compile hvd's operations, since they talk to other processes.\n"
    "HINT: use tf.function(jit_compile=False), or model.compile(jit_compile=False)."
)


class GraphError(RuntimeError):
    """The exception that an operation raises inside of a graph. It carries the number of the kept exception."""


def as_tensorflows(error: Exception) -> Exception:
    """Return an exception that is an instance of the type of ``error`` and of the matching type of TensorFlow."""
    if not isinstance(error, tf.errors.OpError):
        for kind, tensorflow_kind in _TENSORFLOW_KINDS:
            if isinstance(error, kind):
                both: Exception = _unpickled(type(error), tensorflow_kind, str(error), vars(error))
                return both.with_traceback(error.__traceback__)
    return error


@contextmanager
def raised_as_tensorflows() -> Iterator[None]:
    """Raise each exception of this context as ``as_tensorflows`` returns it."""
    try:
        yield
    except Exception as error:
        raise as_tensorflows(error) from error.__cause__


@functools.cache
def _both(kind: Any, tensorflow_kind: Any) -> Any:
    """Return a subclass of both exceptions, under the name of ``kind``."""

    class Both(kind, tensorflow_kind):  # type: ignore[misc]  # known at run time only
        # Takes the arguments of TensorFlow's exceptions: Keras makes another instance with a longer message.
        def __init__(self, node_def: Any, op: Any, message: str, more: Any = None) -> None:
            tf.errors.OpError.__init__(self, node_def, op, message, tensorflow_kind(None, None, "").error_code)
            self.args = (message,)
            if isinstance(more, dict):
                self.__dict__.update(more)

        def __reduce__(self) -> tuple[Any, ...]:
            attributes = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            return _unpickled, (kind, tensorflow_kind, str(self.message), attributes)

    Both.__name__, Both.__qualname__, Both.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Both


def _unpickled(kind: Any, tensorflow_kind: Any, message: str, attributes: dict[str, Any]) -> Any:
    return _both(kind, tensorflow_kind)(None, None, message, attributes)


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for an operation of a graph: the caller of the graph gets the exceptions that it raises.

    The operation returns 0 in place of None, since other operations wait for its result.
    """

    def call(*inputs: Any) -> Any:
        try:
            result = function(*inputs)
            return np.int64(0) if result is None else result
        except Exception as error:
            number = next(_numbers)
            _kept[number] = as_tensorflows(error).with_traceback(None)  # whose frames would hold tensors
            for old in list(_kept)[:-KEPT]:
                _kept.pop(old, None)
            raise GraphError(f"{type(error).__name__}: {error} (hvdkit exception {number})") from None

    return call


def _original(message: str) -> BaseException | None:
    """Return the exception that a message of TensorFlow stands for, or None if the exception is not of hvdkit."""
    if mark := _MARK.search(message):
        return _kept.pop(int(mark.group(1)), None)
    if "Detected unsupported operations when trying to compile graph" in message and "hvdkit" in message:
        return NotImplementedError(_NO_XLA)
    return None


def install() -> None:
    """Have the functions by which TensorFlow runs graphs raise the original exceptions. A second call does nothing."""
    from tensorflow.python.eager import execute
    from tensorflow.python.framework import ops

    runners = (execute, "execute"), (execute, "execute_with_cancellation"), (ops, "raise_from_not_ok_status")
    for module, name in runners:
        run = getattr(module, name, None)  # without the function, users get TensorFlow's exception with our text
        if run is not None and not getattr(run, "asks_hvdkit", False):
            setattr(module, name, _raising_originals(run))


def _raising_originals(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_raising_originals(*arguments: Any, **options: Any) -> Any:
        thread = threading.get_ident()
        is_outermost = thread not in RUNNING
        RUNNING.add(thread)
        try:
            return run(*arguments, **options)
        except tf.errors.OpError as raised:
            error = _original(str(raised.message))
            if error is None:
                raise
        finally:
            if is_outermost:
                RUNNING.discard(thread)
        raise error

    run_raising_originals.asks_hvdkit = True  # type: ignore[attr-defined]
    return run_raising_originals
