"""Train with Keras, and go back to what was saved, twice. ``python restore_program.py ADAPTER [legacy]``."""

from __future__ import annotations

import importlib
import sys

import numpy as np


def main(adapter: str, is_legacy: bool) -> None:
    hvd = importlib.import_module(adapter)
    is_of_tensorflow = adapter == "hvdkit.tensorflow.keras"
    keras = importlib.import_module("tensorflow").keras if is_of_tensorflow else importlib.import_module("keras")
    hvd.init()
    optimizers = keras.optimizers.legacy if is_legacy else keras.optimizers
    layers = [keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.InputLayer((32,)), *layers])
    passes = 2 if "passes" in sys.argv else 1
    model.compile(hvd.DistributedOptimizer(optimizers.Adam(0.01), backward_passes_per_step=passes), "mse")
    state = hvd.elastic.KerasState(model, batch=0)
    samples = np.random.default_rng(0).standard_normal((32, 32)).astype("float32")

    def train() -> None:
        model.fit(samples, samples[:, :1], verbose=0)
        state.batch += 1

    def values() -> list[np.ndarray]:
        variables = model.optimizer.variables
        variables = variables() if callable(variables) else variables
        convert = keras.ops.convert_to_numpy if hasattr(keras, "ops") else np.asarray
        return [np.array(each) for each in (*model.get_weights(), *map(convert, variables))]

    if passes > 1:
        train()
        try:
            state.commit()
        except ValueError as error:
            fact = "The state was saved between backward passes of a step: a failure would lose the step's gradients."
            hint = "2 batches make a step of the optimizer: commit after 2 batches or a multiple of that."
            assert f"{fact}\nHINT: {hint}" in str(error)  # noqa: PT017 (not under pytest)
        else:
            raise AssertionError("a commit between passes")
        before = values()
        state.restore()
        train()  # would update, with the gradients of a pass that is forgotten
        assert sum(map(np.array_equal, before, values())) > 10
    train()
    state.save()
    held, held_batch = values(), state.batch
    assert len(held) > 15, "moments are missing"
    for _ in range(2):  # the second time, unless training has changed the copy
        train()
        assert not all(map(np.array_equal, held, values()))
        state.restore()
        assert all(map(np.array_equal, held, values()))
        assert state.batch == held_batch

    if passes == 1:  # then each training is a step
        for _ in range(3):
            train()
            state.commit()
        assert not state._is_copied
        held = values()
        state._go_back()
        assert all(map(np.array_equal, held, values()))
        train()
        kept = values()
        state._go_back()
        assert all(map(np.array_equal, kept[:4], values()[:4]))
        assert (state.batch, state._version) == (4, (3, 1))


if __name__ == "__main__":
    main(sys.argv[1], "legacy" in sys.argv)
