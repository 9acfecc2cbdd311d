"""HVDKIT_VERIFY=1: variables that differ when the next step asks for gradients are an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvdkit.errors import ParametersDifferError
from tests.tensorflow.data import needs_ranks, ways
from tests.tensorflow.gradient_cases import Model, averaged, batch
from tests.told import told, warned


def stepping(hvd: Any, model: Any, **options: Any) -> Any:
    """A step of plain SGD."""
    gradients_of = averaged(hvd, model, **options)

    def step(x: Any) -> None:
        for variable, gradient in zip(model.weights, gradients_of(x), strict=True):
            variable.assign_sub(1e-6 * gradient)

    return step


def both_ways(hvd: Any, width: int = 5, **options: Any) -> Iterator[tuple[Model, Callable[[Any], None]]]:
    """Yield a model and a step of it, as it is and in a graph."""
    for way in range(2):
        model = Model(width=width)
        yield model, list(ways(stepping(hvd, model, **options)))[way]


def last(hvd: Any) -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def case_other_values_from_the_start_are_a_warning_and_then_an_error(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    for model, run in both_ways(hvd):
        model.first.assign_add(tf.fill(model.first.shape, float(hvd.rank())))
        run(batch(hvd.rank()))
        with warned("hvd.broadcast_variables"):  # of the first step; on every rank
            run(batch(hvd.rank()))
        with told(ParametersDifferError, "after step 2: 'first'", "(of 3) differ", "hvd.broadcast_variables", "HINT"):
            run(batch(hvd.rank()))
        hvd.broadcast_variables(model.weights, root_rank=0)
        for _ in range(3):
            run(batch(hvd.rank()))


def case_a_value_written_on_one_rank_is_named(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    for model, run in both_ways(hvd, 300_000):
        for _ in range(3):
            run(batch(hvd.rank()))
        if last(hvd):
            model.bias.assign_add(tf.one_hot(2, 300_000))
        with told(ParametersDifferError, "after step 3: 'bias' (of 3) differ", f"rank {hvd.size() - 1} differ"):
            run(batch(hvd.rank()))


def case_steps_in_a_loop_of_one_graph(hvd: Any) -> None:
    model = Model()
    step = stepping(hvd, model)

    @tf.function
    def steps(x: Any) -> None:
        for _ in tf.range(5):
            step(x)

    for _ in range(2):
        steps(batch(hvd.rank()))
    if hvd.size() > 1:
        model.second.assign_add(tf.fill(model.second.shape, float(hvd.rank())))
        with told(ParametersDifferError, "after step 10: 'second' (of 3) differ"):
            steps(batch(hvd.rank()))
