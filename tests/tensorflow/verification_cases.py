"""HVDKIT_VERIFY=1: variables that differ when the next step asks for gradients are an error on all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.errors import ParametersDifferError
from hvdkit.tensorflow import verification
from tests.ranks import Skip
from tests.tensorflow.data import ways
from tests.tensorflow.gradient_cases import Model, batch
from tests.told import told, warned


def only_with_others(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs other ranks")


def stepping(hvd: Any, model: Any, variables: Any = None, **options: Any) -> Any:
    """A step of plain SGD."""
    variables = model.weights if variables is None else variables

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.loss(x)
        gradients = hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(1e-6 * gradient)

    return step


def last(hvd: Any) -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def case_other_values_from_the_start_are_a_warning_and_then_an_error(hvd: Any) -> None:
    only_with_others(hvd)
    for way in range(2):
        model = Model()
        model.first.assign_add(tf.fill(model.first.shape, float(hvd.rank())))
        run = list(ways(stepping(hvd, model)))[way]
        run(batch(hvd.rank()))
        with warned("hvd.broadcast_variables"):  # of the first step; on every rank
            run(batch(hvd.rank()))
        with told(ParametersDifferError, "after step 2: 'first'", "(of 3) differ", "hvd.broadcast_variables", "HINT"):
            run(batch(hvd.rank()))
        hvd.broadcast_variables(model.weights, root_rank=0)
        for _ in range(3):
            run(batch(hvd.rank()))


def case_rounding_between_ranks_that_compute_otherwise_is_one_warning(hvd: Any) -> None:
    only_with_others(hvd)
    real = verification.machine
    verification.machine = lambda *more: real(*more, f"{1 + hvd.rank()} threads")
    try:
        for way in range(2):
            model = Model(width=300_000)
            run = list(ways(stepping(hvd, model)))[way]
            for _ in range(2):
                run(batch(hvd.rank()))
            if last(hvd):
                model.first.assign(model.first * (1 + 1e-5))
            with warned("do not compute alike", times=int(hvd.rank() == 0)):
                for _ in range(3):
                    run(batch(hvd.rank()))
            if last(hvd):
                model.first.assign(model.first * 1.01)
            with told(ParametersDifferError, "after step 5:", "rounding does not explain", "of the norm of 'first'"):
                run(batch(hvd.rank()))
    finally:
        verification.machine = real


def case_values_broadcast_after_the_first_step_are_none(hvd: Any) -> None:
    for way in range(2):
        model = Model()
        model.first.assign_add(tf.fill(model.first.shape, float(hvd.rank())))
        run = list(ways(stepping(hvd, model)))[way]
        run(batch(hvd.rank()))
        hvd.broadcast_variables(model.weights, root_rank=0)
        for _ in range(3):
            run(batch(hvd.rank()))


def case_a_value_written_on_one_rank_is_named(hvd: Any) -> None:
    only_with_others(hvd)
    for way in range(2):
        model = Model(width=300_000)
        run = list(ways(stepping(hvd, model)))[way]
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


def case_local_and_sparse_sources(hvd: Any) -> None:
    only_with_others(hvd)
    for way in range(2):
        table, dense = tf.Variable(tf.ones([9, 2]), name="table"), tf.Variable(tf.ones([2]), name="dense")
        local = tf.Variable(float(hvd.rank()), name="local")

        def step(x: Any, table: Any = table, dense: Any = dense, local: Any = local) -> None:
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


def case_ranks_that_have_joined_are_left_out(hvd: Any) -> None:
    for way in range(2):
        model = Model()
        run = list(ways(stepping(hvd, model)))[way]
        for _ in range(2 + 2 * hvd.rank()):
            run(batch(hvd.rank()))
        hvd.join()
        if hvd.size() > 1:
            with told(ParametersDifferError, f"after step {2 * hvd.size()}:"):
                run(batch(hvd.rank()))


def case_process_sets_are_compared_among_themselves(hvd: Any) -> None:
    if hvd.size() < 3:
        raise Skip("needs a set of several ranks, and others")
    some = hvd.add_process_set([0, 2])
    for way in range(2):
        model = Model()
        model.first.assign_add(tf.fill(model.first.shape, float(hvd.rank() % 2)))
        run = list(ways(stepping(hvd, model, process_set=some)))[way]
        for _ in range(3):
            run(batch(hvd.rank()))
        if hvd.rank() == 2:
            model.first.assign_add(tf.ones(model.first.shape))
        if hvd.rank() != 1:
            with told(ParametersDifferError, "after step 3:", "The values of rank 2 differ from those of rank 0"):
                run(batch(hvd.rank()))
    hvd.remove_process_set(some)
