"""Tensors whose values each rank knows of all others, and both ways to run a function."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from tests.ranks import Skip

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64)
REDUCIBLE = (*INTEGERS, *FLOATS)
MOVABLE = (*REDUCIBLE, tf.bool)
SHAPES = ((), (1,), (0,), (17,), (3, 0, 2), (5, 4), (2, 3, 4, 5))


def needs_ranks(hvd: Any, number: int = 2) -> None:
    if hvd.size() < number:
        raise Skip(f"needs {number} ranks")


def ways(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The function as it is, and in a graph."""
    yield function
    yield tf.function(function)


def slow_end() -> Any:
    """A dataset without elements that takes so long to say so that all else in a graph could run before."""

    def nothing() -> Iterator[float]:
        time.sleep(0.3)
        yield from ()

    return tf.data.Dataset.from_generator(nothing, output_signature=tf.TensorSpec([2]))


def tried_ways(dtypes: Sequence[Any], shapes: Sequence[Any]) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """What is tried as it is, and in graphs, where each type and shape takes a graph of its own to be traced."""
    some = [dtype for dtype in (tf.bfloat16, tf.float64, tf.uint8, tf.bool) if dtype in dtypes]
    traced = [(dtype, shapes[-1]) for dtype in some] + [(tf.float32, shape) for shape in shapes]
    return list(itertools.product(dtypes, shapes)), traced


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Small integers, that each dtype holds exactly, others on each rank."""
    count = int(np.prod(shape))
    numbers = (np.arange(count) * 7 + 3 * rank) % 5
    return tf.cast(tf.reshape(tf.constant(numbers, tf.int32), shape), dtype)


def all_values(size: int, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    return [values(rank, shape, dtype) for rank in range(size)]


def doubles(tensor: Any) -> np.ndarray:
    return tf.cast(tensor, tf.float64).numpy()


def check_equal(result: Any, expected: np.ndarray, dtype: Any, *what: Any) -> None:
    assert result.dtype == dtype, (result.dtype, dtype, *what)
    np.testing.assert_array_equal(doubles(result), expected, err_msg=str(what))


def check_results(function: Callable[..., Any], arguments: Sequence[Any], expected: Any, rtol: float = 1e-6) -> None:
    """The function gives this, in real or complex numbers, as it is and in a graph."""
    for run in ways(function):
        np.testing.assert_allclose(run(*arguments), expected, rtol)


@contextmanager
def left_as_written() -> Iterator[None]:
    """AutoGraph translates functions of tests inside, and none of hvdkit."""
    names: list[str] = []
    translate = api._convert_actual

    def noted(function: Any, context: Any) -> Any:
        names.append(f"{function.__module__}.{function.__qualname__}")
        return translate(function, context)

    with mock.patch.object(api, "_convert_actual", noted):
        yield
    assert any(name.startswith("tests.") for name in names), names  # it looks where it should
    assert not [name for name in names if name.startswith("hvdkit.")]
