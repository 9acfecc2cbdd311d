"""Keras on PyTorch with ``overlap_forward``: what it gives, who waits for updates, and where there is no such thing."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch

from hvdkit.torch.optimizers.awaited import is_waiting
from tests.keras.batches import batches, train
from tests.keras.early_cases import OwnStep, check, compiled, one_process, sgd
from tests.keras.models import check_same_bits, numbers

STEPS = 6


def halving() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


MAKERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(halving(), momentum=0.9, nesterov=True, clipnorm=0.05, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, clipvalue=0.1),
    "adamw": lambda: keras.optimizers.AdamW(halving(), weight_decay=0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: keras.optimizers.Lion(0.01),
}


def overlapping(hvd: Any, optimizer: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, overlap_forward=True, **options)


def waiting(model: Any) -> int:
    return sum(is_waiting(variable.value) for variable in model.trainable_variables)


def trained(hvd: Any, steps: int = STEPS) -> Any:
    """A model whose last update waits."""
    model = train(compiled(overlapping(hvd, sgd())), batches(hvd.rank(), steps))
    assert waiting(model) == len(model.trainable_variables) > 0
    return model


def bits(values: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()


def expected(hvd: Any, steps: int = STEPS) -> Any:
    """The same without overlap."""
    return train(compiled(hvd.DistributedOptimizer(sgd())), batches(hvd.rank(), steps))


def case_every_optimizer_gives_the_bits_that_it_gives_without(hvd: Any) -> None:
    for name, make in MAKERS.items():
        without = train(compiled(hvd.DistributedOptimizer(make())), batches(hvd.rank(), STEPS))
        model = compiled(overlapping(hvd, make()))
        waited = []
        for x, y in batches(hvd.rank(), STEPS):
            model.train_on_batch(x, y)
            waited.append(waiting(model))
        # The first step agrees, the second backward pass is looked at.
        assert waited == [0, 0, *[len(model.trainable_variables)] * (STEPS - 2)], name
        assert int(model.optimizer.iterations) == STEPS
        ours = [*numbers(model.variables), *numbers(model.optimizer.variables)]
        theirs = [*numbers(without.variables), *numbers(without.optimizer.variables)]
        assert bits(ours) == bits(theirs), name
        check_same_bits(hvd, model)


def case_it_trains_as_one_process_does(hvd: Any) -> None:
    check(hvd, trained(hvd), one_process(hvd, STEPS))


def case_a_learning_rate_that_is_set_after_a_step_is_the_next_ones(hvd: Any) -> None:
    models = []
    for overlap in (False, True):
        model = compiled(hvd.DistributedOptimizer(sgd(), overlap_forward=overlap))
        for number, (x, y) in enumerate(batches(hvd.rank(), STEPS)):
            model.train_on_batch(x, y)
            model.optimizer.learning_rate = 0.1 / (number + 2)
        models.append(model)
    assert bits(numbers(models[0].variables)) == bits(numbers(models[1].variables))


def case_whoever_reads_a_variable_sees_the_update(hvd: Any) -> None:
    without = expected(hvd)

    def saved(model: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "model.weights.h5"))
            model.save_weights(path)
            other = compiled(sgd())
            other.load_weights(path)
        return numbers(other.trainable_variables)

    readers: dict[str, Callable[[Any], list[Any]]] = {
        "numpy": lambda model: [variable.numpy() for variable in model.trainable_variables],
        "get_weights": lambda model: model.get_weights(),
        "array": lambda model: [np.array(variable) for variable in model.trainable_variables],
        "state_dict": lambda model: [value.numpy() for value in model.state_dict().values()],
        "a file": saved,
        "clone": lambda model: [variable.value.detach().clone().numpy() for variable in model.trainable_variables],
    }
    for name, read in readers.items():
        assert bits(read(trained(hvd))) == bits(read(without)), name
    x = batches(hvd.rank(), 1)[0][0]
    np.testing.assert_array_equal(trained(hvd).predict(x, verbose=0), without.predict(x, verbose=0))
    momenta = []
    for overlap in (False, True):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), overlap_forward=overlap)
        momenta.append(train(compiled(optimizer), batches(hvd.rank(), STEPS)))
    assert bits(numbers(momenta[0].optimizer.variables)) == bits(numbers(momenta[1].optimizer.variables))


def case_a_variable_that_is_assigned_keeps_that(hvd: Any) -> None:
    model = trained(hvd)
    for variable in model.trainable_variables:
        variable.assign(np.full(variable.shape, 0.5))
    assert waiting(model) == 0
    assert all((value == 0.5).all() for value in numbers(model.trainable_variables))


def case_a_gradient_that_somebody_holds_is_not_left_to_the_background(hvd: Any) -> None:
    model = compiled(overlapping(hvd, sgd()))
    held: list[torch.Tensor] = []
    first = model.trainable_variables[0].value
    handle = first.register_post_accumulate_grad_hook(lambda parameter: held.append(parameter.grad))
    train(model, batches(hvd.rank(), STEPS))
    handle.remove()
    assert len(held) == STEPS
    assert not is_waiting(first)
    assert waiting(model) == len(model.trainable_variables) - 1
    check(hvd, model, one_process(hvd, STEPS))


def case_where_it_cannot_be_apply_waits(hvd: Any) -> None:
    own = train(compiled(overlapping(hvd, sgd()), OwnStep), batches(hvd.rank(), STEPS))
    assert waiting(own) == 0
    check(hvd, own, one_process(hvd, STEPS))
    scaled = compiled(keras.optimizers.LossScaleOptimizer(overlapping(hvd, sgd()), 8.0))
    train(scaled, batches(hvd.rank(), STEPS))
    assert waiting(scaled) == 0
    check(hvd, scaled, one_process(hvd, STEPS))


def case_fit_and_evaluate_give_what_they_give_without(hvd: Any) -> None:
    found = []
    for overlap in (False, True):
        model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), overlap_forward=overlap))
        x, y = (np.concatenate(parts) for parts in zip(*batches(hvd.rank(), 8), strict=True))
        history = model.fit(x, y, batch_size=4, epochs=3, validation_data=(x[:8], y[:8]), shuffle=False, verbose=0)
        found.append((history.history, bits(numbers(model.variables)), model.evaluate(x, y, verbose=0)))
    assert found[0] == found[1]


def case_layers_that_compute_in_another_dtype(hvd: Any) -> None:
    found = []
    for overlap in (False, True):
        model = compiled_with(hvd, keras.optimizers.Adam(0.01), overlap, dtype="mixed_bfloat16")
        train(model, batches(hvd.rank(), STEPS))
        assert waiting(model) == overlap * len(model.trainable_variables)
        found.append(bits([*numbers(model.variables), *numbers(model.optimizer.variables)]))
    assert found[0] == found[1]


def case_variables_of_several_dtypes_or_with_constraints_wait(hvd: Any) -> None:
    model = compiled_with(hvd, sgd(), True, kernel_constraint=keras.constraints.MaxNorm(1.0))
    train(model, batches(hvd.rank(), STEPS))
    assert waiting(model) == 0
    check_same_bits(hvd, model)


def compiled_with(hvd: Any, optimizer: Any, overlap: bool, **options: Any) -> Any:
    """A model of layers with options."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(160, **options), keras.layers.LayerNormalization(), keras.layers.Dense(1, **options)]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer, overlap_forward=overlap), loss="mse")
    return model


def case_a_warm_up_corrects_momenta_as_the_last_step_left_them(hvd: Any) -> None:
    found = []
    for overlap in (False, True):
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model = compiled(hvd.DistributedOptimizer(optimizer, overlap_forward=overlap))
        x, y = (np.concatenate(parts) for parts in zip(*batches(hvd.rank(), 8), strict=True))
        callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2)
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        assert waiting(model) == 0, "at the end of fit() nothing is left"
        found.append(bits([*numbers(model.variables), *numbers(model.optimizer.variables)]))
    assert found[0] == found[1]


def case_weights_that_are_set_back_stay_so(hvd: Any) -> None:
    for names in (("optimizer", "model"), ("model", "optimizer")):
        optimizer = overlapping(hvd, keras.optimizers.SGD(0.1, momentum=0.9))
        model = train(compiled(optimizer), batches(hvd.rank(), STEPS))
        saved = {"model": model.get_weights(), "optimizer": numbers(model.optimizer.variables)}
        train(model, batches(hvd.rank(), STEPS))
        assert waiting(model)
        for name in names:
            (model if name == "model" else model.optimizer).set_weights(saved[name])
        assert bits(model.get_weights()) == bits(saved["model"])
        assert bits(numbers(model.optimizer.variables)) == bits(saved["optimizer"])


def case_what_it_does_not_know_is_refused(hvd: Any) -> None:
    class Own(keras.optimizers.SGD):
        pass

    makers: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
        (lambda: keras.optimizers.Nadam(), {}, "the update of Nadam may need all gradients at once"),
        (lambda: Own(), {}, "the update of Own may need all gradients at once"),
        (lambda: keras.optimizers.SGD(global_clipnorm=1.0), {}, "global_clipnorm needs all gradients at once"),
        (lambda: keras.optimizers.SGD(use_ema=True), {}, "use_ema needs all gradients at once"),
        (lambda: sgd(), {"backward_passes_per_step": 2}, "backward_passes_per_step=1 is expected, got 2"),
    ]
    for make, options, text in makers:
        with pytest.raises(ValueError, match=f"argument overlap_forward: {text}\n?.*"):
            overlapping(hvd, make(), **options)


def case_the_last_update_is_made_when_the_job_ends(hvd: Any) -> None:
    model = trained(hvd)
    wanted = bits(numbers(expected(hvd).trainable_variables))
    hvd.shutdown()
    assert waiting(model) == 0
    assert bits(numbers(model.trainable_variables)) == wanted
    hvd.init(process_sets="dynamic")
