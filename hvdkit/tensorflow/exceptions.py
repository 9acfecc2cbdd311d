"""Around the run of a graph: TensorFlow turns exceptions into text, and this turns them back; and who waits for it."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

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


def mark(error: BaseException) -> GraphError:
    """The exception to raise inside of a graph in place of ``error``."""
    number = next(_numbers)
    _kept[number] = error.with_traceback(None)  # whose frames would hold tensors
    for old in list(_kept)[:-KEPT]:
        _kept.pop(old, None)
    return GraphError(f"{type(error).__name__}: {error} (hvdkit exception {number})")


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
        except tf.errors.OpError as told:
            error = original(str(told.message))
            if error is None:
                raise
        finally:
            if is_outermost:
                RUNNING.discard(me)
        raise error

    run_raising_originals.asks_hvdkit = True  # type: ignore[attr-defined]
    return run_raising_originals
