"""The state of TensorFlow and Keras in elastic jobs. ``python -m tests.elastic.tensorflow_state_scenarios NAME``."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.environments import elastic
from tests.elastic.job import Answer, ElasticJob, Rank, newness, run

PLACES = [("here", slot) for slot in range(3)]
ROWS = 8


def data_of(batch: int, rank: int) -> Any:
    return np.random.default_rng(1000 * batch + rank).standard_normal((4, ROWS)).astype(np.float32)


def gradients_of(weights: Any, samples: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh(samples @ weights) - 1.0))
    return list(tape.gradient(loss, [weights]))


def first_weights(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal((ROWS, 3)).astype(np.float32)


def update(weights: Any, momentum: Any, gradient: Any) -> None:
    momentum.assign(0.9 * momentum + gradient)
    weights.assign_sub(0.1 * momentum)


def replay(first: int, sizes: list[int]) -> Any:
    """Train in one process what so many ranks have trained in each batch."""
    weights, momentum = tf.Variable(first_weights(first)), tf.Variable(tf.zeros([ROWS, 3]))
    for batch, size in enumerate(sizes):
        parts = [gradients_of(weights, data_of(batch, rank))[0] for rank in range(size)]
        update(weights, momentum, sum(parts[1:], start=parts[0]) / size)
    return weights.numpy()


class FatalVariablesState(hvd.elastic.TensorFlowState):
    """A state whose process dies after a part is synchronised, if the last ticket says so."""

    def sync(self) -> None:
        rank = elastic._launcher
        assert isinstance(rank, Rank)
        if rank.order.get("dies_as") == hvd.rank():
            self._broadcast(self.variables)
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync()


def rank_of_variables(rank: Rank) -> None:
    """Train variables by a tf.function until a ticket comes with ``last``."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    weights, momentum = tf.Variable(first_weights(rank.offer.rank)), tf.Variable(tf.zeros([ROWS, 3]))
    state = FatalVariablesState([weights, momentum], sizes=[], first=rank.offer.rank)

    @tf.function
    def step(samples: Any) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(samples @ weights) - 1.0))
        update(weights, momentum, tape.gradient(loss, [weights])[0])

    @hvd.elastic.run
    def train(state: FatalVariablesState) -> None:
        rank.send(batch=len(state.sizes), commits=state._version.commits, first=state.first)
        while "last" not in rank.order:
            step(tf.constant(data_of(len(state.sizes), hvd.rank())))
            state.sizes.append(hvd.size())
            state.commit()

    train(state)
    difference = float(np.abs(weights.numpy() - replay(state.first, state.sizes)).max())
    rank.send(bits=weights.numpy().view(np.int32).tolist(), difference=difference, batch=len(state.sizes))


def begin(job: ElasticJob, **order: Any) -> None:
    """Form a generation, all of whose ranks begin after the newest commit."""
    asked = job.form(**order)
    newest = max(0, *map(newness, asked))
    begun = job.reports()
    assert [(each["batch"], each["commits"]) for each in begun] == [(newest, newest)] * len(begun)
    assert len({each["first"] for each in begun}) == 1


def finish(job: ElasticJob) -> list[Answer]:
    for worker in job.workers:
        worker.send(interrupt=True)
    begin(job, last=True)
    ends = job.reports()
    assert [end["bits"] == ends[0]["bits"] for end in ends] == [True] * len(ends)
    assert ends[0]["batch"] > 0
    assert ends[0]["difference"] < 1e-5
    return ends


def variables() -> None:
    """Ranks die while they train and while the state is sent; the result is that of a replay."""
    choose = random.Random(2)
    job = ElasticJob(rank_of_variables, PLACES)
    job.form(dies_as=0)  # the state of rank 1 is whole, though it has received a part of that of rank 0
    job.workers.pop(0).wait()
    begin(job)
    for dies_as in (None, 0, 2, None):
        time.sleep(choose.uniform(0.0, 0.1))
        job.lose(choose.randrange(len(job.workers)))
        begin(job)
        for worker in job.workers:
            worker.send(interrupt=True)
        while len(job.workers) < 3:
            job.add("here", min(set(range(9)) - {worker.slot for worker in job.workers}))
        if dies_as is not None:
            job.form(dies_as=dies_as)
            job.workers.pop(dies_as).wait()
        begin(job)
    finish(job)


def rank_of_fit(rank: Rank, adapter: str) -> None:
    """Call fit, by Keras or tf.keras, until a ticket comes with ``last``."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    elastic._launcher = rank  # type: ignore[assignment]
    hvd_keras = importlib.import_module(adapter)
    keras = importlib.import_module("keras") if adapter == "hvdkit.keras" else tf.keras
    hvd_keras.init()
    keras.utils.set_random_seed(rank.offer.rank)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((ROWS,)), *layers])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)

    @hvd_keras.elastic.run
    def train(state: Any) -> None:
        rank.send(bits=bits(), epoch=state.epoch, batch=state.batch, commits=state._version.commits)
        while "last" not in rank.order:
            callbacks = [
                hvd_keras.elastic.UpdateBatchStateCallback(state),
                hvd_keras.elastic.UpdateEpochStateCallback(state),
                hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
            ]
            x = data_of(state.epoch, hvd.rank())
            model.fit(x, x[:, :1], batch_size=1, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)

    def bits() -> list[Any]:
        values = model.optimizer.variables
        values = values() if callable(values) else values
        return [np.asarray(value).tolist() for value in (*model.get_weights(), *values)]

    train(state)
    rank.send(end=True)


def fit(adapter: str) -> None:
    """All ranks begin with the same weights and optimizer state, whoever died, at the newest commit of an epoch."""
    choose = random.Random(4)
    job = ElasticJob(lambda rank: rank_of_fit(rank, adapter), PLACES)
    asked = job.form()
    epochs: list[int] = []
    while len(epochs) < 6 or (epochs[-1] == 0 and len(epochs) < 60):  # on a busy machine, an epoch takes longer
        begun = job.reports()
        assert [each == begun[0] for each in begun] == [True] * len(begun)
        assert begun[0]["commits"] == max(0, *map(newness, asked))
        epochs.append(begun[0]["epoch"])
        time.sleep(choose.uniform(0.2, 0.6))
        if len(job.workers) > 1:
            job.lose(choose.randrange(len(job.workers)))
        else:
            job.workers[0].send(interrupt=True)
            for _ in range(2):
                job.add("here", min(set(range(9)) - {worker.slot for worker in job.workers}))
        asked = job.form()
    job.reports()
    assert epochs == sorted(epochs)
    assert epochs[-1] > 0


SCENARIOS = {
    "variables": variables,
    "fit hvdkit.keras": lambda: fit("hvdkit.keras"),
    "fit hvdkit.tensorflow.keras": lambda: fit("hvdkit.tensorflow.keras"),
}

if __name__ == "__main__":
    run(SCENARIOS[sys.argv[1]])
