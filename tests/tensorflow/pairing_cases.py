"""Which gradients of the ranks belong together: in threads, and where a rank has joined before its first step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tests.tensorflow.data import needs_ranks
from tests.tensorflow.gradient_cases import Model, batch, close, plain, stepping

LATE_SECONDS = 0.2
RATE = 0.05  # as stepping() has it


def train_alone(weights: Model, batches: Sequence[Sequence[Any]], size: int, factor: float = 1.0) -> None:
    """Steps of one process, each on the batches of the ranks that have one; the others' gradients are zeros."""
    for of_ranks in batches:
        gradients = [
            plain(lambda inputs=inputs: factor * weights.loss(inputs) / size, weights.weights) for inputs in of_ranks
        ]
        for variable, *parts in zip(weights.weights, *gradients, strict=True):
            variable.assign_sub(RATE * tf.add_n(parts))


def check_joins(hvd: Any, has_batch: Callable[[int, int, int], bool], graph: bool) -> None:
    """Train three epochs of three batches, which only some ranks have; ranks without one have joined."""
    model, alone = Model(tf.float64), Model(tf.float64)
    step = stepping(hvd, model)
    step = tf.function(step) if graph else step
    for epoch in range(3):
        batches = []
        for number in range(3):
            ranks = [rank for rank in range(hvd.size()) if has_batch(rank, epoch, number)]
            if hvd.rank() in ranks:
                step(batch(hvd.rank(), tf.float64, 3 * epoch + number))
            batches.append([batch(rank, tf.float64, 3 * epoch + number) for rank in ranks])
        hvd.broadcast_variables(model.weights, int(hvd.join()))
        train_alone(alone, batches, hvd.size())
        close(model.weights, alone.weights, 1e-10)


def case_a_rank_without_a_batch_in_the_first_epoch_joins(hvd):
    needs_ranks(hvd)
    for graph in (False, True):
        check_joins(hvd, lambda rank, epoch, number: rank < hvd.size() - 1 or epoch > 0, graph)
        check_joins(hvd, lambda rank, epoch, number: number < 3 - (rank + epoch) % hvd.size(), graph)


def case_tapes_with_names_are_paired_by_them(hvd):
    models = [Model(tf.float64) for _ in range(2)]
    errors: list[BaseException] = []

    def train(index):
        try:
            step = stepping(hvd, models[index], 10.0**index, name=("actor", "critic")[index])
            if hvd.rank() % 2 == index:  # first steps come in another order on each rank
                time.sleep(LATE_SECONDS)
            for number in range(3):
                step(batch(hvd.rank(), tf.float64, number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    batches = [[batch(rank, tf.float64, number) for rank in range(hvd.size())] for number in range(3)]
    for index, model in enumerate(models):
        alone = Model(tf.float64)
        train_alone(alone, batches, hvd.size(), 10.0**index)
        close(model.weights, alone.weights, 1e-10)


def case_tapes_of_one_name_in_two_threads_are_an_error(hvd):
    needs_ranks(hvd)
    models, errors = [Model() for _ in range(2)], []

    def ask(index):
        try:
            stepping(hvd, models[index], name="model")(batch(hvd.rank()))
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=ask, args=(index,), name=f"trainer {index}") for index in range(2)]
    for thread in threads:  # one after the other: the first of them makes its step
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "'model' was made in the threads 'trainer 0' and 'trainer 1'" in errors[0]
    assert "HINT: " in errors[0]
    assert "DistributedGradientTape(..., name='critic')" in errors[0]
