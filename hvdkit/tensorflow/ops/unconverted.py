"""What TensorFlow's AutoGraph makes of our functions in a user's ``tf.function``: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., object])


def as_written(function: Function) -> Function:
    """``function``, which AutoGraph leaves as it is written, and all that it calls.

    Whatever a traced function reaches is translated, line by line, and ours needs none of it. Of all that an operation
    or an optimizer's step calls that took one to three seconds in each process.
    """
    return cast("Function", tf.autograph.experimental.do_not_convert(function))
