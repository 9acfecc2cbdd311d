"""AutoGraph rewrites the functions that a tf.function calls, ours too, unless it is told not to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., object])


def not_converted(function: F) -> F:
    """A function that AutoGraph leaves as it is, with all that it calls."""
    unchanged: F = tf.autograph.experimental.do_not_convert(function)
    return unchanged
