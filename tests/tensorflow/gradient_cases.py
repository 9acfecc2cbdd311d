"""DistributedGradientTape against what one process computes from all ranks' batches, eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.gradient_planned import PART_BYTES, PLANS
from tests.tensorflow.data import doubles, needs_ranks, slow_end, ways
from tests.told import told

ROWS = 4


class Model(tf.Module):
    """Two layers whose weights all ranks have alike, large enough that a graph hands them over in several parts."""

    def __init__(self, dtype: Any = tf.float32, width: int = 5) -> None:
        super().__init__()
        numbers = np.random.default_rng(3)
        self.first = tf.Variable(tf.cast(numbers.normal(size=(3, width)), dtype), name="first")
        self.bias = tf.Variable(tf.zeros([width], dtype), name="bias")
        self.second = tf.Variable(tf.cast(numbers.normal(size=(width, 2)), dtype), name="second")

    @property
    def weights(self) -> list[Any]:
        return [self.first, self.bias, self.second]

    def loss(self, x: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.tanh(x @ self.first + self.bias) @ self.second))


def batch(rank: int, dtype: Any = tf.float32, step: int = 0) -> Any:
    """A rank's rows."""
    return tf.cast(np.random.default_rng([rank, step]).normal(size=(ROWS, 3)), dtype)


def joined(hvd: Any, dtype: Any = tf.float32, step: int = 0) -> Any:
    """All ranks' rows."""
    return tf.concat([batch(rank, dtype, step) for rank in range(hvd.size())], 0)


def plain(loss: Callable[[], Any], sources: Any) -> Any:
    """The gradients of this process alone."""
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, sources)


def averaged(hvd: Any, model: Model, **options: Any) -> Callable[[Any], Any]:
    """Return a function of this rank's batch that gives the gradients that a tape with these options gives."""

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, model.weights)

    return step


def close(gradients: Any, expected: Any, rtol: float = 1e-5) -> None:
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == other.dtype
        np.testing.assert_allclose(doubles(gradient), doubles(other), rtol, rtol * np.abs(doubles(other)).max())


def case_tape_gradients_are_those_of_the_joined_batch(hvd: Any) -> None:
    for dtype, width in ((tf.float32, 5), (tf.float64, 5), (tf.float32, 300_000)):
        model = Model(dtype, width)
        expected = plain(lambda model=model, dtype=dtype: model.loss(joined(hvd, dtype)), model.weights)
        for run in ways(averaged(hvd, model)):
            for _ in range(3):
                close(run(batch(hvd.rank(), dtype)), expected, 1e-4 if width > 5 else 1e-5)


def case_tape_it_records_as_the_tape_does(hvd: Any) -> None:
    model = Model()
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = model.loss(batch(hvd.rank()))
    expected = plain(lambda: model.loss(joined(hvd)), model.weights)
    close(tape.gradient(loss, model.weights), expected)
    close([tape.gradient(loss, model.bias)], expected[1:2])
    close(list(tape.gradient(loss, {"a": model.first, "b": model.second}).values()), expected[::2])
    local, reduced = tape.get_local_and_global_gradients(loss, model.weights)
    assert not local
    assert [source is weight for (source, _), weight in zip(reduced, model.weights, strict=True)] == [True] * 3


def case_tape_after_tape_has_settings_of_its_own(hvd: Any) -> None:
    weight = tf.Variable([1.0, 2.0], name="weight")
    unused = tf.Variable([3.0], name="unused")
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(weight * float(hvd.rank() + 1))
    mean = hvd.DistributedGradientTape(tape)
    mean.register_local_source(weight)
    total = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    close([mean.gradient(loss, weight)], [tf.fill([2], (hvd.rank() + 1) / hvd.size())])
    close([total.gradient(loss, weight)], [tf.fill([2], hvd.size() * (hvd.size() + 1) / 2)])
    zeros = total.gradient(loss, [weight, unused], None, tf.UnconnectedGradients.ZERO)[1]
    close([zeros], [tf.zeros([1])])


def case_tape_sums_and_scales(hvd: Any) -> None:
    model = Model()
    mean = plain(lambda: model.loss(joined(hvd)), model.weights)
    for options, factor in (
        ({"op": hvd.Sum}, hvd.size()),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"groups": 2}, 1),
        ({"groups": [[model.first, model.second]]}, 1),
    ):
        for run in ways(averaged(hvd, model, **options)):
            close(run(batch(hvd.rank())), [factor * one for one in mean])


def case_tape_what_has_no_gradient_stays_none(hvd: Any) -> None:
    model, unused = Model(), tf.Variable([1.0, 2.0], name="unused")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(x)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [model.first, unused, model.second])
        assert gradients[1] is None
        return [gradients[0], gradients[2]]

    expected = plain(lambda: model.loss(joined(hvd)), [model.first, model.second])
    for run in ways(step):
        close(run(batch(hvd.rank())), expected)


def case_tape_gradients_with_respect_to_tensors_are_reduced(hvd: Any) -> None:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * float(hvd.rank() + 1))
        return hvd.DistributedGradientTape(tape).gradient(loss, [x])

    for run in ways(step):
        close(run(tf.ones([3])), [tf.fill([3], (hvd.size() + 1) / 2)])


def case_tape_slices_are_gathered_or_dense(hvd: Any) -> None:
    table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]), name="table")

    def loss(rows: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.gather(table, rows)))

    rows = [tf.constant([rank, 2, 2]) for rank in range(hvd.size())]
    expected = sum(tf.convert_to_tensor(plain(lambda one=one: loss(one), table)) for one in rows) / hvd.size()
    for as_dense in (False, True):

        def step(mine: Any, as_dense: bool = as_dense) -> Any:
            with tf.GradientTape() as tape:
                value = loss(mine)
            tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense)
            gradient = tape.gradient(value, table)
            assert hvd.size() == 1 or isinstance(gradient, tf.IndexedSlices) != as_dense
            return tf.convert_to_tensor(gradient)

        for run in ways(step):
            close([run(rows[hvd.rank()])], [expected])


def case_tape_local_sources_stay_local(hvd: Any) -> None:
    model = Model()
    expected = plain(lambda: model.loss(joined(hvd)), model.weights)
    mine = plain(lambda: model.loss(batch(hvd.rank())), model.weights)
    for scale in (True, False):

        def step(x: Any, scale: bool = scale) -> Any:
            with tf.GradientTape() as tape:
                loss = model.loss(x)
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            tape.register_local_source(model.bias)
            return tape.gradient(loss, model.weights)

        for run in ways(step):
            first, bias, second = run(batch(hvd.rank()))
            close([first, second], expected[::2])
            close([bias], [mine[1] / (hvd.size() if scale else 1)])
    layer = tf.keras.layers.Dense(2)
    layer.build((ROWS, 3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(batch(hvd.rank())))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
    kernel = tape.gradient(loss, layer.trainable_weights)[0]
    np.testing.assert_allclose(kernel[:, 0], tf.reduce_sum(batch(hvd.rank()), 0), rtol=1e-5)


def case_tape_compression(hvd: Any) -> None:
    model = Model(width=2000)
    expected = plain(lambda: model.loss(joined(hvd)), model.weights)

    class Halves(hvd.Compression.fp16):
        """A class of the user's, which compresses tensor by tensor."""

    for compression, rtol in (
        (hvd.Compression.fp16, 1e-2),
        (hvd.Compression.bf16, 5e-2),
        (Halves, 1e-2),
        ({"first*": hvd.Compression.fp16}, 1e-2),
        (hvd.Compression.int8(compress="everywhere"), 0.05),
    ):
        for run in ways(averaged(hvd, model, compression=compression)):
            gradients = run(batch(hvd.rank()))
            for gradient, other in zip(gradients, expected, strict=True):
                error = float(tf.reduce_max(tf.abs(gradient - other)) / tf.reduce_max(tf.abs(other)))
                assert error < rtol, (compression, error)


def case_tape_after_batches_of_unknown_size_kernels_are_compressed_too(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    kernel = tf.Variable(tf.zeros([64, 32]), name="after_unknown_sizes")
    int8 = hvd.Compression.int8(compress="everywhere")

    @tf.function(input_signature=[tf.TensorSpec([None, None, 64])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tensordot(x, kernel, 1))  # as a Dense layer does it
        gradient = hvd.DistributedGradientTape(tape, compression=int8).gradient(loss, kernel)
        assert gradient.shape == kernel.shape
        return gradient

    mine = [np.random.default_rng([rank, 5]).normal(size=(rank + 1, 3, 64)) for rank in range(hvd.size())]
    result = step(tf.constant(mine[hvd.rank()], tf.float32))
    mean = sum(one.sum((0, 1)) for one in mine) / hvd.size()
    expected = np.repeat(mean[:, None], 32, axis=1)
    assert np.abs(result - expected).max() < 0.05 * np.abs(expected).max()
    assert any("after_unknown_sizes" in name for name in hvd.compression_stats().by_parameter)


def case_tape_jacobians_are_this_ranks_alone(hvd: Any) -> None:
    weight = tf.Variable([1.0, 2.0, 3.0], name="weight")

    def derivatives(x: Any, wrap: Callable[[Any], Any] = lambda tape: tape, **options: Any) -> Any:
        persistent = "experimental_use_pfor" in options
        with tf.GradientTape(persistent=True) as tape, tf.GradientTape(persistent=persistent) as other:
            for one in (tape, other):
                one.watch(x)
            rows = tf.tanh(x * weight)
            sums = tf.linalg.matvec(x, weight)
        jacobians = wrap(tape).jacobian(sums, {"weight": weight, "x": x}, **options)
        by_row = wrap(other).batch_jacobian(rows, x, **options)
        return [jacobians["weight"], jacobians["x"], by_row, wrap(tape).gradient(sums, weight)]

    for options in ({}, {"experimental_use_pfor": False}):
        *expected, gradient = derivatives(batch(hvd.rank()), **options)
        gradients = hvd.allgather_object(gradient.numpy())
        for run in ways(lambda x, options=options: derivatives(x, hvd.DistributedGradientTape, **options)):
            close(run(batch(hvd.rank())), [*expected, tf.constant(np.mean(gradients, axis=0))])


def case_tape_gradients_of_gradients(hvd: Any) -> None:
    weight = tf.Variable([1.0, 2.0], name="weight")

    def step(factor: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(factor * weight**3)
            gradient = hvd.DistributedGradientTape(inner).gradient(loss, weight)
            penalty = tf.reduce_sum(gradient)
        return [outer.gradient(penalty, weight)]

    factor = float(hvd.rank() + 1)  # backwards the ones of all ranks are averaged
    for run in ways(step):
        close(run(tf.constant(factor)), [tf.constant([6.0 * factor, 12.0 * factor])])


def case_tape_in_a_function_and_in_one_that_it_calls(hvd: Any) -> None:
    """Both use one lane: the second step must not begin before the first has ended."""
    model = Model(width=1000)

    gradients = averaged(hvd, model)
    inner = tf.function(gradients)

    @tf.function
    def outer(x: Any, y: Any) -> Any:
        first = gradients(x)
        return first, inner(y), gradients(x)

    for step in range(5):
        x, y = batch(hvd.rank(), step=step), batch(hvd.rank(), step=step + 100)
        for found, number in zip(outer(x, y), (step, step + 100, step), strict=True):
            every = joined(hvd, step=number)
            close(found, plain(lambda every=every: model.loss(every), model.weights))


def case_tape_process_sets(hvd: Any) -> None:
    needs_ranks(hvd, 3)
    model, pair = Model(), hvd.add_process_set([0, 2])
    rows = tf.concat([batch(0), batch(2)], 0) if pair.included() else batch(1)
    expected = plain(lambda: model.loss(rows), model.weights)
    for run in ways(averaged(hvd, model, process_set=pair)):
        close(run(batch(hvd.rank())), expected)
    hvd.remove_process_set(pair)


def case_tape_at_the_end_of_the_data_nothing_is_begun(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    weight = tf.Variable([1.0, 2.0], name="weight")
    penalised = tf.Variable(tf.fill([PART_BYTES // 4], 3.0), name="penalised")  # whose gradient is a part of its own

    @tf.function
    def step(iterator: Any) -> Any:
        x = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * x) + tf.reduce_sum(tf.square(penalised)) * float(hvd.rank() + 1)
        first, second = hvd.DistributedGradientTape(tape).gradient(loss, [weight, penalised])
        return first, second[:2]

    mean = (hvd.size() + 1) / 2
    for number in (1.0, 2.0):
        data = tf.data.Dataset.from_tensors(tf.constant([1.0, number]) * float(hvd.rank() + 1))
        close(step(iter(data)), [tf.constant([1.0, number]) * mean, tf.constant([6.0, 6.0]) * mean])
        if hvd.rank() == 0:  # the others never learn of it
            with told(tf.errors.OutOfRangeError):
                step(iter(slow_end()))


def case_tape_a_step_that_fails_on_one_rank_is_an_error_on_all(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    model = Model(width=600_000)
    expected = plain(lambda: model.loss(joined(hvd)), model.weights)
    step = _failing_step(hvd, model)
    close(step(batch(hvd.rank()), tf.constant(False)), expected, 1e-4)
    failing = hvd.size() - 1

    def many_steps() -> None:
        for _ in range(100):  # a rank may learn of it while it is in the next steps
            step(batch(hvd.rank()), tf.constant(False))

    if hvd.rank() == failing:
        _begin_a_step(hvd, model)
    with pytest.raises(HorovodInternalError, match=rf"(?s)rank {failing}\b.* gave up a step .*exception"):
        many_steps()
    close(step(batch(hvd.rank()), tf.constant(False)), expected, 1e-4)


def _failing_step(hvd: Any, model: Model) -> Any:
    """A step in a graph whose backward pass fails if its second argument says so."""

    @tf.custom_gradient
    def maybe_failing(x: Any, fails: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            factor = tf.where(fails, np.float32("nan"), 1.0)
            return upstream * tf.debugging.check_numerics(factor, "asked to fail"), None

        return tf.identity(x), gradient

    @tf.function
    def step(x: Any, fails: Any) -> Any:
        with tf.GradientTape() as tape:
            y = maybe_failing(x @ model.first + model.bias, fails)
            loss = tf.reduce_mean(tf.square(tf.tanh(y) @ model.second))
        return hvd.DistributedGradientTape(tape).gradient(loss, model.weights)

    return step


def _begin_a_step(hvd: Any, model: Model) -> None:
    """What an exception leaves behind that ends a step when the last layer's gradient is handed over."""
    if hvd.size() > 1:
        [plan] = [plan for plan in PLANS.values() if plan.slots[0].shape == model.first.shape]
        first_part, *rest = plan.parts()
        assert rest, "all gradients are handed over at once: make the model larger"
        plan.begin()
        plan.hand_over(first_part, [np.zeros(plan.slots[index].shape, np.float32) for index in first_part])
        assert plan._lane.in_flight


def case_tape_what_makes_no_sense_is_told(hvd: Any) -> None:
    wrap = hvd.DistributedGradientTape
    for error, text, make in (
        (TypeError, "tf.GradientTape", lambda _: wrap(3)),
        (ValueError, "once", lambda tape: wrap(wrap(tape))),
        (ValueError, "op must", lambda tape: wrap(tape, op=17)),
        (ValueError, "groups", lambda tape: wrap(tape, groups=-1)),
        (ValueError, "predivide", lambda tape: wrap(tape, op=hvd.Sum, gradient_predivide_factor=2.0)),
        (TypeError, "compression", lambda tape: wrap(tape, compression=3)),
        (ValueError, "local_layers", lambda tape: hvd.PartialDistributedGradientTape(tape, local_layers=[3])),
    ):
        with told(error, text):
            make(tf.GradientTape())


def case_tape_after_shutdown_and_init_the_same_graph_goes_on(hvd: Any) -> None:
    model = Model()
    step = tf.function(averaged(hvd, model))
    expected = plain(lambda: model.loss(joined(hvd)), model.weights)
    close(step(batch(hvd.rank())), expected)
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    close(step(batch(hvd.rank())), expected)
