"""Ranks come and go while fit trains. ``python -m tests.elastic.keras_fit_scenarios ADAPTER [legacy]``.

Of each epoch all batches are trained once, but for what the number of ranks makes of the place.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
import time
from typing import Any

import numpy as np

from hvdkit.environments import elastic
from tests.elastic.job import Answer, ElasticJob, Rank, run

TOTAL, BATCH_SIZE = 60, 4  # the batches of all ranks in an epoch, and the samples of a batch
DATA = np.random.default_rng(0).normal(size=(TOTAL * BATCH_SIZE, 5)).astype(np.float32)


def model_of(hvd: Any, keras: Any, is_legacy: bool) -> Any:
    class Samples(keras.metrics.Metric):  # type: ignore[name-defined]
        """The number of samples."""

        def __init__(self) -> None:
            super().__init__(name="samples")
            self.total = self.add_weight(name="total", shape=(), initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(float(BATCH_SIZE))

        def result(self) -> Any:
            return self.total + 0.0

        def reset_state(self) -> None:
            self.total.assign(0.0)

    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizers = keras.optimizers.legacy if is_legacy else keras.optimizers
    model.compile(hvd.DistributedOptimizer(optimizers.Adam(0.01)), "mse", metrics=[Samples()])
    return model


def rank_of_fit(rank: Rank, adapter: str, is_legacy: bool) -> None:
    """Train until an epoch ends after a ticket with ``last``; report each beginning, and when some batches are done."""
    elastic._launcher = rank  # type: ignore[assignment]
    hvd = importlib.import_module(adapter)
    is_of_tensorflow = adapter == "hvdkit.tensorflow.keras"
    keras = importlib.import_module("tensorflow").keras if is_of_tensorflow else importlib.import_module("keras")
    hvd.init()
    model = model_of(hvd, keras, is_legacy)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, log=[])

    class Log(keras.callbacks.Callback):  # type: ignore[name-defined]
        trained = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch < state._fit_progress.skipped:
                return
            time.sleep(0.01)
            state.log = [*state.log, (state.epoch, batch, hvd.size())]
            self.trained += 1
            if self.trained == 4:
                rank.send(trained=state.log[-1])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = "last" in rank.order and self.trained > 4

    @hvd.elastic.run
    def train(state: Any) -> Any:
        rank.send(epoch=state.epoch, batch=state.batch, log=len(state.log))
        mine = DATA.reshape(TOTAL, BATCH_SIZE, 5)[hvd.rank() :: hvd.size()].reshape(-1, 5)
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Log(),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
        ]
        options = {"batch_size": BATCH_SIZE, "steps_per_epoch": TOTAL // hvd.size(), "callbacks": callbacks}
        return model.fit(mine[:, :4], mine[:, 4:], epochs=100 - state.epoch, shuffle=False, verbose=0, **options)

    history = train(state)
    rank.send(
        log=state.log,
        epoch=state.epoch,
        updates=int(model.optimizer.iterations),
        epochs=history.epoch,
        samples=history.history["samples"],
        digest=hashlib.sha256(b"".join(state._array(each).tobytes() for each in model.trainable_weights)).hexdigest(),
    )


def begin(job: ElasticJob, **order: Any) -> None:
    """Form a generation, whose ranks begin at the same place, and wait until all have trained some batches."""
    job.form(**order)
    begun = job.reports()
    assert [each == begun[0] for each in begun] == [True] * len(begun), begun
    trained = job.reports()
    assert [each == trained[0] for each in trained] == [True] * len(trained), trained


def check(end: Answer) -> None:
    """Assert that of each epoch all was trained, and twice only what the place in another number of ranks contains."""
    assert len(end["log"]) == end["updates"]
    assert end["epochs"] == list(range(end["epoch"]))
    sizes = set()
    for epoch in range(end["epoch"]):
        batches = [(batch, size) for of_epoch, batch, size in end["log"] if of_epoch == epoch]
        done = 0
        for batch, size in batches:
            assert 0 <= done - batch * size < size, batches
            done = (batch + 1) * size
        assert 0 <= TOTAL - done < batches[-1][1], batches
        anew = max(index for index, (batch, _) in enumerate(batches) if batch == 0)  # also of a share of a batch
        assert end["samples"][epoch] == BATCH_SIZE * len(batches[anew:]), (end["samples"], batches)
        sizes.add(tuple(sorted({size for _, size in batches})))
    assert max(map(len, sizes)) > 1, "no number of ranks has changed in an epoch"


def fit(adapter: str, is_legacy: bool) -> None:
    choose = random.Random(6)
    job = ElasticJob(lambda rank: rank_of_fit(rank, adapter, is_legacy), [("here", slot) for slot in range(3)])
    begin(job)
    changes = ("lose", "join", "lose", "lose", "join", "join")
    for number, change in enumerate(changes, 1):
        time.sleep(choose.uniform(0.0, 0.2))
        if change == "lose":
            job.lose(choose.randrange(len(job.workers)))
        else:
            job.tell(interrupt=True)
            job.add("here", min(set(range(9)) - {worker.slot for worker in job.workers}))
        begin(job, **({"last": True} if number == len(changes) else {}))
    ends = job.reports()
    check(ends[0])
    assert [end == ends[0] for end in ends] == [True] * len(ends)


if __name__ == "__main__":
    run(lambda: fit(sys.argv[1], "legacy" in sys.argv))
