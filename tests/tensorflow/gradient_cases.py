"""DistributedGradientTape against what one process computes from all ranks' batches, eager and in graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.gradient_planned import PART_BYTES, PLANS
from tests.ranks import Skip
from tests.tensorflow.data import doubles, needs_ranks, slow_end, ways
from tests.told import told, warned

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
    return tf.cast(np.random.default_rng([rank, step]).normal(size=(ROWS, 3)), dtype)


def joined(hvd: Any, dtype: Any = tf.float32, step: int = 0) -> Any:
    return tf.concat([batch(rank, dtype, step) for rank in range(hvd.size())], 0)


def plain(loss: Callable[[], Any], sources: Any) -> Any:
    """The gradients of this process alone."""
    with tf.GradientTape() as tape:
        value = loss()
    return tape.gradient(value, sources)


def of_all(hvd: Any, model: Model, dtype: Any = tf.float32, step: int = 0) -> Any:
    """The gradients of one process that has all ranks' rows."""
    return plain(lambda: model.loss(joined(hvd, dtype, step)), model.weights)


def reducing(hvd: Any, loss: Callable[..., Any], sources: Any, **options: Any) -> Callable[..., Any]:
    """Return a function of a loss's arguments: the gradients that a tape with these options gives."""

    def step(*arguments):
        with tf.GradientTape() as tape:
            value = loss(*arguments)
        return hvd.DistributedGradientTape(tape, **options).gradient(value, sources)

    return step


def stepping(hvd: Any, model: Model, factor: float = 1.0, rate: float = 0.05, **options: Any) -> Callable[[Any], None]:
    """Return a function that makes a step of plain SGD with a tape, on this rank's batch."""
    gradients_of = reducing(hvd, lambda x: factor * model.loss(x), model.weights, **options)

    def step(x: Any) -> None:
        for variable, gradient in zip(model.weights, gradients_of(x), strict=True):
            variable.assign_sub(rate * gradient)

    return step


def close(gradients: Any, expected: Any, rtol: float = 1e-5) -> None:
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == other.dtype
        np.testing.assert_allclose(doubles(gradient), doubles(other), rtol, rtol * np.abs(doubles(other)).max())


def check_ways(function: Callable[..., Any], arguments: Any, expected: Any, rtol: float = 1e-5) -> None:
    """The function gives this as it is, and in a graph."""
    for run in ways(function):
        close(run(*arguments), expected, rtol)


def case_tape_gradients_are_those_of_the_joined_batch(hvd):
    for dtype, width in ((tf.float32, 5), (tf.float64, 5), (tf.float32, 300_000)):
        model = Model(dtype, width)
        expected = of_all(hvd, model, dtype)
        for run in ways(reducing(hvd, model.loss, model.weights)):
            for _ in range(3):
                close(run(batch(hvd.rank(), dtype)), expected, 1e-4 if width > 5 else 1e-5)


def case_tape_it_records_as_the_tape_does(hvd):
    model = Model()
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = model.loss(batch(hvd.rank()))
    assert isinstance(tape, tf.GradientTape)
    expected = of_all(hvd, model)
    close(tape.gradient(loss, model.weights), expected)
    close([tape.gradient(loss, model.bias)], expected[1:2])
    close(list(tape.gradient(loss, {"a": model.first, "b": model.second}).values()), expected[::2])
    local, reduced = tape.get_local_and_global_gradients(loss, model.weights)
    assert not local
    assert [source is weight for (source, _), weight in zip(reduced, model.weights, strict=True)] == [True] * 3


def case_tape_after_tape_has_settings_of_its_own(hvd):
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


def case_tape_sums_and_scales(hvd):
    model = Model()
    for options, factor in (
        ({"op": hvd.Sum}, hvd.size()),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"groups": 2}, 1),
        ({"groups": [[model.first, model.second]]}, 1),
    ):
        expected = [factor * gradient for gradient in of_all(hvd, model)]
        check_ways(reducing(hvd, model.loss, model.weights, **options), [batch(hvd.rank())], expected)


def case_tape_what_has_no_gradient_stays_none(hvd):
    model, unused = Model(), tf.Variable([1.0, 2.0], name="unused")
    for run in ways(reducing(hvd, model.loss, [model.first, unused, model.second])):
        first, nothing, second = run(batch(hvd.rank()))
        assert nothing is None
        close([first, second], of_all(hvd, model)[::2])


def case_tape_gradients_with_respect_to_tensors_are_reduced(hvd):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * float(hvd.rank() + 1))
        return hvd.DistributedGradientTape(tape).gradient(loss, [x])

    check_ways(step, [tf.ones([3])], [tf.fill([3], (hvd.size() + 1) / 2)])


def case_tape_slices_are_gathered_or_dense(hvd):
    table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]), name="table")

    def loss(rows):
        return tf.reduce_sum(tf.square(tf.gather(table, rows)))

    rows = [tf.constant([rank, 2, 2]) for rank in range(hvd.size())]
    expected = sum(tf.convert_to_tensor(plain(lambda one=one: loss(one), table)) for one in rows) / hvd.size()
    for as_dense in (False, True):
        for run in ways(reducing(hvd, loss, table, sparse_as_dense=as_dense)):
            gradient = run(rows[hvd.rank()])
            assert hvd.size() == 1 or isinstance(gradient, tf.IndexedSlices) != as_dense
            close([tf.convert_to_tensor(gradient)], [expected])


def case_tape_slices_are_not_compressed_and_it_says_so(hvd):
    table = tf.Variable(tf.zeros([100, 20]), name="embedding_3/table")
    whole = (
        "the gradient of embedding/table is sparse (tf.IndexedSlices): its rows are gathered as they are, not "
        "compressed.\n"
        "HINT: with sparse_as_dense=True it is compressed like the other gradients; if most rows are untouched, "
        "gathering sends less, and a pattern or a function in compression= can leave this gradient out."
    )
    for as_dense, times in ((False, 1), (True, 0)):
        options = {"compression": hvd.Compression.int8, "sparse_as_dense": as_dense}
        is_told = times and hvd.rank() == 0 and hvd.size() > 1
        with warned(whole if is_told else "gradient of embedding/table is sparse", times if is_told else 0):
            reducing(hvd, lambda: tf.reduce_sum(tf.gather(table, [1, 2])), table, **options)()


def case_tape_local_sources_stay_local(hvd):
    model = Model()
    expected, mine = of_all(hvd, model), plain(lambda: model.loss(batch(hvd.rank())), model.weights)
    for scale in (True, False):

        def step(x, scale=scale):
            with tf.GradientTape() as tape:
                loss = model.loss(x)
            tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
            tape.register_local_source(model.bias)
            return tape.gradient(loss, model.weights)

        check_ways(step, [batch(hvd.rank())], [expected[0], mine[1] / (hvd.size() if scale else 1), expected[2]])
    layer = tf.keras.layers.Dense(2)
    layer.build((ROWS, 3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(batch(hvd.rank())))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
    kernel = tape.gradient(loss, layer.trainable_weights)[0]
    np.testing.assert_allclose(kernel[:, 0], tf.reduce_sum(batch(hvd.rank()), 0), rtol=1e-5)


def case_tape_compression(hvd):
    model = Model(width=2000)
    expected = of_all(hvd, model)

    class Halves(hvd.Compression.fp16):
        """A class of the user's, which compresses tensor by tensor."""

    for compression, tolerance in (
        (hvd.Compression.fp16, 1e-2),
        (hvd.Compression.bf16, 5e-2),
        (Halves, 1e-2),
        ({"first*": hvd.Compression.fp16}, 1e-2),
        (hvd.Compression.int8(compress="everywhere"), 0.05),
    ):
        for run in ways(reducing(hvd, model.loss, model.weights, compression=compression)):
            for gradient, other in zip(run(batch(hvd.rank())), expected, strict=True):
                error = float(tf.reduce_max(tf.abs(gradient - other)) / tf.reduce_max(tf.abs(other)))
                assert error < tolerance, (compression, error)


def case_tape_compression_of_variables_of_any_shape(hvd):
    for shape in (tf.TensorShape([None, 32]), tf.TensorShape(None)):
        weight = tf.Variable(tf.zeros([64, 32]), shape=shape, name="any_shape")
        options = {"compression": hvd.Compression.int8}
        step = reducing(hvd, lambda factor, weight=weight: tf.reduce_sum(weight * factor), [weight], **options)
        check_ways(step, [tf.constant(hvd.rank() + 1.0)], [tf.fill([64, 32], (hvd.size() + 1) / 2)])


def case_tape_residuals_carry_on_what_was_not_sent(hvd):
    needs_ranks(hvd)
    weight = tf.Variable(tf.zeros([64, 64]), name="weight")
    slope = tf.constant(np.random.default_rng(1).normal(size=(64, 64)), tf.float32)
    topk = hvd.Compression.topk(0.1, compress="everywhere")
    for run in ways(reducing(hvd, lambda: tf.reduce_sum(weight * slope), weight, compression=topk)):
        applied = sum(run() for _ in range(40)) / 40
        assert float(tf.norm(applied - slope) / tf.norm(slope)) < 0.3


def case_tape_after_batches_of_unknown_size_kernels_are_compressed_too(hvd):
    needs_ranks(hvd)
    kernel = tf.Variable(tf.zeros([64, 32]), name="after_unknown_sizes")
    int8 = hvd.Compression.int8(compress="everywhere")

    def loss(x):
        return tf.reduce_sum(tf.tensordot(x, kernel, 1))  # as a Dense layer does it

    signature = [tf.TensorSpec([None, None, 64])]
    step = tf.function(reducing(hvd, loss, kernel, compression=int8), input_signature=signature)
    assert step.get_concrete_function().structured_outputs.shape == kernel.shape
    mine = [np.random.default_rng([rank, 5]).normal(size=(rank + 1, 3, 64)) for rank in range(hvd.size())]
    result = step(tf.constant(mine[hvd.rank()], tf.float32))
    mean = sum(one.sum((0, 1)) for one in mine) / hvd.size()
    expected = np.repeat(mean[:, None], 32, axis=1)
    assert np.abs(result - expected).max() < 0.05 * np.abs(expected).max()
    assert any("after_unknown_sizes" in name for name in hvd.compression_stats().by_parameter)


def case_tape_jacobians_are_this_ranks_alone(hvd):
    weight = tf.Variable([1.0, 2.0, 3.0], name="weight")

    def derivatives(x, wrap=lambda tape: tape, **options):
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


def case_tape_gradients_of_gradients(hvd):
    weight = tf.Variable([1.0, 2.0], name="weight")

    def step(factor):
        with tf.GradientTape() as outer:
            gradient = reducing(hvd, lambda: tf.reduce_sum(factor * weight**3), weight)()
            penalty = tf.reduce_sum(gradient)
        return [outer.gradient(penalty, weight)]

    factor = float(hvd.rank() + 1)  # backwards the ones of all ranks are averaged
    check_ways(step, [tf.constant(factor)], [tf.constant([6.0 * factor, 12.0 * factor])])


def case_tape_several_steps_in_one_graph(hvd):
    ours, alone = Model(), Model()

    def descend(model, gradients):
        for weight, gradient in zip(model.weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)

    def steps(batches):
        for number in tf.range(tf.shape(batches)[0]):
            with tf.GradientTape(persistent=True) as tape:
                loss = ours.loss(batches[number])
                half = 0.5 * loss
            tape = hvd.DistributedGradientTape(tape)
            descend(ours, tape.gradient(loss, ours.weights))
            descend(ours, tape.gradient(half, ours.weights))
        return ours.weights[0]

    for run in ways(steps):
        for _ in range(2):
            run(tf.stack([batch(hvd.rank(), step=step) for step in range(4)]))
            for step in range(4):
                descend(alone, [1.5 * gradient for gradient in of_all(hvd, alone, step=step)])
            close(ours.weights, alone.weights, 1e-4)


def case_tape_in_a_function_and_in_one_that_it_calls(hvd):
    """Both use one lane: the second step must not begin before the first has ended."""
    model = Model(width=1000)

    def gradients(x):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = model.loss(x)
        return tape.gradient(loss, model.weights)

    inner = tf.function(gradients)

    @tf.function
    def outer(x, y):
        first = gradients(x)
        return first, inner(y), gradients(x)

    for step in range(5):
        numbers = (step, step + 100, step)
        several = outer(*(batch(hvd.rank(), step=number) for number in numbers[:2]))
        for gradients_of_it, number in zip(several, numbers, strict=True):
            close(gradients_of_it, of_all(hvd, model, step=number))


def case_tape_process_sets(hvd):
    needs_ranks(hvd, 3)
    model, pair = Model(), hvd.add_process_set([0, 2])
    rows = tf.concat([batch(0), batch(2)], 0) if pair.included() else batch(1)
    expected = plain(lambda: model.loss(rows), model.weights)
    check_ways(reducing(hvd, model.loss, model.weights, process_set=pair), [batch(hvd.rank())], expected)
    hvd.remove_process_set(pair)


def case_tape_adasum_of_equal_gradients_is_one_of_them(hvd):
    if not hvd.check_num_rank_power_of_2(hvd.size()):
        raise Skip("Adasum needs a power of two")
    model = Model()
    expected = plain(lambda: model.loss(batch(0)), model.weights)
    check_ways(reducing(hvd, model.loss, model.weights, op=hvd.Adasum), [batch(0)], expected)


def case_tape_adasum_travels_in_16_bits(hvd):
    if hvd.size() != 2:
        raise Skip("Adasum works on powers of two, and one rank sends nothing")
    weight = tf.Variable(tf.ones([3]), name="weight")
    options = {"op": hvd.Adasum, "compression": hvd.Compression.fp16}
    step = reducing(hvd, lambda factor: tf.reduce_sum(weight * factor), [weight], **options)
    check_ways(step, [tf.constant(1 / 3)], [tf.cast(tf.cast(tf.fill([3], 1 / 3), tf.float16), tf.float32)], 1e-7)


def case_tape_at_the_end_of_the_data_nothing_is_begun(hvd):
    needs_ranks(hvd)
    weight = tf.Variable([1.0, 2.0], name="weight")
    penalised = tf.Variable(tf.fill([PART_BYTES // 4], 3.0), name="penalised")  # whose gradient is a part of its own

    @tf.function
    def step(iterator):
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


def case_tape_reading_attributes_on_one_rank_changes_nothing(hvd):
    model = Model()
    expected = of_all(hvd, model)
    for when in ("recording", "recorded"):
        tape = hvd.DistributedGradientTape(tf.GradientTape(persistent=True))
        with tape:
            loss = model.loss(batch(hvd.rank()))
            if hvd.rank() == 0 and when == "recording":
                inspect.getmembers(tape)
        if hvd.rank() == 0:
            mock.create_autospec(tape)
            assert not hasattr(tape, "nothing")
        close(tape.gradient(loss, model.weights), expected)


def case_tape_a_step_that_fails_leaves_the_next_one_whole(hvd):
    model = Model(width=600_000)
    expected = of_all(hvd, model)
    step = _failing_step(hvd, model)
    for fails in (False, True, True, False):
        if fails:
            with pytest.raises(tf.errors.InvalidArgumentError, match="asked to fail"):
                step(batch(hvd.rank()), tf.constant(True))
            _begin_a_step(hvd, model)
        else:
            close(step(batch(hvd.rank()), tf.constant(False)), expected, 1e-4)


def case_tape_a_step_that_fails_on_one_rank_is_an_error_on_all(hvd):
    needs_ranks(hvd)
    model = Model(width=600_001)  # no other case's: its plan is found by its shape
    expected = of_all(hvd, model)
    step = _failing_step(hvd, model)
    close(step(batch(hvd.rank()), tf.constant(False)), expected, 1e-4)
    failing = hvd.size() - 1

    def many_steps():
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

    def loss(x, fails):
        y = maybe_failing(x @ model.first + model.bias, fails)
        return tf.reduce_mean(tf.square(tf.tanh(y) @ model.second))

    return tf.function(reducing(hvd, loss, model.weights))


def _begin_a_step(hvd: Any, model: Model) -> None:
    """What an exception leaves behind that ends a step when the last layer's gradient is handed over."""
    if hvd.size() > 1:
        [plan] = [plan for plan in PLANS.values() if plan.slots[0].shape == model.first.shape]
        first_part, *rest = plan.parts()
        assert rest, "all gradients are handed over at once: make the model larger"
        plan.begin()
        plan.hand_over(first_part, [np.zeros(plan.slots[index].shape, np.float32) for index in first_part])
        assert plan._lane.in_flight


def case_tape_ranks_that_differ_are_told_which_variable(hvd):
    needs_ranks(hvd)
    weight = tf.Variable(tf.ones([3, 4] if hvd.rank() else [4, 3]), name="lopsided")
    for run in ways(reducing(hvd, lambda: tf.reduce_sum(weight), weight)):
        with told(HorovodInternalError, "lopsided"):
            run()


def case_tape_what_makes_no_sense_is_told(hvd):
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


def case_tape_after_shutdown_and_init_the_same_graph_goes_on(hvd):
    model = Model()
    step = tf.function(reducing(hvd, model.loss, model.weights))
    close(step(batch(hvd.rank())), of_all(hvd, model))
    hvd.barrier()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    close(step(batch(hvd.rank())), of_all(hvd, model))
