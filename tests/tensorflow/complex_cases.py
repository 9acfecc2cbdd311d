"""Complex tensors and variables: every operation and tape treats an element as a pair of real numbers."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import MismatchError
from tests.tensorflow.data import check_results, ways
from tests.told import told

COMPLEX = (np.complex64, np.complex128)


def values(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(rank)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def total(hvd: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return functools.reduce(np.add, [values(rank, shape, dtype) for rank in range(hvd.size())])


def divided(array: np.ndarray, divisor: int) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat.view(flat.real.dtype) / flat.real.dtype.type(divisor)).view(array.dtype).reshape(array.shape)


def case_complex_sums_averages_and_scatters_are_those_of_both_parts(hvd):
    size, rank = hvd.size(), hvd.rank()

    def reduce(tensor):
        return [
            hvd.allreduce(tensor, op=hvd.Sum),
            hvd.allreduce(tensor),
            tf.math.conj(hvd.allreduce(tf.math.conj(tensor), op=hvd.Sum)),
            hvd.grouped_allreduce([tensor, tf.ones(3)], op=hvd.Sum)[0],
            hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
        ]

    def scatter(tensor):
        return hvd.reducescatter(tensor, op=hvd.Sum)

    for run, scattered in zip(ways(reduce), ways(scatter), strict=True):
        for dtype, shape in itertools.product(COMPLEX, ((), (7,), (4, 3), (0, 2), (70_001,))):
            mine, summed = tf.constant(values(rank, shape, dtype)), total(hvd, shape, dtype)
            sums = summed, divided(summed, size), summed, summed, summed
            for result, expected in zip(run(mine), sums, strict=True):
                assert result.dtype == dtype
                np.testing.assert_array_equal(result, expected)
            if shape:
                np.testing.assert_array_equal(scattered(mine), np.array_split(summed, size)[rank])


def case_complex_rows_travel_as_they_are(hvd):
    size, rank = hvd.size(), hvd.rank()

    def move(tensor):
        return [hvd.allgather(tensor), hvd.broadcast(tensor, size - 1), hvd.alltoall(tensor)]

    for run in ways(move):
        for dtype, shape in itertools.product(COMPLEX, ((2 * size, 3), (10_000 * size,))):
            everyones = [values(one, shape, dtype) for one in range(size)]
            gathered, copied, exchanged = run(tf.constant(everyones[rank]))
            np.testing.assert_array_equal(gathered, np.concatenate(everyones))
            np.testing.assert_array_equal(copied, everyones[-1])
            np.testing.assert_array_equal(exchanged, np.concatenate([np.split(one, size)[rank] for one in everyones]))
    variable = tf.Variable(values(rank, (5,), np.complex64))
    hvd.broadcast_variables([variable], size - 1)
    np.testing.assert_array_equal(variable, values(size - 1, (5,), np.complex64))


def case_complex_slices_are_averaged(hvd):
    size = hvd.size()

    def average(rows):
        return hvd.allreduce(tf.IndexedSlices(rows, tf.constant([0, 4]), [5, 3])).values

    for dtype in COMPLEX:
        everyones = [values(rank, (2, 3), dtype) for rank in range(size)]
        expected = np.concatenate([divided(rows, size) for rows in everyones])
        check_results(average, [tf.constant(everyones[hvd.rank()])], expected)


def case_gradients_of_complex_tensors_follow_tensorflows_convention(hvd):
    size, rank = hvd.size(), hvd.rank()
    start, weights = values(rank, (2 * size,), np.complex64), values(9, (2 * size,), np.complex64)
    x = tf.Variable(start)
    alone = np.conj(2 * start * weights) * 1j  # of one process: of the loss imag(sum(x * x * weights))
    from_shares = np.tile(np.split(weights, size)[rank], size)
    for operate, expected in (
        (lambda y: hvd.allreduce(y, op=hvd.Sum), size * alone),
        (hvd.allreduce, alone),
        (lambda y: hvd.broadcast(y, 0), alone * (rank == 0)),
        (hvd.alltoall, np.conj(2 * start * from_shares) * 1j),
        (lambda y: hvd.allgather(y)[rank * 2 * size : (rank + 1) * 2 * size], alone / size),
    ):

        def gradient(operate=operate):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.math.imag(operate(x * x) * weights))
            return tape.gradient(loss, x)

        check_results(gradient, [], expected, 1e-5)


def case_a_tape_averages_complex_and_real_gradients(hvd):
    size, rank = hvd.size(), hvd.rank()
    first, second, real = values(1, (300, 400), np.complex64), values(2, (3,), np.complex128), np.ones(4, np.float32)
    sources = [tf.Variable(one) for one in (first, second, real)]
    factors = [values(10 + one, (3,), np.complex128) for one in range(size)]
    for codec, tolerance in ((hvd.Compression.none, 1e-6), (hvd.Compression.fp16, 1e-2)):

        def step(codec=codec):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.abs(sources[0]) ** 2) * (rank + 1.0) + tf.reduce_sum(sources[2]) * rank
                loss += tf.cast(tf.reduce_sum(tf.math.imag(sources[1] * factors[rank])), tf.float32)
            return list(hvd.DistributedGradientTape(tape, compression=codec).gradient(loss, sources))

        for run in ways(step):
            for _ in range(2):
                results = run()
                expected = [first * (size + 1), np.conj(sum(factors) / size) * 1j, real * (size - 1) / 2]
                for result, wanted, source in zip(results, expected, sources, strict=True):
                    assert result.dtype == source.dtype
                    np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


def case_what_has_no_meaning_for_complex_tensors_is_refused(hvd):
    tensor = tf.ones(4, tf.complex64)
    for op, name in ((hvd.Min, "Min"), (hvd.Max, "Max"), (hvd.Product, "Product"), (hvd.Adasum, "Adasum")):
        for run in ways(lambda one, op=op: hvd.allreduce(one, op=op)):
            with told(ValueError, f"op=hvd.{name}", "complex64", "HINT", "hvd.Sum"):
                run(tensor)
    if hvd.size() > 1:
        mine = tensor if hvd.rank() == 0 else tf.ones([4, 2])
        with told(MismatchError, "data types", "complex64", "float32"):
            hvd.allreduce(mine, name="apart")
    np.testing.assert_array_equal(hvd.allreduce(tensor, op=hvd.Sum), np.full(4, hvd.size()))
