"""HVDKIT_VERIFY=1: variables that differ when the next step asks for gradients are an error on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from hvdkit.errors import ParametersDifferError
from hvdkit.tensorflow import verification
from tests.tensorflow.data import needs_ranks, ways
from tests.tensorflow.gradient_cases import Model, batch, stepping
from tests.told import told, warned


def both_ways(hvd: Any, first_differs: bool = False, width: int = 5, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a model, and a function that makes so many steps of it: as they are, and in a graph."""
    for way in range(2):
        model = Model(width=width)
        if first_differs:
            model.first.assign_add(tf.fill(model.first.shape, float(hvd.rank())))
        step = list(ways(stepping(hvd, model, rate=1e-6, **options)))[way]

        def run(times: int = 1, step: Any = step) -> None:
            for _ in range(times):
                step(batch(hvd.rank()))

        yield model, run


def last(hvd: Any) -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def case_other_values_from_the_start_are_a_warning_and_then_an_error(hvd):
    needs_ranks(hvd)
    for model, run in both_ways(hvd, first_differs=True):
        run()
        with warned("hvd.broadcast_variables"):  # of the first step; on every rank
            run()
        with told(ParametersDifferError, "after step 2: 'first'", "(of 3) differ", "hvd.broadcast_variables", "HINT"):
            run()
        hvd.broadcast_variables(model.weights, root_rank=0)
        run(3)


def case_rounding_between_ranks_that_compute_otherwise_is_one_warning(hvd):
    needs_ranks(hvd)
    real = verification.machine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "machine", lambda *more: real(*more, f"{1 + hvd.rank()} threads"))
        for model, run in both_ways(hvd, width=300_000):
            run(2)
            if last(hvd):
                model.first.assign(model.first * (1 + 1e-5))
            with warned("do not compute alike", times=int(hvd.rank() == 0)):
                run(3)
            if last(hvd):
                model.first.assign(model.first * 1.01)
            with told(ParametersDifferError, "after step 5:", "rounding does not explain", "of the norm of 'first'"):
                run()


def case_values_broadcast_after_the_first_step_are_none(hvd):
    for model, run in both_ways(hvd, first_differs=True):
        run()
        hvd.broadcast_variables(model.weights, root_rank=0)
        run(3)


def case_a_value_written_on_one_rank_is_named(hvd):
    needs_ranks(hvd)
    for model, run in both_ways(hvd, width=300_000):
        run(3)
        if last(hvd):
            model.bias.assign_add(tf.one_hot(2, 300_000))
        with told(ParametersDifferError, "after step 3: 'bias' (of 3) differ", f"rank {hvd.size() - 1} differ"):
            run()


def case_steps_in_a_loop_of_one_graph(hvd):
    model = Model()
    step = stepping(hvd, model, rate=1e-6)

    @tf.function
    def steps(x):
        for _ in tf.range(5):
            step(x)

    for _ in range(2):
        steps(batch(hvd.rank()))
    if hvd.size() > 1:
        model.second.assign_add(tf.fill(model.second.shape, float(hvd.rank())))
        with told(ParametersDifferError, "after step 10: 'second' (of 3) differ"):
            steps(batch(hvd.rank()))


def case_local_and_sparse_sources(hvd):
    needs_ranks(hvd)
    for way in range(2):
        table, dense = tf.Variable(tf.ones([9, 2]), name="table"), tf.Variable(tf.ones([2]), name="dense")
        local = tf.Variable(float(hvd.rank()), name="local")

        def step(x, table=table, dense=dense, local=local):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [0, 1]) * dense * x) + local
            tape = hvd.DistributedGradientTape(tape)
            tape.register_local_source(local)
            for one, gradient in zip([table, dense, local], tape.gradient(loss, [table, dense, local]), strict=True):
                one.assign_sub(0.1 * tf.convert_to_tensor(gradient))

        run = list(ways(step))[way]
        table.assign_add(tf.fill(table.shape, float(last(hvd))))
        run(tf.constant(1.0))
        with warned("after step 1: 'table' (of 2) differ"):
            run(tf.constant(1.0))
        for _ in range(8):  # a large table is looked at seldom
            run(tf.constant(1.0))
        with told(ParametersDifferError, "after step 10: 'table' (of 2) differ"):
            run(tf.constant(1.0))
        table.assign(tf.ones(table.shape))
        run(tf.constant(1.0))


def case_ranks_that_have_joined_are_left_out(hvd):
    for _, run in both_ways(hvd):
        run(2 + 2 * hvd.rank())
        hvd.join()
        if hvd.size() > 1:
            with told(ParametersDifferError, f"after step {2 * hvd.size()}:"):
                run()


def case_process_sets_are_compared_among_themselves(hvd):
    needs_ranks(hvd, 3)
    some = hvd.add_process_set([0, 2])
    for model, run in both_ways(hvd, process_set=some):
        model.first.assign_add(tf.fill(model.first.shape, float(hvd.rank() % 2)))
        run(3)
        if hvd.rank() == 2:
            model.first.assign_add(tf.ones(model.first.shape))
        if hvd.rank() != 1:
            with told(ParametersDifferError, "after step 3:", "The values of rank 2 differ from those of rank 0"):
                run()
    hvd.remove_process_set(some)
