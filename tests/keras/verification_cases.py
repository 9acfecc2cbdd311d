"""HVDKIT_VERIFY=1 in Keras, on both backends: by an optimizer, in fit() and in steps of one's own."""

from __future__ import annotations

import keras

from hvdkit.errors import ParametersDifferError
from tests.keras.batches import ROWS, batches, whole
from tests.keras.checks import check_same_bits, only_with_others
from tests.keras.models import TENSORFLOW, compiled, model, train
from tests.told import told, warned


def case_a_model_that_nobody_broadcast_is_found_by_the_third_step(hvd):
    only_with_others(hvd)
    for eager in (False, True):
        ours = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=hvd.rank(), run_eagerly=eager)
        error = told(ParametersDifferError, "after step 2: 'dense/kernel'", "HINT", "BroadcastGlobalVariablesCallback")
        with warned("BroadcastGlobalVariablesCallback(0)"), error:
            train(ours, batches(hvd.rank()))


def case_a_broadcast_after_the_first_step_is_in_time(hvd):
    ours = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=hvd.rank())
    train(ours, batches(hvd.rank(), 1))
    hvd.broadcast_variables(ours.variables, root_rank=0)
    hvd.broadcast_variables(ours.optimizer.variables, root_rank=0)
    train(ours, batches(hvd.rank(), 4))
    check_same_bits(hvd, ours)


def case_fit_with_the_callback_passes(hvd):
    for options in ({}, {"run_eagerly": True}, {"steps_per_execution": 2 if TENSORFLOW else 1}):
        ours = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=hvd.rank(), **options)
        settings = {"callbacks": [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], "verbose": 0, "shuffle": False}
        ours.fit(*whole(batches(hvd.rank(), 4)), batch_size=ROWS, epochs=2, **settings)
        check_same_bits(hvd, ours)


def case_a_weight_written_on_one_rank_is_named(hvd):
    only_with_others(hvd)
    ours = train(compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), batches(hvd.rank()))
    if hvd.rank() == hvd.size() - 1:
        ours.trainable_variables[1].assign_add(keras.ops.ones_like(ours.trainable_variables[1]))
    with told(ParametersDifferError, "after step 3: 'dense/bias' (of 4) differ", f"of rank {hvd.size() - 1} differ"):
        train(ours, batches(hvd.rank()))


def case_local_layers_and_passes_are_none(hvd):
    ours = model()
    ours.layers[0].bias.assign(keras.ops.ones_like(ours.layers[0].bias) * hvd.rank())
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=ours.layers[0], backward_passes_per_step=2
    )
    ours.compile(optimizer=optimizer, loss="mse")
    train(ours, batches(hvd.rank(), 6))


def case_a_loss_scale_leaves_steps_out(hvd):
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**30)
    ours = compiled(hvd.DistributedOptimizer(scaled), dtype="float32")
    train(ours, batches(hvd.rank(), 4))
    check_same_bits(hvd, ours)
