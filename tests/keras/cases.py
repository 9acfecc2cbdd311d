"""DistributedOptimizer, callbacks and saved models of Keras on real ranks, against one process on the joined batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

from hvdkit.engine.session import runtime
from hvdkit.errors import HorovodInternalError
from hvdkit.keras.functions import backend_name
from tests.keras.batches import FEATURES, NOT_WRAPPED, ROWS, batches, joined, not_wrapped, whole
from tests.keras.checks import check_close, check_equal, check_same_bits, numbers, only_tensorflow, only_with_others
from tests.keras.models import TENSORFLOW, Registered, compiled, gradients_of, model, steps_of_one_process, train
from tests.keras.shared_cases import of_unknown_length
from tests.ranks import Skip
from tests.told import told, warned


def sgd(rate=0.1, **options):
    return keras.optimizers.SGD(rate, **options)


def case_a_train_step_of_ones_own_and_a_loop_of_ones_own(hvd):
    class Own(keras.Sequential):
        def train_step(self, *arguments):
            return super().train_step(*arguments)

    ours = Own(model().layers)
    ours.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    alone = steps_of_one_process(sgd(), hvd)
    check_close(train(ours, batches(hvd.rank())), alone)
    looped, optimizer = model(), hvd.DistributedOptimizer(sgd())
    for x, y in batches(hvd.rank()):
        optimizer.apply_gradients(zip(gradients_of(looped, x, y), looped.trainable_variables, strict=True))
    check_close(looped, alone)


def case_sums_scales_groups_and_compression(hvd):
    rate = 0.05
    for options, factor, rtol in (
        ({"op": hvd.Sum}, hvd.size(), 1e-5),
        ({"gradient_predivide_factor": 2.0}, 1, 1e-5),
        ({"groups": 2}, 1, 1e-5),
        ({"compression": hvd.Compression.fp16}, 1, 0.02),
        ({"compression": {"*kernel": hvd.Compression.int8(compress="everywhere")}}, 1, 0.02),
    ):
        ours = train(compiled(hvd.DistributedOptimizer(sgd(rate), **options)), batches(hvd.rank()))
        check_same_bits(hvd, ours)
        check_close(ours, steps_of_one_process(sgd(rate * factor), hvd), rtol, rtol / 10)


def case_patterns_choose_all_layers_of_a_kind(hvd):
    only_with_others(hvd)

    def compressed_by(pattern, is_told):
        gc.collect()  # models of earlier cases, whose parameters would go from the statistics meanwhile
        before = set(hvd.compression_stats().by_parameter)
        layers = [keras.layers.Dense(64, name=f"kind_{number}") for number in (1, 2, 3)]
        made = keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(64, name="other")])
        policy = {pattern: hvd.Compression.int8(compress="everywhere")}
        made.compile(hvd.DistributedOptimizer(sgd(0.01), compression=policy), "mse")
        rows = np.random.default_rng(hvd.rank()).normal(size=(8, 64)).astype(np.float32)
        with warned("none of the patterns", times=int(is_told)):
            made.fit(rows, rows, batch_size=8, verbose=0)
        return set(hvd.compression_stats().by_parameter) - before

    for pattern, compressed in (("kind/kernel", 3), ("*kernel", 4), ("kind_2/kernel", 0)):
        found = compressed_by(pattern, compressed == 0 and hvd.rank() == 0)
        assert len(found) == compressed, (pattern, found)


def case_compressed_training_is_as_accurate_as_dense(hvd):
    only_with_others(hvd)
    if TENSORFLOW and hvd.size() == 2:
        raise Skip("on two ranks PyTorch's backend trains so long; TensorFlow's does on three")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))  # writers come one after the other
    images, labels, test = images[order] / 16 - 0.5, labels[order], slice(1400, None)
    mine = slice(hvd.rank(), 1400, hvd.size())
    accuracies = {}
    for name, codec in {
        "dense": hvd.Compression.none,
        "int8": hvd.Compression.int8(compress="everywhere"),
        "topk": hvd.Compression.topk(0.05, compress="everywhere"),
    }.items():
        keras.utils.set_random_seed(1)
        hidden = [keras.layers.Dense(128, activation="relu") for _ in range(2)]
        made = keras.Sequential([keras.layers.Input((64,)), *hidden, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.004), compression=codec)
        made.compile(optimizer, loss, metrics=["accuracy"])
        rows = 1400 // hvd.size()  # the same number of batches on all ranks
        made.fit(images[mine][:rows], labels[mine][:rows], batch_size=32, epochs=12, verbose=0)
        check_same_bits(hvd, made)
        accuracies[name] = made.evaluate(images[test], labels[test], verbose=0)[1]
        sent = [one for one in hvd.compression_stats().by_parameter.values() if one.codec.startswith(name)]
        assert name == "dense" or max(one.ratio for one in sent) > 3, (name, sent)
    assert accuracies["dense"] > 0.96, accuracies
    assert min(accuracies.values()) > accuracies["dense"] - 0.015, accuracies


def case_overlap_forward_warns_once_and_trains_without_it(hvd):
    with warned("overlap_forward is removed: step() ends when the update is made; remove the argument"):
        optimizers = [hvd.DistributedOptimizer(sgd(), overlap_forward=True) for _ in range(2)]
    ours = train(compiled(optimizers[1]), batches(hvd.rank()))
    check_close(ours, train(compiled(sgd()), joined(hvd)))


def case_a_distribution_of_keras_beside_a_distributed_optimizer_is_an_error(hvd):
    mesh = keras.distribution.DeviceMesh((1,), ["batch"], ["cpu:0"])
    ours = compiled(hvd.DistributedOptimizer(sgd()), run_eagerly=True)
    keras.distribution.set_distribution(keras.distribution.DataParallel(device_mesh=mesh))
    try:
        with told(
            ValueError,
            f"DistributedOptimizer 'DistributedSGD' on rank {hvd.rank()}: keras.distribution has DataParallel set, "
            "which reduces gradients over its own processes; the gradients would be averaged twice.",
            "HINT: call keras.distribution.set_distribution(None) before the model is made, or give the model the "
            "optimizer without hvd.DistributedOptimizer.",
        ):
            train(ours, batches(hvd.rank()))
    finally:
        keras.distribution.set_distribution(None)
    check_close(train(ours, batches(hvd.rank())), train(compiled(sgd()), joined(hvd)))


def case_several_passes_make_a_step(hvd):
    data = joined(hvd, 5)
    pairs = [whole(data[start : start + 2]) for start in (0, 2)]
    adam = functools.partial(keras.optimizers.Adam, 0.01, use_ema=True)
    for inner, averages, alone, options in (
        (sgd(), True, sgd(), {}),
        (sgd(), False, sgd(0.2), {"run_eagerly": True}),
        (adam(), True, adam(), {}),
    ):
        wrapped = {"backward_passes_per_step": 2, "average_aggregated_gradients": averages}
        optimizer = hvd.DistributedOptimizer(inner, **wrapped)
        ours = train(compiled(optimizer, **options), batches(hvd.rank(), 5))
        check_close(train(compiled(alone), pairs), ours)
        for mine, theirs in zip(numbers(optimizer.variables), numbers(alone.variables), strict=True):
            if mine.ndim:  # not the learning rates
                np.testing.assert_allclose(mine, theirs, 1e-5, 1e-7)
        assert int(optimizer.iterations) == 2  # of the fifth pass nothing was used yet
        check_same_bits(hvd, ours)


def case_the_end_of_an_iterator_in_a_graph_is_no_pass(hvd):
    only_tensorflow()
    import tensorflow as tf

    def one(step, iterator):
        step(*next(iterator))

    def four(step, iterator):
        for _ in tf.range(4):
            one(step, iterator)

    def step_of(made, optimizer, depends_on_data):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(tf.sin(tf.convert_to_tensor(one))) for one in made.trainable_variables)
                if depends_on_data:
                    loss += tf.reduce_mean(tf.square(made(x) - y))
            optimizer.apply(tape.gradient(loss, made.trainable_variables), made.trainable_variables)

        return step

    for way, depends_on_data in ((four, True), (one, False)):
        looped, alone = model(), model()
        passes = {"backward_passes_per_step": 3, "average_aggregated_gradients": True}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **passes)
        run = tf.function(functools.partial(way, step_of(looped, optimizer, depends_on_data)))
        for _ in range(2):
            iterator = iter(of_unknown_length(batches(hvd.rank(), 6)))
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    run(iterator)
        step, data = step_of(alone, keras.optimizers.Adam(0.01), depends_on_data), joined(hvd, 6) * 2
        for start in range(0, 12, 3):
            step(*whole(data[start : start + 3]))
        assert int(optimizer.iterations) == 4
        check_close(looped, alone, 1e-6, 1e-6)


def case_what_had_a_gradient_in_one_of_several_passes_is_used_in_that_step(hvd):
    variables = [keras.Variable(np.zeros(2), dtype="float64", name=name) for name in ("a", "b")]
    optimizer = hvd.DistributedOptimizer(sgd(1.0), backward_passes_per_step=2)
    one = keras.ops.ones(2, "float64") * (hvd.rank() + 1)
    mean = (hvd.size() + 1) / 2
    for gradients in ((one, one), (one, None), (one, None)):
        optimizer.apply(list(gradients), variables)
    optimizer.apply([one, None], variables)
    for value, factor in zip(numbers(variables), (-4, -1), strict=True):
        np.testing.assert_allclose(value, np.full(2, factor * mean))


def case_values_that_replace_a_variable_are_the_largest_of_all(hvd):
    weight = keras.Variable(np.zeros(2), dtype="float64", name="weight")
    scale = keras.Variable(np.zeros(2), dtype="float64", name="scale")
    scale.overwrite_with_gradient = True
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(sgd(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        value = keras.ops.convert_to_tensor(np.array([1.0, -1.0]) * (hvd.rank() + 1))
        for _ in range(passes):
            optimizer.apply([value, value], [weight, scale])
        largest = [hvd.size(), -1.0 if passes == 1 else 0.0]  # as Keras, which begins with zero
        np.testing.assert_allclose(numbers([scale])[0], largest)


class Own(keras.optimizers.Optimizer):
    """Somebody's optimizer, with arguments and without get_config."""

    def __init__(self, rate):
        super().__init__(learning_rate=rate)

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * gradient)


class ComplexLayer(keras.layers.Layer):
    """A complex kernel, and the square of what it gives."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 1), dtype="complex64", initializer="ones", name="kernel")

    def call(self, inputs):
        hidden = keras.ops.matmul(keras.ops.cast(inputs, "complex64"), self.kernel)
        return keras.ops.real(hidden * keras.ops.conj(hidden)) + keras.ops.imag(hidden)


def case_complex_weights_train_as_in_one_process(hvd):
    ours, alone = (keras.Sequential([keras.layers.Input((FEATURES,)), ComplexLayer()]) for _ in range(2))
    ours.compile(optimizer=hvd.DistributedOptimizer(sgd(0.001)), loss="mse")
    alone.compile(optimizer=hvd.unsynchronized(sgd(0.001)), loss="mse")
    check_close(train(ours, batches(hvd.rank(), 3)), train(alone, joined(hvd, 3)), atol=1e-6)
    check_same_bits(hvd, ours)


def case_random_numbers_stay_each_ranks_own(hvd):
    keras.utils.set_random_seed(hvd.rank())
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    made.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    made.fit(*batches(hvd.rank(), 1)[0], verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    states = hvd.allgather_object(numbers(made.non_trainable_variables)[-1].tolist(), name="states")
    assert len({tuple(state) for state in states}) == hvd.size(), states
    weights = hvd.allgather_object([value.tolist() for value in numbers(made.trainable_variables)], name="weights")
    assert all(one == weights[0] for one in weights)


def case_optimizers_that_somebody_else_wrote(hvd):
    alone = steps_of_one_process(sgd(), hvd)
    for kind in (Own, Registered):
        ours = train(compiled(hvd.DistributedOptimizer(kind(0.1))), batches(hvd.rank()))
        check_close(ours, alone)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        ours.save(path)
        loaded = train(hvd.load_model(path, custom_optimizers=[Registered]), batches(hvd.rank()))
        assert isinstance(loaded.optimizer, Registered)
        check_same_bits(hvd, loaded)


def case_copies_are_distributed_too(hvd):
    optimizer = hvd.DistributedOptimizer(sgd(0.1, momentum=0.9), op=hvd.Sum)
    alone = steps_of_one_process(sgd(0.1 * hvd.size(), momentum=0.9), hvd)
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))  # noqa: S301 (our own)
    for again in (*copies, type(optimizer).from_config(optimizer.get_config())):
        check_close(train(compiled(again), batches(hvd.rank())), alone)
        assert again is not optimizer
    assert not optimizer.built


def case_copies_know_which_layers_stay_local(hvd):
    only_with_others(hvd)
    ours = model()
    optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=ours.layers[0])
    ours.compile(optimizer=copy.copy(optimizer), loss="mse")
    train(ours, batches(hvd.rank()))
    digests = hvd.allgather_object([value.tobytes() for value in numbers(ours.trainable_variables)])
    alike = [len({one[index] for one in digests}) == 1 for index in range(4)]
    assert alike == [False, False, True, True]
    for copied in (copy.deepcopy, pickle.dumps):
        names = ", ".join(variable.path for variable in ours.layers[0].trainable_variables)
        with told(
            TypeError,
            f"A distributed optimizer that leaves variables to each rank ({names}) cannot be deep-copied or pickled: "
            "these are variables of its own model, and a copy would reduce the variables of another model.",
            "HINT: copy the optimizer before it is wrapped, and give PartialDistributedOptimizer or "
            "register_local_var() the layers or variables of the model that the copy trains.",
        ):
            copied(optimizer)


def case_what_a_shell_completes_is_the_api_alone(hvd):
    import hvdkit.keras

    modules = [hvdkit.keras]  # not what may stand for it here
    if TENSORFLOW:
        import hvdkit.tensorflow
        import hvdkit.tensorflow.keras

        modules += [hvdkit.tensorflow, hvdkit.tensorflow.keras]
    for module in modules:
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, name) for name in dir(module)), module


def case_optimizers_of_loops_are_asked_about_too(hvd):
    times = int(hvd.size() > 1)
    made, second, by_hand = model(), sgd(0.01), sgd(0.01)
    with warned(not_wrapped(hvd, second.name, "SGD"), times):  # a second one, left as it was
        for x, y in batches(hvd.rank()):
            second.apply(gradients_of(made, x, y), made.trainable_variables)
    with warned(NOT_WRAPPED, 0):  # whose gradients a loop reduces by hand
        for x, y in batches(hvd.rank()):
            by_hand.apply([hvd.allreduce(one) for one in gradients_of(made, x, y)], made.trainable_variables)
    with warned(NOT_WRAPPED, 0):  # who says that it is on purpose
        train(compiled(hvd.unsynchronized(sgd(0.01))), batches(hvd.rank()))
    if TENSORFLOW:
        import tensorflow as tf

        import hvdkit.tensorflow

        other, plain = model(), sgd(0.01)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(x))
        gradients = hvdkit.tensorflow.DistributedGradientTape(tape).gradient(loss, made.trainable_variables)
        with warned(NOT_WRAPPED, 0):
            sgd(0.01).apply(gradients, made.trainable_variables)
        with warned(NOT_WRAPPED, times):  # of another model nobody reduced them
            plain.apply(gradients_of(other, x, y), other.trainable_variables)


def case_what_a_model_took_goes_with_it(hvd):

    def lanes():
        gc.collect()
        return len(runtime.engine().lanes)

    before = lanes()
    ours = train(compiled(hvd.DistributedOptimizer(sgd()), run_eagerly=True), batches(hvd.rank()))
    assert hvd.size() == 1 or lanes() == before + 1
    keras.backend.clear_session()
    del ours
    assert lanes() == before


def case_what_an_optimizer_keeps_for_local_layers_stays_local(hvd):
    for kind in (keras.optimizers.Adam, keras.optimizers.SGD):
        ours = model()
        options = {"momentum": 0.9} if kind is keras.optimizers.SGD else {}
        optimizer = hvd.PartialDistributedOptimizer(kind(0.1, **options), local_layers=ours.layers[0])
        ours.compile(optimizer=optimizer, loss="mse")
        train(ours, batches(hvd.rank(), 1))
        kept = [one for one in optimizer.variables if tuple(one.shape) == tuple(ours.layers[0].kernel.shape)]
        assert len(kept) == (1 if options else 2), [one.path for one in kept]
        before = numbers(kept)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(ours)
        callback.on_train_begin()
        check_equal(numbers(kept), before)
        everyones = hvd.allgather_object([value.tobytes() for value in before])
        assert len({tuple(one) for one in everyones}) == hvd.size(), "the same on all ranks before"


def case_process_sets(hvd):
    if hvd.size() < 3:
        raise Skip("needs a rank outside")
    pair = hvd.add_process_set([0, 2])
    with told(TypeError, "DistributedOptimizer: only an optimizer with the process set of all ranks can be pickled"):
        pickle.dumps(hvd.DistributedOptimizer(sgd(), process_set=pair))
    ours = train(compiled(hvd.DistributedOptimizer(sgd(), process_set=pair)), batches(hvd.rank()))
    data = joined(hvd, ranks=[0, 2] if pair.included() else [hvd.rank()])
    check_close(ours, train(compiled(sgd()), data))
    hvd.remove_process_set(pair)


def case_embeddings(hvd):
    def embedding(optimizer):
        keras.utils.set_random_seed(3)
        of_words = keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4, dtype="float64")
        made = keras.Sequential([*of_words, keras.layers.Flatten(), keras.layers.Dense(1, dtype="float64")])
        made.compile(optimizer=optimizer, loss="mse")
        return made

    def rows(rank):
        return np.random.default_rng(rank).integers(0, 10, size=(ROWS, 3)), np.full((ROWS, 1), float(rank))

    everyones = whole([rows(rank) for rank in range(hvd.size())])
    # Of indices that occur several times Keras's Adagrad adds up the squares, unless they are dense.
    for as_dense, kind in ((False, sgd), (True, sgd), (False, keras.optimizers.Adagrad)):
        optimizer = hvd.DistributedOptimizer(kind(0.1), sparse_as_dense=as_dense)
        ours = train(embedding(optimizer), [rows(hvd.rank())] * 3)
        check_same_bits(hvd, ours)
        check_close(ours, train(embedding(kind(0.1)), [everyones] * 3), 1e-4, 1e-6)


def case_each_metric_gets_its_own_average(hvd):
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"val_loss": float(hvd.rank()), "loss": 10.0 + hvd.rank(), "lr": 0.5}
    callback.on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    assert list(logs) == ["val_loss", "loss", "lr"]
    np.testing.assert_allclose(list(logs.values()), [mean, 10 + mean, 0.5])


def case_each_element_of_a_metric_gets_its_own_average(hvd):
    rank, ranks = hvd.rank(), np.arange(hvd.size())
    mean = float(ranks.mean())
    logs = {
        "tensor": keras.ops.convert_to_tensor(np.array([rank, 1.0], np.float32)),
        "counts": keras.ops.convert_to_tensor(np.array([[rank], [2]], np.int32)),
        "array": np.array([rank, np.inf, 3.0]),
        "flags": np.array([True, rank == 0]),
        "list": [rank, [2.0, np.float32(rank)]],
        "by_class": {"b": rank, "a": (bool(rank), 4)},
        "not_finite": float("nan") if rank == 0 else 1.0,
        "none": None,
        "text": "said",
        "number": rank,
    }
    kinds = {name: type(value) for name, value in logs.items()}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    for name, expected in (
        ("tensor", [mean, 1.0]),
        ("counts", [[mean], [2.0]]),
        ("array", [mean, np.inf, 3.0]),
        ("flags", [1.0, 1 / hvd.size()]),
    ):
        assert isinstance(logs[name], kinds[name]), name
        np.testing.assert_allclose(keras.ops.convert_to_numpy(logs[name]), expected)
    assert str(logs["tensor"].dtype).endswith("float32'>" if TENSORFLOW else "float32")
    assert logs["list"] == [mean, [2.0, mean]]
    assert logs["by_class"] == {"b": mean, "a": (float(np.mean(ranks > 0)), 4.0)}
    assert np.isnan(logs["not_finite"])
    assert (logs["none"], logs["text"], logs["number"]) == (None, "said", mean)


def case_metrics_of_another_form_are_told(hvd):
    only_with_others(hvd)
    callback = hvd.callbacks.MetricAverageCallback()
    for mine, others, texts in (
        ({"f1": np.ones(4)}, {"f1": np.ones(3)}, ("rank 0: f1 of shape (4,)", "rank 1: f1 of shape (3,)")),
        ({"f1": np.ones(3)}, {}, ("rank 0: f1 of shape (3,)", "rank 1: none")),
        ({"f1": 1.0}, {"f1": None}, ("rank 0: f1;", "rank 1: none")),
        ({"f1": {"a": 1.0}}, {"f1": {"b": 1.0}}, ("'a'", "'b'")),
        ({"f1": [1.0, 2.0]}, {"f1": [1.0]}, ("different metrics",)),
        (
            {"loss": 1.0, "val_loss": 2.0},
            {"loss": 1.0},
            ("different metrics", "rank 0: loss, val_loss; rank 1: loss"),
        ),
    ):
        with told(ValueError, *texts):
            callback.on_epoch_end(0, dict(mine if hvd.rank() == 0 else others))


def case_ranks_with_other_learning_rates_are_told(hvd):
    only_with_others(hvd)
    x, y = batches(hvd.rank(), 1)[0]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 if hvd.rank() == 0 or epoch == 0 else 0.25)
    options = {"verbose": 0, "callbacks": [schedule, hvd.callbacks.MetricAverageCallback()]}
    listed = "; ".join(f"rank {rank}: {0.25 if rank else 0.5}" for rank in range(hvd.size()))
    fact = f"MetricAverageCallback: ranks have different learning rates at the end of epoch 2: {listed}"
    hint = (
        "HINT: set the same rate on all ranks. Put callbacks that follow a metric, such as ReduceLROnPlateau, after "
        "MetricAverageCallback in the list; before it, each rank follows its own metric."
    )
    with told(ValueError, f"{fact}\n{hint}"):
        compiled(hvd.DistributedOptimizer(sgd(0.5))).fit(x, y, epochs=3, **options)
    compiled(hvd.unsynchronized(sgd(0.5))).fit(x, y, epochs=2, **options)  # whose rates are each rank's own


def case_other_numbers_of_batches_are_an_error_and_no_hang(hvd):
    only_with_others(hvd)
    ours = compiled(hvd.DistributedOptimizer(sgd()))
    x, y = whole(batches(hvd.rank(), 3 if hvd.rank() else 4))
    with told(HorovodInternalError, "MetricAverageCallback"):
        ours.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])


def case_operations_take_what_becomes_a_tensor(hvd):
    everyone = range(hvd.size())
    for result, expected in (
        (hvd.allreduce([1.0 * hvd.rank(), 2.0], name="a"), [np.mean(everyone), 2.0]),
        (hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum), [sum(everyone)]),
        (hvd.allgather([[hvd.rank()]]), [[rank] for rank in everyone]),
        (hvd.broadcast(np.array([hvd.rank()]), hvd.size() - 1), [hvd.size() - 1]),
    ):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(result), expected)
    with told(RuntimeError, "broadcast_global_variables"):
        hvd.broadcast_global_variables(0)
    ours = train(compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=hvd.rank()), [])
    ours.optimizer.build(ours.trainable_variables)
    hvd.broadcast_global_variables(0, ours)
    check_same_bits(hvd, ours)


def case_what_makes_no_sense_is_told(hvd):
    wrap = hvd.DistributedOptimizer
    for error, text, make in (
        (
            TypeError,
            "DistributedOptimizer: optimizer must be a keras.optimizers.Optimizer, got str\n"
            'HINT: keras.optimizers.get("adam") makes an optimizer from a name.',
            lambda one: wrap("adam"),
        ),
        (
            ValueError,
            "DistributedOptimizer: optimizer is a DistributedOptimizer already\nHINT: wrap it once.",
            lambda one: wrap(wrap(one)),
        ),
        (ValueError, "Average and Sum", lambda one: wrap(one, op=2)),
        (ValueError, "backward_passes_per_step", lambda one: wrap(one, backward_passes_per_step=0)),
        (ValueError, "groups", lambda one: wrap(one, groups=[3])),
        (TypeError, "compression", lambda one: wrap(one, compression="fp16")),
        (ValueError, "local_layers", lambda one: hvd.PartialDistributedOptimizer(one, local_layers=[3])),
    ):
        with told(error, text):
            make(sgd())
    with told(TypeError, "broadcast_variables: variables[0] must be a variable, got 3.0"):
        hvd.broadcast_variables([3.0])
    with told(ValueError, "KerasState: the model is not built.", "HINT: call model.build(input_shape) first."):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "jax")
        fact = "hvdkit.keras: Keras runs on jax, for which hvdkit does not reduce gradients."
        hint = "HINT: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported."
        with told(NotImplementedError, fact, hint):
            backend_name()


def case_jit_is_off_by_itself_and_told_where_asked_for(hvd):
    only_tensorflow()
    only_with_others(hvd)
    import tensorflow as tf

    class Gpu:
        device_type = "GPU"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_physical_devices", lambda *_: [Gpu()])
        assert compiled(sgd()).jit_compile
        assert not compiled(hvd.DistributedOptimizer(sgd())).jit_compile
    asked = compiled(hvd.DistributedOptimizer(sgd()), jit_compile=True)
    with told(NotImplementedError, "jit_compile=False"):
        train(asked, batches(hvd.rank(), 1))
