"""A rank dies between the reductions of a step in a graph. ``python -m tests.tensorflow.failed_step_program WAY``.

Rank 1 has the dense gradient reduced, and dies where it should give away the sparse one.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.errors import PeerLostError
from hvdkit.tensorflow.ops import framework
from tests import measured
from tests.told import told

SECONDS = 1.0  # for the other rank, to update what it can


class Model:
    """A dense variable, rows of a table, and a variable that each rank has for itself."""

    def __init__(self) -> None:
        self.dense = tf.Variable(tf.ones([3, 2]), name="dense")
        self.table = tf.Variable(tf.ones([8, 3]), name="table")
        self.local = tf.Variable(tf.ones([2]), name="local")
        self.variables = [self.dense, self.table, self.local]
        self.of_optimizer: list[Any] = []

    def loss(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.embedding_lookup(self.table, ids) @ self.dense * self.local)


def by_tape(model: Model, ids: tf.Tensor) -> None:
    with tf.GradientTape() as recorded:
        loss = model.loss(ids)
    tape = hvd.DistributedGradientTape(recorded)
    tape.register_local_source(model.local)
    dense, rows, local = tape.gradient(loss, model.variables)
    assert isinstance(rows, tf.IndexedSlices)
    model.dense.assign_sub(0.1 * dense)
    model.table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
    model.local.assign_sub(0.1 * local)


def by_optimizer(optimizer: Any) -> Any:
    optimizer = hvd.DistributedOptimizer(optimizer)

    def step(model: Model, ids: tf.Tensor) -> None:
        optimizer.register_local_var(model.local)
        with tf.GradientTape() as tape:
            loss = model.loss(ids)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables, strict=True))
        kept = optimizer.variables
        model.of_optimizer = list(kept() if callable(kept) else kept)

    return step


def main(way: str) -> None:
    hvd.init()
    allgather, is_last = framework.OPERATIONS.allgather, False

    def allgather_or_die(*args: Any) -> int:
        if is_last and hvd.rank() == 1:
            time.sleep(SECONDS)
            measured.killed()
        return allgather(*args)

    framework.OPERATIONS.allgather = allgather_or_die  # type: ignore[method-assign]
    model = Model()
    step = by_tape if way == "tape" else by_optimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9))
    run = tf.function(lambda ids: step(model, ids))
    before = [variable.numpy() for variable in model.variables]
    run(tf.constant([hvd.rank(), 5]))
    all_variables = [*model.variables, *model.of_optimizer]
    names = [variable.name for variable in all_variables]
    after = [variable.numpy() for variable in all_variables]
    assert not any(map(np.array_equal, before, after))
    is_last = True
    with told(tf.errors.UnknownError, "rank 1") as caught:
        run(tf.constant([hvd.rank(), 5]))
    assert isinstance(caught.value, PeerLostError), caught.value
    time.sleep(SECONDS)  # TensorFlow may still run nodes after the error
    changed = [name for name, old, new in zip(names, after, all_variables, strict=True) if (old != new.numpy()).any()]
    print(f"RANK {hvd.rank()} of {len(names)} variables CHANGED {changed}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
