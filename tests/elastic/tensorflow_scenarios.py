"""Elastic jobs of TensorFlow: a graph runs with any ranks. ``python -m tests.elastic.tensorflow_scenarios NAME``."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdkit.keras as hvd_keras
import hvdkit.tensorflow as hvd
from hvdkit.engine.session import generations
from tests.elastic.job import ElasticJob, Rank, run

PLACES = [("here", slot) for slot in range(3)]


def rank_of_functions(rank: Rank) -> None:
    """Run one tf.function in each generation: dense and sparse gradients, and operations of the user's."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tables: list[Any] = [tf.Variable(tf.zeros([4, 2])), tf.Variable(tf.zeros([3]))]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer.build([None, 1])
    traces, first_traces = 0, None

    @tf.function
    def step(number: Any) -> Any:
        nonlocal traces
        traces += 1
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            rows = tf.gather(tables[0], [1, 3])
            loss = number * tf.reduce_sum(rows) + number * tf.reduce_sum(tables[1])
        sparse, dense = tape.gradient(loss, tables)
        total = hvd.allreduce(number, op=hvd.Sum)
        layer(tf.reshape(number, [1, 1]), training=True)
        return tf.convert_to_tensor(sparse), dense, total, hvd.size_op()

    while True:
        generations.enter_next(rank, failed=True)
        sparse, dense, total, size = step(tf.constant(1.0 + hvd.rank()))
        first_traces = first_traces or traces  # TensorFlow traces again after a variable was made, as that of the order
        rank.send(
            sparse=sparse.numpy().tolist(), dense=dense.numpy().tolist(), total=total.numpy().item(),
            size=size.numpy().item(), moving_mean=float(layer.moving_mean[0]), traced_again=traces - first_traces,
        )  # fmt: skip
        if rank.receive().get("end"):
            hvd.shutdown()
            return


def functions() -> None:
    """A tf.function is traced once by each process, and its averages are those of the present ranks."""
    job = ElasticJob(rank_of_functions, PLACES[:1])  # which traces alone
    _check_functions(job)
    for added in ([1, 2], [3, 5]):
        job.tell()
        for slot in added:
            job.add("here", slot)
        _check_functions(job)
        for lost in (1, 0):
            job.lose(lost)
            job.tell()
            _check_functions(job)
    job.tell(end=True)
    assert [worker.wait() for worker in job.workers] == [0]


def _check_functions(job: ElasticJob) -> None:
    job.form()
    size = len(job.workers)
    mean = sum(range(1, size + 1)) / size
    for report in job.reports():
        assert not report["traced_again"]
        assert report["size"] == size
        assert report["total"] == size * mean
        assert report["moving_mean"] == mean
        assert report["dense"] == [mean] * 3
        assert report["sparse"] == [[mean * (row in (1, 3))] * 2 for row in range(4)]


def rank_of_keras(rank: Rank) -> None:
    """Fit a compiled model in each generation."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    model.optimizer.build(model.trainable_variables)
    x = np.random.default_rng(1).standard_normal((4, 8)).astype("float32")
    functions: list[Any] = []
    while True:
        generations.enter_next(rank, failed=True)
        hvd.broadcast_variables([*model.variables, *model.optimizer.variables], 0)
        model.fit(x + hvd.rank(), np.ones((4, 1), "float32"), batch_size=4, epochs=2, verbose=0, shuffle=False)
        functions.append(model.train_function)
        weights = hvd.allgather_object([weight.tolist() for weight in model.get_weights()])
        rank.send(
            weights=weights[0], is_same=all(each == weights[0] for each in weights), size=hvd.size(),
            is_traced_once=all(function is functions[0] for function in functions),
        )  # fmt: skip
        rank.receive()


def keras_models() -> None:
    """A compiled model trains on without being compiled again."""
    job = ElasticJob(rank_of_keras, PLACES)
    for size in (3, 2, 1):
        job.form()
        for report in job.reports():
            assert report["is_same"]
            assert report["is_traced_once"]
            assert report["size"] == size
        job.lose(0)
        job.tell()
    job.end()


SCENARIOS = {"functions": functions, "keras models": keras_models}

if __name__ == "__main__":
    run(SCENARIOS[sys.argv[1]])
