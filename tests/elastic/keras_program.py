"""A training by fit under hvd.elastic.run.

    python keras_program.py keras|tf.keras|tensorflow EPOCHS SIZE [KILL]

It ends after EPOCHS epochs, once SIZE ranks have trained. Rank 1 of the first generation kills itself in epoch KILL.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys

import numpy as np


def model_of(keras):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    for index, weight in enumerate(model.weights):
        shape = tuple(weight.shape)
        weight.assign(np.random.default_rng(index).normal(size=shape).astype(np.float32))
    return model


def fit(hvd, keras, epochs: int, size: int, kill: int) -> list[np.ndarray]:
    model = model_of(keras)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, "mse", run_eagerly=False)
    data = np.random.default_rng(0).normal(size=(24, 5)).astype(np.float32)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if hvd.rank() == 1 and hvd.size() == size and state.epoch == kill and batch == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs or hvd.size() < size:
            callbacks = [
                Kill(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            ]
            model.fit(data[:, :4], data[:, 4:], batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    train(state)
    print(json.dumps({"epoch": state.epoch, "batch": state.batch}), file=sys.stderr, flush=True)
    return [np.asarray(weight) for weight in model.get_weights()]


def tape(hvd, tf, epochs: int, size: int, kill: int) -> list[np.ndarray]:
    variables = [tf.Variable(np.full((3, 2), 1.0 + hvd.rank(), np.float32)), tf.Variable(np.zeros(2, np.float32))]

    @tf.function
    def step(batch):
        with tf.GradientTape() as recorded:
            loss = tf.reduce_mean(tf.square(batch @ variables[0] + variables[1]))
        gradients = hvd.DistributedGradientTape(recorded).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs or hvd.size() < size:
            if hvd.rank() == 1 and hvd.size() == size and state.epoch == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            step(tf.constant(np.random.default_rng(state.epoch * 10 + hvd.rank()).normal(size=(4, 3)), tf.float32))
            state.epoch += 1
            state.commit()

    train(hvd.elastic.TensorFlowState(variables, epoch=0))
    return [variable.numpy() for variable in variables]


def main(kind: str, epochs: int, size: int, kill: int) -> None:
    if kind == "tensorflow":
        import tensorflow as tf

        import hvdkit.tensorflow as hvd

        hvd.init()
        weights = tape(hvd, tf, epochs, size, kill)
    else:
        hvd = importlib.import_module("hvdkit.keras" if kind == "keras" else "hvdkit.tensorflow.keras")
        hvd.init()
        keras = importlib.import_module("keras") if kind == "keras" else importlib.import_module("tensorflow").keras
        weights = fit(hvd, keras, epochs, size, kill)
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
    is_finite = all(np.isfinite(weight).all() for weight in weights)
    print(json.dumps({"digest": digest, "rank": hvd.rank(), "size": hvd.size(), "finite": bool(is_finite)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else -1)
