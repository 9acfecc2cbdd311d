"""Every operation against what each rank can compute for itself, in eager execution and in graphs."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdkit import errors
from hvdkit.api.operations import HANDLES
from hvdkit.tensorflow.ops import transfers as ops_broadcast
from hvdkit.tensorflow.ops.exceptions import as_tensorflows
from hvdkit.tensorflow.ops.framework import OPERATIONS
from tests.forking import in_child
from tests.ranks import Skip
from tests.scale_factors import BOTH, PRODUCTS
from tests.tensorflow.data import (
    INTEGERS,
    MOVABLE,
    REDUCIBLE,
    SHAPES,
    all_values,
    check_equal,
    check_results,
    doubles,
    left_as_written,
    needs_ranks,
    tried_ways,
    ways,
)
from tests.told import told


def check_goes_on(hvd: Any) -> None:
    """Ranks communicate after errors as before."""
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def case_torch_is_not_there_under_mpi(hvd):
    if hvd.mpi_enabled():
        assert "torch" not in sys.modules
        assert hvd.size() == 1 or hvd.mpi_built()


def case_allreduce_gives_sum_average_min_max_and_product(hvd):
    def reduce(tensor):
        return [hvd.allreduce(tensor, op=op) for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Average)]

    for run, tried in zip(ways(reduce), tried_ways(REDUCIBLE, SHAPES), strict=True):
        for dtype, shape in tried:
            inputs = all_values(hvd.size(), shape, dtype)
            stacked = np.stack([doubles(one) for one in inputs])
            *results, average = run(inputs[hvd.rank()])
            for result, function in zip(results, (np.sum, np.min, np.max, np.prod), strict=True):
                check_equal(result, function(stacked, axis=0), dtype, shape)
            assert average.dtype == dtype
            mean = np.trunc(stacked.mean(0)) if dtype in INTEGERS else stacked.mean(0)
            np.testing.assert_allclose(doubles(average), mean, rtol=1e-2)


def case_adasum_of_equal_tensors_is_one_of_them(hvd):
    if not hvd.check_num_rank_power_of_2(hvd.size()):
        raise Skip("Adasum needs a power of two")
    tensor, unit = tf.constant([1.0, -2.0, 3.0]), tf.one_hot(hvd.rank(), 2)
    for given, expected in ((tensor, tensor), (unit, [1.0, 1.0]))[: hvd.size()]:  # and of orthogonal ones the sum
        check_results(lambda one: hvd.allreduce(one, op=hvd.Adasum), [given], expected)


def case_allreduce_scales_before_and_after(hvd):
    options = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}
    expected = np.full((3, 2), 1.5 * sum(range(1, hvd.size() + 1)))
    check_results(lambda one: hvd.allreduce(one, **options), [tf.fill([3, 2], float(hvd.rank() + 1))], expected)


def case_factors_have_horovods_rounding(hvd):
    def sums(tensor, before, after):
        options = {"op": hvd.Sum, "prescale_factor": before, "postscale_factor": after}
        scattered = [hvd.reducescatter(tensor, **options), *hvd.grouped_reducescatter([tensor, tensor], **options)]
        whole = [hvd.allreduce(tensor, **options), *hvd.grouped_allreduce([tensor, tensor], **options)]
        return [*whole, *hvd.grouped_allgather(scattered)]

    cases = [(name, *row) for name, row in BOTH.items()]
    for name, products in PRODUCTS.items():
        for element, factor, result in products:
            cases += [(name, element, factor, 1.0, result), (name, element, 1.0, factor, result)]
    for number, (name, element, before, after, result) in enumerate(cases):
        tensor = tf.cast(tf.fill([5], element if hvd.rank() == 0 else 0), name)
        expected = tf.cast(tf.constant([result] * 5, tf.float64), name)
        for got in (sums if number % 8 else tf.function(sums))(tensor, before, after):
            np.testing.assert_array_equal(got, expected, str((name, before, after)))


def case_inputs_are_left_alone_and_results_are_ones_own(hvd):
    tensor = tf.fill([1000], float(hvd.rank()))
    first = hvd.allreduce(tensor, op=hvd.Sum)
    before = first.numpy()
    second = hvd.allreduce(tensor + 1.0, op=hvd.Sum)
    np.testing.assert_array_equal(tensor, np.full(1000, hvd.rank()))
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(second, before + hvd.size())


def case_variables_and_what_becomes_a_tensor_are_reduced(hvd):
    variable = tf.Variable([1.0, 2.0])
    for run in ways(lambda: hvd.allreduce(variable, op=hvd.Sum)):
        result = run()
        variable.assign([9.0, 9.0])  # the result is not the variable's memory
        np.testing.assert_array_equal(result, np.array([1.0, 2.0]) * hvd.size())
        variable.assign([1.0, 2.0])
    np.testing.assert_array_equal(hvd.allreduce([1, 2], op=hvd.Sum), np.array([1, 2]) * hvd.size())


def case_grouped_allreduce_takes_types_shapes_and_slices_together(hvd):
    def reduce(a, b, values, indices):
        slices = tf.IndexedSlices(values, indices, dense_shape=tf.constant([7, 2]))
        first, gathered, second = hvd.grouped_allreduce([a, slices, b], op=hvd.Sum)
        return [first, tf.convert_to_tensor(gathered), second]

    for run in ways(reduce):
        first, dense, second = run(
            tf.ones([3]), tf.ones([2, 2], tf.int64), tf.fill([2, 2], 1.0 + hvd.rank()), tf.constant([0, hvd.rank() + 1])
        )
        check_equal(first, np.full(3, hvd.size()), tf.float32)
        check_equal(second, np.full((2, 2), hvd.size()), tf.int64)
        expected = np.zeros((7, 2))
        for rank in range(hvd.size()):
            expected[[0, rank + 1]] += 1 + rank
        check_equal(dense, expected, tf.float32)
    assert hvd.grouped_allreduce([]) == []


def case_slices_are_averaged(hvd):
    slices = tf.IndexedSlices(tf.fill([1, 3], float(hvd.rank())), tf.constant([1]), dense_shape=tf.constant([2, 3]))
    dense = tf.convert_to_tensor(hvd.allreduce(slices))
    np.testing.assert_allclose(dense[1], np.full(3, (hvd.size() - 1) / 2), rtol=1e-6)


def case_slices_of_integers_are_averaged_in_their_type(hvd):
    def average(values):
        return hvd.allreduce(tf.IndexedSlices(values, tf.constant([1]), dense_shape=tf.constant([2, 1]))).values

    size = hvd.size()
    for run in ways(average):
        for dtype in (one for one in MOVABLE if one.is_integer):
            # Beyond 53 bits, where float64 has no odd numbers; and less than nothing, which is rounded towards it.
            for value in (7, dtype.max) if dtype.is_unsigned else (7, -7, dtype.max):
                values = run(tf.constant([[value]], dtype))
                assert values.dtype == dtype
                assert values.numpy().tolist() == [[abs(value) // size * (1 if value > 0 else -1)]] * size


def case_allgather_concatenates_rows_however_many(hvd):
    for run in ways(lambda tensor: hvd.allgather(tensor)):
        for dtype in MOVABLE:
            rows = [tf.cast(tf.reshape(tf.range(2 * rank) % 3, [rank, 2]), dtype) for rank in range(hvd.size())]
            check_equal(run(rows[hvd.rank()]), doubles(tf.concat(rows, 0)), dtype)
    for run in ways(lambda a, b: hvd.grouped_allgather([a, b])):
        first, second = run(tf.fill([2], hvd.rank()), tf.fill([hvd.rank(), 1], 1.5))
        np.testing.assert_array_equal(first, np.repeat(np.arange(hvd.size()), 2))
        assert second.shape == (sum(range(hvd.size())), 1)


def case_broadcast_gives_all_the_roots_tensor(hvd):
    for root in range(hvd.size()):
        both = ways(lambda tensor, root=root: hvd.broadcast(tensor, root))
        for run, tried in zip(both, tried_ways(MOVABLE, ((), (0,), (3, 2))), strict=True):
            for dtype, shape in tried:
                inputs = all_values(hvd.size(), shape, dtype)
                check_equal(run(inputs[hvd.rank()]), doubles(inputs[root]), dtype, root, shape)


def case_the_gradient_of_a_broadcast_in_a_graph_comes_to_the_root_though_others_do_not_use_it(hvd):
    run = tf.function(lambda tensor: hvd.broadcast(tensor, 0))
    variable = tf.Variable([1.0, 2.0])
    for _ in range(2):
        with tf.GradientTape() as tape:  # outside of the function: its backward pass is a graph of its own
            loss = tf.reduce_sum(run(variable)) * (hvd.rank() + 1.0)
        expected = (hvd.size() + 1) / 2 if hvd.rank() == 0 else 0.0
        np.testing.assert_array_equal(tape.gradient(loss, variable), [expected] * 2)


def case_alltoall_sends_rows_to_each(hvd):
    size, rank = hvd.size(), hvd.rank()
    splits = [[(sender + to) % 3 for to in range(size)] for sender in range(size)]
    rows = [np.arange(2 * sum(counts)).reshape(-1, 2) + 100 * sender for sender, counts in enumerate(splits)]
    expected = [np.split(rows[sender], np.cumsum(splits[sender]))[rank] for sender in range(size)]
    for run in ways(lambda tensor: hvd.alltoall(tensor, splits=splits[rank])):
        output, received = run(tf.constant(rows[rank], tf.int32))
        np.testing.assert_array_equal(output, np.concatenate(expected))
        np.testing.assert_array_equal(received, [counts[rank] for counts in splits])
    check_results(hvd.alltoall, [tf.fill([size], rank)], np.arange(size))


def case_reducescatter_gives_each_its_rows(hvd):
    inputs = all_values(hvd.size(), (2 * hvd.size() + 1, 3), tf.float32)
    total = sum(doubles(one) for one in inputs)
    mine = np.array_split(total, hvd.size())[hvd.rank()]
    check_results(lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum), [inputs[hvd.rank()]], mine)
    check_results(lambda one: hvd.grouped_reducescatter([one, one]), [inputs[hvd.rank()]], [mine / hvd.size()] * 2)


def gradient_of(function: Any, tensor: Any) -> Any:
    """The gradient of a function's first result, whose elements are weighed by their places."""
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        output = tf.reshape(tf.nest.flatten(function(tensor))[0], [-1])
        loss = tf.reduce_sum(output * tf.cast(tf.range(1, tf.size(output) + 1), output.dtype))
    return tape.gradient(loss, tensor)


def case_operations_have_gradients(hvd):
    size, rank = hvd.size(), hvd.rank()
    weights, own_places = np.arange(1, 5, dtype=np.float32), np.array([2 * rank + 1, 2 * rank + 2])

    def with_integers(tensor):
        return hvd.grouped_allgather([tensor, tf.constant([1]), tf.constant([True])])

    def sum_of_slices(values):
        return hvd.allreduce(tf.IndexedSlices(values, tf.constant([0]), tf.constant([3, 2])), op=hvd.Sum).values

    for function, tensor, expected in (
        (lambda one: hvd.allreduce(one, op=hvd.Sum), tf.ones([4]), weights * size),
        (lambda one: hvd.allreduce(one), tf.ones([4]), weights),
        (lambda one: hvd.grouped_allreduce([one, one * 2], op=hvd.Sum)[1], tf.ones([4]), 2 * weights * size),
        (lambda one: hvd.broadcast(one, 0), tf.ones([4]), weights if rank == 0 else 0 * weights),
        (lambda one: hvd.allgather(one), tf.ones([2]), own_places),
        # What this rank sent to each was weighed by its place there.
        (lambda one: hvd.alltoall(one), tf.fill([size], 2.0), np.full(size, rank + 1)),
        (lambda one: hvd.reducescatter(one, op=hvd.Sum), tf.ones([2 * size]), np.tile([1, 2], size) * size),
        (with_integers, tf.ones([2]), own_places),
        (sum_of_slices, tf.ones([1, 2]), [own_places]),
    ):
        check_results(lambda one, function=function: gradient_of(function, one), [tensor], expected)
    # TensorFlow makes a backward function for a tape that is outside.
    np.testing.assert_allclose(gradient_of(tf.function(with_integers), tf.ones([2])), own_places)
    np.testing.assert_allclose(gradient_of(tf.function(sum_of_slices), tf.ones([1, 2])), [own_places])


def case_gradients_of_gradients(hvd):
    x = tf.constant([2.0, 3.0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(x**3, op=hvd.Average))
        first = inner.gradient(loss, x)
    np.testing.assert_allclose(outer.gradient(first, x), 6 * x.numpy(), rtol=1e-6)


def case_gradients_of_many_operations_from_outside_of_the_function(hvd):
    """TensorFlow orders nothing in the backward function that an eager tape makes of a function."""

    @tf.function
    def many(tensor):
        return [hvd.allreduce(part, op=hvd.Sum) for part in tf.split(tensor, 20)]

    for _ in range(3):
        tensor = tf.random.uniform([20, 100])
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            outputs = many(tensor)
        np.testing.assert_array_equal(tape.gradient(outputs, tensor), np.full((20, 100), hvd.size()))


def case_functions_in_functions_stay_in_order(hvd):
    weights = tf.Variable(tf.ones([100]))

    @tf.function
    def metric(tensor):  # reads a variable, which is all that TensorFlow orders by
        return hvd.allreduce(tensor * weights, op=hvd.Sum)

    @tf.function
    def several(tensor):
        found = [metric(tensor * float(factor)) for factor in range(8)]
        for _ in tf.range(20):
            found[0] = hvd.allreduce(found[0] + 1.0)
        for _ in tf.range(3):
            found[0] += hvd.allreduce(tensor * weights, op=hvd.Sum)
        if tf.reduce_sum(tensor) > 0:
            found[1] += hvd.allreduce(weights, op=hvd.Sum)
        return found

    for _ in range(5):
        first, *others = several(tf.ones([100]))
        np.testing.assert_allclose(first, np.full(100, 20 + 3 * hvd.size()))
        for factor, result in zip([2, 2, 3, 4, 5, 6, 7], others, strict=True):
            np.testing.assert_array_equal(result, np.full(100, hvd.size() * factor))


def case_what_is_captured_has_the_same_name_on_all_ranks(hvd):
    for _ in range(50 * hvd.rank()):
        tf.constant(1.0) + 1.0  # each rank has made another number of tensors
    outside = tf.constant([1.0, 2.0])
    np.testing.assert_array_equal(tf.function(lambda: hvd.allreduce(outside))(), [1, 2])


def case_compression_of_operations(hvd):
    tensor = tf.cast(tf.sin(tf.range(5000.0) * (hvd.rank() + 1)), tf.float32)
    exact = doubles(hvd.allreduce(tensor))
    for compression, far in ((hvd.Compression.fp16, 1e-2), (hvd.Compression.bf16, 3e-2), (hvd.Compression.int8, 3e-2)):
        for run in ways(lambda one, compression=compression: hvd.allreduce(one, compression=compression)):
            result = run(tensor)
            assert result.dtype == tf.float32
            assert np.abs(doubles(result) - exact).max() < far, compression


def case_who_am_i_when_the_graph_runs(hvd):
    def ask():
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op(9)]

    for run in ways(ask):
        answers = [int(one) for one in run()]
        assert answers == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), -2], answers
    with told(ValueError, "size_op: process_set_id must be the id of a process set (0", "got 7"):
        hvd.size_op(7)


def case_variables_become_those_of_the_root(hvd):
    variables = [tf.Variable(tf.fill([3], float(hvd.rank()))), tf.Variable(hvd.rank(), dtype=tf.int64)]
    for root, given in ((hvd.size() - 1, variables), (0, iter(variables)), (0, (one for one in variables))):
        for variable in variables:
            variable.assign(tf.fill(variable.shape, tf.cast(hvd.rank(), variable.dtype)))
        hvd.broadcast_variables(given, root_rank=root)
        assert all(np.all(variable.numpy() == root) for variable in variables)
    with told(TypeError, "broadcast_variables: variables[1] must be a variable, got 3.0"):
        hvd.broadcast_variables([variables[0], 3.0], root_rank=0)


def case_many_variables_are_broadcast_in_chunks(hvd):
    sizes = (5, 300, 1, 300, 300, 2)
    variables = [tf.Variable(tf.fill([size], float(hvd.rank() + index))) for index, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops_broadcast, "CHUNK_BYTES", 2500)
        assert [len(chunk) for chunk in ops_broadcast._chunks(variables)] == [4, 2]
        for name in (None, "variables"):
            ops_broadcast.broadcast_(variables, hvd.size() - 1, name)
            for index, variable in enumerate(variables):
                assert (variable.numpy() == hvd.size() - 1 + index).all()
                variable.assign(variable + (hvd.rank() - hvd.size() + 1.0))


def case_objects_travel(hvd):
    assert hvd.broadcast_object({"rank": hvd.rank()}, 0) == {"rank": 0}
    assert hvd.broadcast_object_fn(0)([hvd.rank()]) == [0]
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]


def case_wrong_arguments_are_told(hvd):
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    dense = "HINT: use tf.convert_to_tensor(), tf.sparse.to_dense(), or gather values and indices separately."
    for wrong, error, *texts in (
        (lambda: hvd.allreduce("text"), ValueError, "string"),
        (lambda: hvd.allreduce(object()), TypeError, "tf.Tensor"),
        (lambda: hvd.allreduce(tf.ones(2), op=99), ValueError, "op must be one of"),
        (lambda: hvd.allreduce(tf.ones(2), average=True, op=hvd.Sum), ValueError, "supersedes"),
        (lambda: hvd.allreduce(tf.constant([True])), ValueError, "got bool"),
        (lambda: hvd.allreduce(tf.ones(2), name=3), TypeError, "name must be a string"),
        (lambda: hvd.allgather(rows), ValueError, f"allgather: tensor must be dense, got a tf.IndexedSlices\n{dense}"),
        (
            lambda: hvd.allreduce(rows, op=hvd.Max),
            NotImplementedError,
            "allreduce: hvd.Max is not supported for tf.IndexedSlices, only Sum and Average.\n"
            "HINT: use sparse_as_dense=True, or tf.convert_to_tensor().",
        ),
        (
            lambda: hvd.allreduce(rows, op=hvd.Sum, prescale_factor=2.0),
            NotImplementedError,
            "allreduce: prescale_factor and postscale_factor are not supported for tf.IndexedSlices",
        ),
        (lambda: hvd.allgather(tf.constant(1.0)), ValueError, "at least one dimension"),
        (lambda: hvd.broadcast(tf.ones(2), 77), ValueError, "root"),
        (lambda: hvd.alltoall(tf.ones(2), splits=[0.5]), ValueError, "integers"),
        (lambda: hvd.alltoall(tf.ones(2), splits=[1] * (hvd.size() + 1)), ValueError, "one entry for each worker"),
        (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Max), ValueError, "op must be one of"),
        (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum), ValueError, "op must be one of"),
        (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum), RuntimeError, "op must be one of", "hvd.Adasum"),
        (tf.function(lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum)), RuntimeError, "hvd.Adasum"),
        (lambda: hvd.grouped_reducescatter([tf.ones(2)], op=hvd.Adasum), RuntimeError, "op must be one of"),
        (lambda: hvd.allreduce(tf.ones(2), compression=3), TypeError, "compression must be one of"),
        (lambda: hvd.allreduce(tf.ones(2), compression=hvd.Compression.dgc), ValueError, "DistributedOptimizer"),
        (lambda: hvd.broadcast_([tf.ones(2)], 0), TypeError, "tf.Variable"),
        (lambda: hvd.broadcast_global_variables(0), RuntimeError, "does not support eager execution"),
    ):
        with told(error, *texts):
            wrong()
    with told(
        ValueError, "TensorFlowKerasState: the model is not built.", "HINT: call model.build(input_shape) first."
    ):
        hvd.elastic.TensorFlowKerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))


def case_exceptions_come_out_of_graphs_as_they_are(hvd):
    needs_ranks(hvd)
    for run in ways(lambda tensor: hvd.allreduce(tensor, name="mismatched")):
        with told(errors.HorovodInternalError, "mismatched", "rank 1"):
            run(tf.ones([2 + hvd.rank()]))
    for run in ways(lambda tensor: hvd.alltoall(tensor, splits=tf.fill([hvd.size()], 100))):
        for kind in (ValueError, tf.errors.InvalidArgumentError):
            with told(kind, "sum of splits"):
                run(tf.ones([2]))
    data = tf.data.Dataset.from_tensors(tf.ones([2 + hvd.rank()])).map(lambda one: hvd.allreduce(one, name="in.map"))
    with told(errors.HorovodInternalError, "in.map", "rank 1"):
        list(data)
    check_goes_on(hvd)


def case_ranks_that_disagree_get_tensorflows_error_that_horovod_raised(hvd):
    needs_ranks(hvd)
    variable = tf.Variable(tf.zeros([2 + hvd.rank()]), name="clash")

    def train(_):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable])[0]

    for operation in (
        lambda tensor: hvd.allreduce(tensor, name="clash"),
        lambda tensor: hvd.broadcast(tensor, hvd.rank(), name="clash"),
        lambda tensor: hvd.allgather(tf.cast(tensor, tf.int32 if hvd.rank() else tf.int64), name="clash"),
        train,
    ):
        for run in ways(operation):
            with told(errors.MismatchError, "clash", "rank 1") as caught:
                run(tf.ones([2 + hvd.rank()]))
            assert isinstance(caught.value, tf.errors.FailedPreconditionError)
    check_goes_on(hvd)


def case_errors_are_of_both_libraries(hvd):
    lost = errors.PeerLostError("rank 7 is lost", 7)
    for error, kind, code in (
        (lost, tf.errors.UnknownError, tf.errors.UNKNOWN),
        (errors.StallError("x stalled"), tf.errors.UnknownError, tf.errors.UNKNOWN),
        (errors.HorovodInternalError("shut down"), tf.errors.UnknownError, tf.errors.UNKNOWN),
        (errors.DuplicateNameError("x twice"), tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
        (errors.MismatchError("shapes"), tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
        (errors.NotInitializedError(), tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    ):
        made = as_tensorflows(error)
        as_keras_does = type(made)(made.node_def, made.op, made.message, made.error_code)
        for one in (made, as_tensorflows(made), as_keras_does, pickle.loads(pickle.dumps(made))):  # noqa: S301 (our own)
            assert isinstance(one, type(error))
            assert isinstance(one, kind)
            assert (str(one), one.message, one.error_code) == (str(error), str(error), code)
            assert repr(one) == repr(error)
    assert pickle.loads(pickle.dumps(as_tensorflows(lost))).rank == as_tensorflows(lost).rank == 7  # noqa: S301
    assert as_tensorflows(unrelated := RuntimeError("x")) is unrelated


def case_splits_that_are_wrong_on_one_rank_are_an_error_on_all(hvd):
    size, last = hvd.size(), hvd.size() - 1
    needs_ranks(hvd)
    for wrong, kind, text in (
        ([-1] * size, ValueError, "splits must not be negative"),
        ([1] * (size + 1), ValueError, "splits must have one entry for each worker"),
        ([100] * size, ValueError, "sum of splits entries is greater"),
        ([0.5] * size, ValueError, "splits must hold integers"),
        ([[1] * size], ValueError, "splits must have one dimension"),
        ([object()], TypeError, "splits must be a list"),
        (None, ValueError, "not an even multiple"),
    ):
        rows = tf.ones([2 * size + 1 if wrong is None else 2 * size, 2])
        splits = wrong if hvd.rank() == last else [2] * size
        for name in ("clash.splits", None):
            for run in ways(lambda tensor, splits=splits, name=name: hvd.alltoall(tensor, splits=splits, name=name)):
                with told(kind if hvd.rank() == last else errors.HorovodInternalError, text) as caught:
                    run(rows)
                assert hvd.rank() == last or f"rank {last}" in str(caught.value)
    assert hvd.alltoall(tf.ones([2 * size]), splits=[2] * size, name="clash.splits")[0].shape == (2 * size,)


def case_splits_of_some_ranks_leave_the_name_in_a_graph_as_it_is(hvd):
    size, rank = hvd.size(), hvd.rank()

    def scatter(tensor):
        splits = [1] * size if rank == 0 else tf.ones([size], tf.int64) if rank == 1 else None
        return hvd.alltoall(tensor, splits=splits)[0] if rank < 2 else hvd.alltoall(tensor)

    check_results(scatter, [tf.fill([size], rank)], np.arange(size))


def case_a_shutdown_by_another_thread_is_told(hvd):
    start = OPERATIONS.allgather

    def start_and_forget(*arguments):
        number = start(*arguments)
        HANDLES.synchronize(number)  # forgotten between the two halves of the operation, as shutdown() forgets it
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OPERATIONS, "allgather", start_and_forget)
        for name in ("forgotten", None):
            for run in ways(lambda tensor, name=name: hvd.allgather(tensor, name=name)):
                with told(errors.HorovodInternalError, name or "llgather", "shutdown() was called"):
                    run(tf.ones(2))
    check_goes_on(hvd)


def case_forked_children_ask_and_communicate_nothing(hvd):
    questions = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_initialized)
    expected = [question() for question in questions]
    tensor, indices = tf.ones([2 * hvd.size()]), tf.constant([0])
    variable = tf.Variable(tensor)
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(variable)
    tape = hvd.DistributedGradientTape(recorded)
    calls = (
        lambda: hvd.allreduce(tensor),
        lambda: hvd.grouped_allreduce([tensor]),
        lambda: hvd.allreduce(tf.IndexedSlices(tensor[:1], indices)),
        lambda: hvd.allgather(tensor),
        lambda: hvd.broadcast(tensor, 0),
        lambda: hvd.alltoall(tensor),
        lambda: hvd.reducescatter(tensor),
        lambda: hvd.broadcast_variables([variable], 0),
        lambda: hvd.broadcast_object(1, 0),
        lambda: tape.gradient(loss, [variable]),
        hvd.join,
        hvd.barrier,
    )

    def check():
        assert [question() for question in questions] == expected
        assert int(hvd.rank_op()) == hvd.rank()
        assert int(hvd.process_set_included_op(0)) == 1
        for call in calls if hvd.size() > 1 else calls[:-3]:  # where a rank alone reduces nothing
            with told(errors.HorovodInternalError, f"forked from rank {hvd.rank()} ", "HINT"):
                call()
        hvd.shutdown()
        assert not hvd.is_initialized()

    in_child(check)
    check_goes_on(hvd)


def case_autograph_leaves_operations_as_they_are_written(hvd):
    variable, rows = tf.Variable(tf.ones(2), name="as_written"), tf.ones(hvd.size())

    @tf.function
    def everything(tensor):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allreduce(variable * tensor))
        tape = hvd.DistributedGradientTape(tape)
        hvd.broadcast_([variable], 0)
        hvd.broadcast_variables([variable], 0)
        return [
            tape.gradient(loss, [variable]),
            hvd.grouped_allreduce([tensor]),
            hvd.broadcast(tensor, 0),
            hvd.allgather(tensor),
            hvd.grouped_allgather([tensor]),
            hvd.alltoall(rows),
            hvd.reducescatter(tensor),
            hvd.grouped_reducescatter([tensor]),
            [hvd.size_op(), hvd.local_size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.process_set_included_op()],
        ]

    with left_as_written():
        everything(tf.ones(2))


def case_jit_compile_is_told_what_to_do(hvd):
    with told(NotImplementedError, "HINT", "jit_compile=False"):
        tf.function(lambda tensor: hvd.allreduce(tensor), jit_compile=True)(tf.ones([2]))


def case_process_sets(hvd):
    needs_ranks(hvd, 3)
    firsts = hvd.add_process_set([0, 1])

    @tf.function
    def only_firsts(one):
        if hvd.process_set_included_op(firsts.process_set_id) == 1:
            one = hvd.allreduce(one, op=hvd.Sum, process_set=firsts)
        return one

    np.testing.assert_array_equal(only_firsts(tf.ones(2)), np.full(2, 2 if firsts.included() else 1))
    if not firsts.included():
        with told(ValueError, "not a member"):
            tf.function(lambda one: hvd.allreduce(one, process_set=firsts))(tf.ones(2))
    else:
        check_results(lambda one: hvd.allreduce(one, op=hvd.Sum, process_set=firsts), [tf.ones(2)], [2.0, 2.0])
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]), tf.constant([2, 2]))
        average = hvd.allreduce(slices, process_set=firsts)  # of the set's two ranks
        np.testing.assert_array_equal(tf.convert_to_tensor(average), np.full((2, 2), 0.5))
    hvd.remove_process_set(firsts)


def case_join_lets_others_go_on(hvd):
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(tf.ones(2), op=hvd.Sum, name="uneven")
    assert 0 <= int(hvd.join()) < hvd.size()


def case_in_a_graph_all_waits_for_the_data(hvd):
    """At the end of an iterator TensorFlow runs all that does not wait for the next element."""
    weight = tf.Variable([1.0, 2.0])

    def twice(iterator):
        return hvd.allreduce(weight + 0.0 * next(iterator)), next(iterator), hvd.allgather(weight)

    for operation in (
        twice,
        lambda iterator: (next(iterator), hvd.allreduce(weight)),
        lambda iterator: (next(iterator), hvd.broadcast_variables([weight], root_rank=0)),
        lambda iterator: (next(iterator), hvd.join()),
    ):
        iterator = iter(tf.data.Dataset.from_tensors(tf.zeros([2])))
        graph = tf.function(operation).get_concrete_function(iterator).graph
        elements = [one for one in graph.get_operations() if one.type == "IteratorGetNext"]
        begun = [one for one in graph.get_operations() if one.name.startswith(("hvdkit_begin", "hvdkit_join"))]
        assert len(begun) == len(elements) > 0
        for one, element in zip(begun, elements, strict=True):
            assert element in ancestors_of(one)


def ancestors_of(operation: Any) -> set[Any]:
    """All that an operation of a graph waits for."""
    found: set[Any] = set()
    left = [operation]
    while left:
        one = left.pop()
        before = {*one.control_inputs, *(tensor.op for tensor in one.inputs)} - found
        found |= before
        left += before
    return found
