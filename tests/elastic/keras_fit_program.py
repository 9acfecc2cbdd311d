"""Interrupt fit at many places, and compare with a fit that nothing interrupts.

    python keras_fit_program.py ADAPTER [legacy]

Both end with the same bits in weights, moments, metrics and history, and have trained the same batches.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from typing import Any

import numpy as np

from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt

EPOCHS, BATCHES, BATCH_SIZE = 3, 8, 4
DATA = np.random.default_rng(0).normal(size=(BATCHES * BATCH_SIZE, 5)).astype(np.float32)
# Epochs and numbers of executions, and how fit ends there: a failure, or an interrupt at the next commit.
PLANS: dict[str, list[tuple[int, int, str]]] = {
    "whole": [],
    "failure in the middle": [(1, 4, "failure")],
    "interrupts": [(0, 2, "interrupt"), (1, 1, "interrupt"), (2, 2, "interrupt")],
    "before the first commit": [(0, 0, "failure")],
    "at the end of an epoch": [(0, -1, "interrupt"), (1, -1, "failure"), (2, -1, "interrupt")],
    "after the last batch": [(0, BATCHES - 1, "failure"), (1, BATCHES - 1, "interrupt")],
    "twice in an epoch": [(1, 3, "failure"), (1, 4, "failure"), (1, 5, "interrupt")],
}


class Training:
    """A model of either Keras, which ``fit`` trains under a plan of ends."""

    def __init__(self, hvd: Any, keras: Any, is_legacy: bool, steps: int) -> None:
        self.hvd, self.keras = hvd, keras
        inputs = keras.Input((4,))
        layers = [keras.layers.Dense(8, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([inputs, *layers])
        for index, weight in enumerate(model.trainable_weights):
            weight.assign(np.random.default_rng(index).normal(size=tuple(weight.shape)).astype(np.float32))
        optimizers = keras.optimizers.legacy if is_legacy else keras.optimizers
        options = {"metrics": ["mae"], "steps_per_execution": steps}
        model.compile(hvd.DistributedOptimizer(optimizers.Adam(0.01)), "mse", **options)
        self.model, self.steps = model, steps

    def run(self, plan: list[tuple[int, int, str]], source: str, counts_from_0: bool) -> dict[str, Any]:
        """Return the facts that a test compares."""
        hvd, plan, model, trained = self.hvd, list(plan), self.model, []
        state = hvd.elastic.KerasState(model, batch=0, epoch=0, trained=trained)

        class Ends(self.keras.callbacks.Callback):  # type: ignore[name-defined]
            executions = -1

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.executions, self.epoch = -1, epoch + (0 if not counts_from_0 else begun)

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.executions += 1
                if state._fit_progress.skipped <= batch:
                    state.trained = [*state.trained, (self.epoch, batch)]
                self.end(self.executions)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.end(-1)

            def end(self, executions: int) -> None:
                if plan and plan[0][:2] == (self.epoch, executions):
                    if plan.pop(0)[2] == "failure":
                        raise HorovodInternalError("a rank is lost")
                    state.on_hosts_updated(0, None)

        while True:
            begun = state.epoch
            epochs = {"epochs": EPOCHS - begun} if counts_from_0 else {"initial_epoch": begun, "epochs": EPOCHS}
            callbacks = [
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Ends(),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=1 if self.steps > 1 else 2),
            ]
            check = {"validation_data": (DATA[:8, :4], DATA[:8, 4:]), "verbose": 0, "callbacks": callbacks}
            try:
                history = model.fit(**self.data(source), **epochs, **check)
                break
            except HorovodInternalError:
                state.restore()
            except HostsUpdatedInterrupt:
                state.save()
        assert not plan, f"{plan} did not happen"
        assert model.history is history
        variables = model.optimizer.variables
        variables = variables() if callable(variables) else variables
        arrays = [np.asarray(state._array(each)).tolist() for each in (*model.variables, *variables)]
        return {"history": history.history, "epochs": history.epoch, "trained": state.trained, "values": arrays}

    def data(self, source: str) -> dict[str, Any]:
        """Return the first arguments of fit."""
        x, y = DATA[:, :4], DATA[:, 4:]
        if source == "arrays":
            return {"x": x, "y": y, "batch_size": BATCH_SIZE, "shuffle": False}
        if source == "dataset":
            import tensorflow as tf

            return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)}
        batches = [(x[index::BATCHES], y[index::BATCHES]) for index in range(BATCHES)]
        return {"x": (batch for batch in itertools.cycle(batches)), "steps_per_epoch": BATCHES}


def main(adapter: str, is_legacy: bool) -> None:
    hvd = importlib.import_module(adapter)
    is_of_tensorflow = adapter == "hvdkit.tensorflow.keras"
    keras = importlib.import_module("tensorflow").keras if is_of_tensorflow else importlib.import_module("keras")
    hvd.init()
    # Keras on PyTorch has one step per execution.
    other = (3, "dataset", False) if is_of_tensorflow else (1, "generator", False)
    for steps, source, counts_from_0 in [(1, "arrays", True), other]:
        expected: dict[str, Any] = {}
        for name, plan in PLANS.items():
            if steps > 1:
                plan = [(epoch, execution // steps, how) for epoch, execution, how in plan]
            facts = Training(hvd, keras, is_legacy, steps).run(plan, source, counts_from_0)
            expected = expected or facts
            for key, value in expected.items():
                assert facts[key] == value, f"{name}, {steps}, {source}: {key} {facts[key]} instead of {value}"
        assert expected["epochs"] == list(range(EPOCHS))
        assert len(expected["history"]["val_mae"]) == EPOCHS
        print(f"PASSED {steps} {source}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "legacy" in sys.argv)
