"""Around the run of a graph: TensorFlow turns exceptions into text, and this turns them back; and who waits for it."""

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
from hvdkit.tensorflow.ops.unconverted import as_written

# More than could be on their way to users at a time; of older ones only the text is left.
KEPT = 64

# The threads that run a graph now, and wait for its end.
RUNNING: set[int] = set()

_numbers = itertools.count(1)
_kept: dict[int, BaseException] = {}
_MARK = re.compile(r"\(hvdkit exception (\d+)\)")
_UNSUPPORTED = "Detected unsupported operations when trying to compile graph"
_NO_XLA = (
    "jit_compile=True: XLA cannot compile hvd's operations, since they talk to other processes.\n"
    "HINT: use tf.function(jit_compile=False), or model.compile(jit_compile=False)."
)


class GraphError(RuntimeError):
    """What is raised inside of a graph; whoever runs the graph gets the original."""


def as_tensorflows(error: Exception) -> Exception:
    """``error`` as one that is of its own type and of TensorFlow's for what Horovod's engine answered.

    Which is FailedPreconditionError where ranks disagree or there is no job, InvalidArgumentError for arguments and
    names in use, and UnknownError for lost ranks and all else that ends collectives.
    """
    if not isinstance(error, tf.errors.OpError):
        for ours, theirs in _HOROVODS:
            if isinstance(error, ours):
                return _both(type(error), theirs)(None, None, str(error), vars(error)).with_traceback(
                    error.__traceback__
                )
    return error


@contextmanager
def raised_as_tensorflows() -> Iterator[None]:
    """What is raised in this context is raised as ``as_tensorflows`` has it."""
    try:
        yield
    except Exception as error:
        raise as_tensorflows(error) from error.__cause__


_HOROVODS: tuple[tuple[type[Exception], type[Exception]], ...] = (
    (MismatchError, tf.errors.FailedPreconditionError),
    (NotInitializedError, tf.errors.FailedPreconditionError),
    (DuplicateNameError, tf.errors.InvalidArgumentError),
    (HorovodInternalError, tf.errors.UnknownError),
    (ValueError, tf.errors.InvalidArgumentError),
    (TypeError, tf.errors.InvalidArgumentError),
)


_made: dict[tuple[type[Exception], type[Exception]], type[Exception]] = {}


def _both(ours: type[Exception], theirs: type[Exception]) -> type[Exception]:
    """A class that is a subclass of both, under the name of ``ours``; always the same one."""
    known = _made.get((ours, theirs))
    if known is not None:
        return known

    class Both(ours, theirs):  # type: ignore[misc, valid-type]  # known at run time only
        # With the arguments of TensorFlow's, since Keras makes another one of the class with more in the message.
        def __init__(self, node_def: Any, op: Any, message: str, more: Any = None) -> None:
            code = theirs(None, None, "").error_code  # type: ignore[attr-defined]
            tf.errors.OpError.__init__(self, node_def, op, message, code)
            self.args = (message,)
            if isinstance(more, dict):
                self.__dict__.update(more)

        def __reduce__(self) -> tuple[Any, ...]:
            own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            return _again, (ours, theirs, str(self.message), own)

    Both.__name__, Both.__qualname__, Both.__module__ = ours.__name__, ours.__qualname__, ours.__module__
    return _made.setdefault((ours, theirs), Both)


def _again(ours: type[Exception], theirs: type[Exception], message: str, own: dict[str, Any]) -> Exception:
    """What was pickled."""
    return _both(ours, theirs)(None, None, message, own)


def mark(error: Exception) -> GraphError:
    """The exception to raise inside of a graph in place of ``error``."""
    number = next(_numbers)
    _kept[number] = as_tensorflows(error).with_traceback(None)  # whose frames would hold tensors
    for old in list(_kept)[:-KEPT]:
        _kept.pop(old, None)
    return GraphError(f"{type(error).__name__}: {error} (hvdkit exception {number})")


def in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, to be called by an operation of a graph: whoever runs the graph gets what it raises.

    Where it returns nothing the operation returns a 0, since others wait for what an operation returns.
    """

    @as_written
    def call(*inputs: Any) -> Any:
        try:
            result = function(*inputs)
            return np.int64(0) if result is None else result
        except Exception as error:
            raise mark(error) from None

    return call


def original(message: str) -> BaseException | None:
    """The exception that TensorFlow's message tells of, if it came from here."""
    found = _MARK.search(message)
    if found is not None:
        return _kept.pop(int(found.group(1)), None)
    if _UNSUPPORTED in message and "hvdkit" in message:
        return NotImplementedError(_NO_XLA)
    return None


def install() -> None:
    """Have the functions by which TensorFlow runs graphs raise the original. Once is enough."""
    from tensorflow.python.eager import execute
    from tensorflow.python.framework import ops

    for module, name in (
        (execute, "execute"),
        (execute, "execute_with_cancellation"),
        (ops, "raise_from_not_ok_status"),
    ):
        known = getattr(module, name, None)  # where there is none, users get TensorFlow's exception with our text
        if known is not None and not getattr(known, "asks_hvdkit", False):
            setattr(module, name, _raising_originals(known))


def _raising_originals(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_raising_originals(*arguments: Any, **options: Any) -> Any:
        me = threading.get_ident()
        is_outermost = me not in RUNNING
        RUNNING.add(me)
        try:
            return run(*arguments, **options)
        except tf.errors.OpError as raised:
            error = original(str(raised.message))
            if error is None:
                raise
        finally:
            if is_outermost:
                RUNNING.discard(me)
        raise error

    run_raising_originals.asks_hvdkit = True  # type: ignore[attr-defined]
    return run_raising_originals
