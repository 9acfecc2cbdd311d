"""Every operation against what each rank can compute for itself, in eager execution and in graphs."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvdkit.errors import (
    DuplicateNameError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    StallError,
)
from hvdkit.tensorflow.ops import broadcast as ops_broadcast
from hvdkit.tensorflow.ops.exceptions import as_tensorflows
from tests.forking import in_child
from tests.scale_factors import BOTH, PRODUCTS
from tests.tensorflow.data import (
    INTEGERS,
    MOVABLE,
    REDUCIBLE,
    SHAPES,
    all_values,
    check_equal,
    doubles,
    needs_ranks,
    tried_ways,
    ways,
)
from tests.told import told


def case_torch_is_not_there_under_mpi(hvd: Any) -> None:
    if hvd.mpi_enabled():
        assert "torch" not in sys.modules
        assert hvd.size() == 1 or hvd.mpi_built()


def case_allreduce_gives_sum_average_min_max_and_product(hvd: Any) -> None:
    def reduce(tensor: Any) -> list[Any]:
        return [hvd.allreduce(tensor, op=op) for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Average)]

    for run, tried in zip(ways(reduce), tried_ways(REDUCIBLE, SHAPES), strict=True):
        for dtype, shape in tried:
            inputs = all_values(hvd.size(), shape, dtype)
            stacked = np.stack([doubles(one) for one in inputs])
            *results, average = run(inputs[hvd.rank()])
            for result, expected in zip(
                results, (stacked.sum(0), stacked.min(0), stacked.max(0), stacked.prod(0)), strict=True
            ):
                check_equal(result, expected, dtype, shape)
            assert average.dtype == dtype
            mean = np.trunc(stacked.mean(0)) if dtype in INTEGERS else stacked.mean(0)
            np.testing.assert_allclose(doubles(average), mean, rtol=1e-2)


def case_factors_have_horovods_rounding(hvd: Any) -> None:
    def sums(tensor: Any, before: float, after: float) -> list[Any]:
        options = {"op": hvd.Sum, "prescale_factor": before, "postscale_factor": after}
        scattered = [hvd.reducescatter(tensor, **options), *hvd.grouped_reducescatter([tensor, tensor], **options)]
        return [
            hvd.allreduce(tensor, **options),
            *hvd.grouped_allreduce([tensor, tensor], **options),
            *hvd.grouped_allgather(scattered),
        ]

    rows = [(name, *row) for name, products in PRODUCTS.items() for row in products]
    cases = [
        (name, one, before, after, result)
        for name, one, factor, result in rows
        for before, after in ((factor, 1.0), (1.0, factor))
    ]
    cases += [(name, *row) for name, row in BOTH.items()]
    for number, (name, element, before, after, result) in enumerate(cases):
        tensor = tf.cast(tf.fill([5], element if hvd.rank() == 0 else 0), name)
        run = sums if number % 8 else tf.function(sums)
        for got in run(tensor, before, after):
            np.testing.assert_array_equal(
                got, tf.cast(tf.constant([result] * 5, tf.float64), name), str((name, before, after))
            )


def case_variables_and_what_becomes_a_tensor_are_reduced(hvd: Any) -> None:
    variable = tf.Variable([1.0, 2.0])
    for run in ways(lambda: hvd.allreduce(variable, op=hvd.Sum)):
        result = run()
        variable.assign([9.0, 9.0])  # the result is not the variable's memory
        np.testing.assert_array_equal(result, np.array([1.0, 2.0]) * hvd.size())
        variable.assign([1.0, 2.0])
    np.testing.assert_array_equal(hvd.allreduce([1, 2], op=hvd.Sum), np.array([1, 2]) * hvd.size())


def case_grouped_allreduce_takes_types_shapes_and_slices_together(hvd: Any) -> None:
    def reduce(a: Any, b: Any, values: Any, indices: Any) -> list[Any]:
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


def case_slices_of_integers_are_averaged_in_their_type(hvd: Any) -> None:
    def average(values: Any) -> Any:
        return hvd.allreduce(tf.IndexedSlices(values, tf.constant([1]), dense_shape=tf.constant([2, 1]))).values

    size = hvd.size()
    for run in ways(average):
        for dtype in (one for one in MOVABLE if one.is_integer):
            # Beyond 53 bits, where float64 has no odd numbers; and less than nothing, which is rounded towards it.
            for value in (7, dtype.max) if dtype.is_unsigned else (7, -7, dtype.max):
                values = run(tf.constant([[value]], dtype))
                assert values.dtype == dtype
                assert values.numpy().tolist() == [[abs(value) // size * (1 if value > 0 else -1)]] * size


def case_allgather_concatenates_rows_however_many(hvd: Any) -> None:
    for run in ways(lambda tensor: hvd.allgather(tensor)):
        for dtype in MOVABLE:
            rows = [tf.cast(tf.reshape(tf.range(2 * rank) % 3, [rank, 2]), dtype) for rank in range(hvd.size())]
            check_equal(run(rows[hvd.rank()]), doubles(tf.concat(rows, 0)), dtype)


def case_broadcast_gives_all_the_roots_tensor(hvd: Any) -> None:
    for root in range(hvd.size()):
        both = ways(lambda tensor, root=root: hvd.broadcast(tensor, root))
        for run, tried in zip(both, tried_ways(MOVABLE, ((), (0,), (3, 2))), strict=True):
            for dtype, shape in tried:
                inputs = all_values(hvd.size(), shape, dtype)
                check_equal(run(inputs[hvd.rank()]), doubles(inputs[root]), dtype, root, shape)


def case_alltoall_sends_rows_to_each(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    splits = [(rank + to) % 3 for to in range(size)]
    mine = tf.reshape(tf.range(2 * sum(splits)) + 100 * rank, [-1, 2])
    expected, counts = [], []
    for sender in range(size):
        theirs = [(sender + to) % 3 for to in range(size)]
        begin = sum(theirs[:rank])
        rows = np.arange(2 * sum(theirs)).reshape(-1, 2) + 100 * sender
        expected.append(rows[begin : begin + theirs[rank]])
        counts.append(theirs[rank])
    for run in ways(lambda tensor: hvd.alltoall(tensor, splits=splits)):
        output, received = run(mine)
        np.testing.assert_array_equal(output, np.concatenate(expected))
        np.testing.assert_array_equal(received, counts)
    for run in ways(lambda tensor: hvd.alltoall(tensor)):
        np.testing.assert_array_equal(run(tf.fill([size], rank)), np.arange(size))


def case_reducescatter_gives_each_its_rows(hvd: Any) -> None:
    rows = 2 * hvd.size() + 1
    inputs = all_values(hvd.size(), (rows, 3), tf.float32)
    total = sum(doubles(one) for one in inputs)
    begins = [sum(2 + (one < 1) for one in range(rank)) for rank in range(hvd.size() + 1)]
    mine = total[begins[hvd.rank()] : begins[hvd.rank() + 1]]
    for run in ways(
        lambda tensor: (hvd.reducescatter(tensor, op=hvd.Sum), hvd.grouped_reducescatter([tensor, tensor]))
    ):
        one, (average, same) = run(inputs[hvd.rank()])
        np.testing.assert_allclose(one, mine)
        np.testing.assert_allclose(average, mine / hvd.size(), rtol=1e-6)
        np.testing.assert_array_equal(average, same)


def gradient_of(function: Any, tensor: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        output = function(tensor)
        loss = tf.reduce_sum(output * tf.cast(tf.range(1, tf.size(output) + 1), output.dtype))
    return tape.gradient(loss, tensor)


def case_operations_have_gradients(hvd: Any) -> None:
    size, rank = hvd.size(), hvd.rank()
    weights = np.arange(1, 5, dtype=np.float32)
    even = tf.fill([size], 2.0)
    for function, tensor, expected in (
        (lambda one: hvd.allreduce(one, op=hvd.Sum), tf.ones([4]), weights * size),
        (lambda one: hvd.allreduce(one), tf.ones([4]), weights),
        (lambda one: hvd.grouped_allreduce([one, one * 2], op=hvd.Sum)[1], tf.ones([4]), 2 * weights * size),
        (lambda one: hvd.broadcast(one, 0), tf.ones([4]), weights if rank == 0 else 0 * weights),
        (lambda one: hvd.allgather(one), tf.ones([2]), np.array([2 * rank + 1, 2 * rank + 2])),
        (lambda one: hvd.alltoall(one), even, None),
        (lambda one: hvd.reducescatter(one, op=hvd.Sum), tf.ones([2 * size]), np.tile([1, 2], size) * size),
    ):
        for run in ways(lambda one, function=function: gradient_of(function, one)):
            gradient = run(tensor)
            if expected is None:  # what this rank sent to each was weighed by its place there
                expected = np.full(size, rank + 1)
            np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def case_gradients_of_many_operations_from_outside_of_the_function(hvd: Any) -> None:
    """TensorFlow orders nothing in the backward function that an eager tape makes of a function."""

    @tf.function
    def many(tensor: Any) -> list[Any]:
        return [hvd.allreduce(part, op=hvd.Sum) for part in tf.split(tensor, 20)]

    for _ in range(3):
        tensor = tf.random.uniform([20, 100])
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            outputs = many(tensor)
        np.testing.assert_array_equal(tape.gradient(outputs, tensor), np.full((20, 100), hvd.size()))


def case_gradients_of_groups_with_integers_in_them(hvd: Any) -> None:
    @tf.function
    def gather(tensor: Any) -> list[Any]:
        return hvd.grouped_allgather([tensor, tf.constant([1]), tf.constant([True])])

    tensor = tf.ones([2])
    for run in (gather, gather.python_function):
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            gathered = run(tensor)
        np.testing.assert_array_equal(tape.gradient(gathered[0], tensor), [1, 1])


def case_functions_in_functions_stay_in_order(hvd: Any) -> None:
    weights = tf.Variable(tf.ones([100]))

    @tf.function
    def metric(tensor: Any) -> Any:  # reads a variable, which is all that TensorFlow orders by
        return hvd.allreduce(tensor * weights, op=hvd.Sum)

    @tf.function
    def several(tensor: Any) -> list[Any]:
        found = [metric(tensor * float(factor)) for factor in range(8)]
        for _ in tf.range(3):
            found[0] += hvd.allreduce(tensor * weights, op=hvd.Sum)
        if tf.reduce_sum(tensor) > 0:
            found[1] += hvd.allreduce(weights, op=hvd.Sum)
        return found

    for _ in range(5):
        expected = [3, 2, 2, 3, 4, 5, 6, 7]
        for factor, result in zip(expected, several(tf.ones([100])), strict=True):
            np.testing.assert_array_equal(result, np.full(100, hvd.size() * factor))


def case_what_is_captured_has_the_same_name_on_all_ranks(hvd: Any) -> None:
    for _ in range(50 * hvd.rank()):
        tf.constant(1.0) + 1.0  # each rank has made another number of tensors
    outside = tf.constant([1.0, 2.0])
    np.testing.assert_array_equal(tf.function(lambda: hvd.allreduce(outside))(), [1, 2])


def case_who_am_i_when_the_graph_runs(hvd: Any) -> None:
    def ask() -> list[Any]:
        return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op(9)]

    for run in ways(ask):
        answers = [int(one) for one in run()]
        assert answers == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), -2], answers
    with told(ValueError, "size_op: process_set_id must be that of a process set (0", "got 7"):
        hvd.size_op(7)


def case_variables_become_those_of_the_root(hvd: Any) -> None:
    root = hvd.size() - 1
    sizes = (5, 300, 1, 300, 300, 2)
    for chunk_bytes in (ops_broadcast.CHUNK_BYTES, 2500):
        variables = [tf.Variable(tf.fill([size], float(hvd.rank() + index))) for index, size in enumerate(sizes)]
        integer = tf.Variable(hvd.rank(), dtype=tf.int64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops_broadcast, "CHUNK_BYTES", chunk_bytes)
            hvd.broadcast_variables(iter([*variables, integer]), root_rank=root)
        assert all((one.numpy() == root + index).all() for index, one in enumerate(variables))
        assert int(integer) == root
    with told(TypeError, "broadcast_variables: variables[1] must be a variable, got 3.0"):
        hvd.broadcast_variables([variables[0], 3.0], root_rank=0)


def case_objects_travel(hvd: Any) -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, 0) == {"rank": 0}
    assert hvd.broadcast_object_fn(0)([hvd.rank()]) == [0]
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]


def case_wrong_arguments_are_told(hvd: Any) -> None:
    for wrong, error, *texts in (
        (lambda: hvd.allreduce("text"), ValueError, "string"),
        (lambda: hvd.allreduce(object()), TypeError, "tf.Tensor"),
        (lambda: hvd.allreduce(tf.ones(2), op=99), ValueError, "op must be one of"),
        (lambda: hvd.allreduce(tf.ones(2), average=True, op=hvd.Sum), ValueError, "supersedes"),
        (lambda: hvd.allreduce(tf.constant([True])), ValueError, "got bool"),
        (lambda: hvd.allreduce(tf.ones(2), name=3), TypeError, "name must be a string"),
        (lambda: hvd.allgather(tf.constant(1.0)), ValueError, "at least one dimension"),
        (lambda: hvd.broadcast(tf.ones(2), 77), ValueError, "root"),
        (lambda: hvd.alltoall(tf.ones(2), splits=[0.5]), ValueError, "integers"),
        (lambda: hvd.alltoall(tf.ones(2), splits=[1] * (hvd.size() + 1)), ValueError, "one entry for each worker"),
        (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Max), ValueError, "op must be one of"),
        (lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum), RuntimeError, "op must be one of", "hvd.Adasum"),
        (tf.function(lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum)), RuntimeError, "hvd.Adasum"),
        (lambda: hvd.allreduce(tf.ones(2), compression=3), TypeError, "compression must be one of"),
        (lambda: hvd.allreduce(tf.ones(2), compression=hvd.Compression.dgc), ValueError, "DistributedOptimizer"),
        (lambda: hvd.broadcast_([tf.ones(2)], 0), TypeError, "tf.Variable"),
        (lambda: hvd.broadcast_global_variables(0), RuntimeError, "does not support eager execution"),
    ):
        with told(error, *texts):
            wrong()


def case_exceptions_come_out_of_graphs_as_they_are(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    for run in ways(lambda tensor: hvd.alltoall(tensor, splits=tf.fill([hvd.size()], 100))):
        for kind in (ValueError, tf.errors.InvalidArgumentError):
            with told(kind, "sum of splits"):
                run(tf.ones([2]))
    data = tf.data.Dataset.from_tensors(tf.ones([2 + hvd.rank()])).map(lambda one: hvd.allreduce(one, name="in.map"))
    with told(HorovodInternalError, "in.map", "rank 1"):
        list(data)
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(3), op=hvd.Sum), np.full(3, hvd.size()))


def case_ranks_that_disagree_get_tensorflows_error_that_horovod_raised(hvd: Any) -> None:
    needs_ranks(hvd, 2)
    variable = tf.Variable(tf.zeros([2 + hvd.rank()]), name="clash")

    def train(_: Any) -> Any:
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
            with told(MismatchError, "clash", "rank 1") as caught:
                run(tf.ones([2 + hvd.rank()]))
            assert isinstance(caught.value, tf.errors.FailedPreconditionError)
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def case_errors_are_of_both_libraries(hvd: Any) -> None:
    lost = PeerLostError("rank 7 is lost", 7)
    for error, kind, code in (
        (lost, tf.errors.UnknownError, tf.errors.UNKNOWN),
        (StallError("x stalled"), tf.errors.UnknownError, tf.errors.UNKNOWN),
        (HorovodInternalError("shut down"), tf.errors.UnknownError, tf.errors.UNKNOWN),
        (DuplicateNameError("x twice"), tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
        (MismatchError("shapes"), tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
        (NotInitializedError(), tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
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


def case_forked_children_ask_and_communicate_nothing(hvd: Any) -> None:
    questions = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size, hvd.is_initialized)
    expected = [question() for question in questions]
    tensor = tf.ones([2 * hvd.size()])
    variable = tf.Variable(tensor)
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(variable)
    tape = hvd.DistributedGradientTape(recorded)
    calls = (
        lambda: hvd.allreduce(tensor),
        lambda: hvd.alltoall(tensor),
        lambda: hvd.broadcast_variables([variable], 0),
        lambda: hvd.broadcast_object(1, 0),
        lambda: tape.gradient(loss, [variable]),
        hvd.join,
        hvd.barrier,
    )

    def check() -> None:
        assert [question() for question in questions] == expected
        assert int(hvd.rank_op()) == hvd.rank()
        assert int(hvd.process_set_included_op(0)) == 1
        for call in calls if hvd.size() > 1 else calls[:-3]:  # where a rank alone reduces nothing
            with told(HorovodInternalError, f"forked from rank {hvd.rank()} ", "HINT"):
                call()
        hvd.shutdown()
        assert not hvd.is_initialized()

    in_child(check)
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(3), op=hvd.Sum), np.full(3, hvd.size()))


def case_jit_compile_is_told_what_to_do(hvd: Any) -> None:
    with told(NotImplementedError, "HINT", "jit_compile=False"):
        tf.function(lambda tensor: hvd.allreduce(tensor), jit_compile=True)(tf.ones([2]))


def case_process_sets(hvd: Any) -> None:
    needs_ranks(hvd, 3)
    firsts = hvd.add_process_set([0, 1])
    only_firsts = tf.function(
        lambda one: tf.cond(
            hvd.process_set_included_op(firsts.process_set_id) == 1,
            lambda: hvd.allreduce(one, op=hvd.Sum, process_set=firsts),
            lambda: one,
        )
    )
    np.testing.assert_array_equal(only_firsts(tf.ones(2)), np.full(2, 2 if firsts.included() else 1))
    if not firsts.included():
        with told(ValueError, "not a member"):
            tf.function(lambda one: hvd.allreduce(one, process_set=firsts))(tf.ones(2))
    if firsts.included():
        for run in ways(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, process_set=firsts)):
            np.testing.assert_array_equal(run(tf.ones(2)), [2.0, 2.0])
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([hvd.rank()]), tf.constant([2, 2]))
        average = hvd.allreduce(slices, process_set=firsts)  # of the set's two ranks
        np.testing.assert_array_equal(tf.convert_to_tensor(average), np.full((2, 2), 0.5))
    hvd.remove_process_set(firsts)


def case_join_lets_others_go_on(hvd: Any) -> None:
    for _ in range(hvd.rank() + 1):
        hvd.allreduce(tf.ones(2), op=hvd.Sum, name="uneven")
    assert 0 <= int(hvd.join()) < hvd.size()


def case_in_a_graph_all_waits_for_the_data(hvd: Any) -> None:
    """At the end of an iterator TensorFlow runs all that does not wait for the next element."""
    weight = tf.Variable([1.0, 2.0])

    def twice(iterator: Any) -> Any:
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
