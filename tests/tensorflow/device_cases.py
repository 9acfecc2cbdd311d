"""Tensors that travel as those of a GPU do, with the CPU as the device, and who may: see pretend_device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session import runtime
from hvdkit.tensorflow.ops import device
from tests.tensorflow.data import check_equal, doubles, values, ways
from tests.transports import pretend_device
from tests.transports.launched import launches

HELD = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.uint8, tf.int8, tf.int64)


def case_operations_are_launched_on_the_device(hvd: Any) -> None:
    for dtype in HELD:
        everyones = [values(rank, (5, 4), dtype) for rank in range(hvd.size())]
        own = everyones[hvd.rank()]
        total = sum(doubles(one) for one in everyones)
        for do, expected in (
            (lambda x: hvd.allreduce(x, op=hvd.Sum), total),
            (lambda x: hvd.broadcast(x, hvd.size() - 1), doubles(everyones[-1])),
            (lambda x: hvd.allgather(x), np.concatenate([doubles(one) for one in everyones])),
        ):
            for function in ways(do):
                results: list[Any] = []
                assert launches(lambda function=function, own=own, to=results: to.append(function(own))) == 1
                check_equal(results[0], expected, dtype, dtype)
        check_equal(own, doubles(values(hvd.rank(), (5, 4), dtype)), dtype)  # which the engine did not write to


def case_what_the_device_does_not_do_is_left_to_the_host(hvd: Any) -> None:
    for do in (
        lambda: hvd.allreduce(tf.ones(3, tf.int64), op=hvd.Sum, prescale_factor=2.0),
        lambda: hvd.allreduce(tf.ones(3, tf.int32), op=hvd.Sum),
        lambda: hvd.allreduce(tf.ones(3), compression=hvd.Compression.int8),
        lambda: hvd.broadcast(tf.ones(3, tf.bool), 0),
        lambda: hvd.alltoall(tf.ones(hvd.size())),
        lambda: hvd.reducescatter(tf.ones(6)),
    ):
        assert launches(do) == 0


def case_scalars_and_empty_tensors(hvd: Any) -> None:
    for function in ways(lambda x: hvd.allreduce(x, op=hvd.Sum)):
        check_equal(function(tf.constant(2.0)), np.array(2.0 * hvd.size()), tf.float32)
        check_equal(function(tf.zeros([3, 0])), np.zeros([3, 0]), tf.float32)


def case_gradients_live_on_the_device(hvd: Any) -> None:
    variable = tf.Variable(tf.ones([300, 7]))

    def step(x: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * x)
        return tape.gradient(loss, variable)

    for function in ways(step):
        for number in range(3):
            result = function(tf.fill([300, 7], float(hvd.rank() + number)))
            check_equal(result, np.full([300, 7], (hvd.size() - 1) / 2 + number), tf.float32)
    (lane,) = runtime.engine().lanes.values()
    assert lane.on_device
    kept = result.numpy().copy()
    again = step(tf.fill([300, 7], -1.0))
    np.testing.assert_array_equal(result, kept)  # which no later step reuses
    check_equal(again, np.full([300, 7], -1.0), tf.float32)


def case_results_outlive_the_job(hvd: Any) -> None:
    result = hvd.allreduce(tf.ones(5), op=hvd.Sum)
    size = hvd.size()
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    check_equal(result, np.full(5, float(size)), tf.float32)


def case_ranks_that_share_a_gpu_use_host_memory(hvd: Any) -> None:
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    pretend_device.SHARED.append(True)
    try:
        variable = tf.Variable(tf.ones([3]))
        for function in ways(lambda x: hvd.allreduce(x, op=hvd.Sum)):
            assert launches(lambda f=function: check_equal(f(tf.ones(3)), np.full(3, hvd.size()), tf.float32)) == 0
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * (hvd.rank() + 1.0))
        assert (
            launches(lambda: check_equal(tape.gradient(loss, variable), np.full(3, (hvd.size() + 1) / 2), tf.float32))
            == 0
        )
    finally:
        pretend_device.SHARED.clear()
        hvd.shutdown()
        hvd.init(process_sets="dynamic")


def case_a_rank_that_joined_gives_zeros_of_the_device(hvd: Any) -> None:
    rounds = 1 + hvd.rank()
    for number in range(rounds):
        still = hvd.size() - number
        check_equal(hvd.allreduce(tf.ones(3), op=hvd.Sum, name="joined"), np.full(3, still), tf.float32)
    assert int(hvd.join()) == hvd.size() - 1


def case_dlpacks_address_and_number(hvd: Any) -> None:
    tensor = tf.ones([5])
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    address, number = device._managed(capsule)
    assert number.value == 0
    assert torch.utils.dlpack.from_dlpack(capsule).data_ptr() == address


@contextmanager
def told_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvdkit").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("hvdkit").removeHandler(handler)


def configured(limits: Any) -> Any:
    return limits and [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in limits]


def case_where_tensorflow_is_forced_the_program_is_not_asked(hvd: Any) -> None:
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    for forced, growth, leaves in (("true", False, True), ("false", True, False), ("", True, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", forced)
            patch.setattr(tf.config.experimental, "get_memory_growth", lambda _, growth=growth: growth)
            patch.setattr(tf.config, "get_logical_device_configuration", lambda _: None)
            assert device._leaves_memory(gpu) is leaves


def case_pytorchs_number_of_a_gpu_is_found_while_a_graph_is_traced(hvd: Any) -> None:
    found = []

    def as_tensor(memory: Any) -> Any:
        interface = memory.__cuda_array_interface__
        assert interface["data"][0] > 0
        return SimpleNamespace(device=SimpleNamespace(index=3))

    @tf.function
    def traced(x: Any) -> Any:
        found.append(device._number_of("CPU:0"))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "as_tensor", as_tensor)
        patch.setattr(torch.cuda, "init", lambda: None)
        traced(tf.ones(2))
    assert found == [3]


class Told(Exception):  # noqa: N818 (not an error)
    """What an operation tells the engine of its device."""


def case_the_engine_is_told_of_the_device(hvd: Any) -> None:
    """Else it would move the tensors through host memory, as it does with a CPU's."""
    job = device.device_of_job()

    def tell(*arguments: Any) -> Any:
        (call,) = (one for one in arguments if isinstance(one, Call))
        raise Told(call.device)

    for operation in ("allreduce", "broadcast", "allgather"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "torch_name", "cuda:3")
            patch.setattr(job, "take", list)
            patch.setattr(runtime.engine(), operation, tell)
            arguments = (0,) if operation == "broadcast" else ()
            with pytest.raises(Told, match="cuda"):
                getattr(hvd, operation)(tf.ones(3), *arguments)


def case_a_graph_of_a_job_without_a_device_uses_that_of_the_next(hvd: Any) -> None:
    function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    variable = tf.Variable(tf.ones([3]))

    @tf.function
    def step(x: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * x)
        return tape.gradient(loss, variable)

    for types in (frozenset(), frozenset({"cpu"}), frozenset()):
        hvd.shutdown()
        hvd.init(process_sets="dynamic")
        runtime.engine().transport.device_types = types
        for do in (function, step):
            results: list[Any] = []
            count = launches(lambda do=do, to=results: to.append(do(tf.ones(3))))
            assert bool(count) is bool(types)
            check_equal(results[0], np.full(3, float(hvd.size()) if do is function else 1.0), tf.float32)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


def case_one_line_says_why_tensors_of_gpus_travel_through_host_memory(hvd: Any) -> None:
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    for types, growth, limits, hint in (
        (frozenset(), True, None, "--gloo"),
        (frozenset({"cuda"}), False, None, "set_memory_growth"),
        (frozenset({"cuda"}), True, None, None),
        (frozenset({"cuda"}), False, [1024], None),
        (frozenset({"cuda"}), False, [1024, None], "set_memory_growth"),
    ):
        with pytest.MonkeyPatch.context() as patch, told_lines() as lines:
            patch.setattr(tf.config, "get_visible_devices", lambda kind: [gpu])
            patch.setattr(tf.config.experimental, "get_memory_growth", lambda _, growth=growth: growth)
            patch.setattr(tf.config, "get_logical_device_configuration", lambda _, limits=limits: configured(limits))
            patch.setattr(device, "_number_of", lambda name: 3)
            hvd.shutdown()
            hvd.init(process_sets="dynamic")
            runtime.engine().transport.device_types = types
            found = [device.device_of_job() for _ in range(2)]
        assert found[0] is found[1]
        if hint is None:
            assert (found[0].name, found[0].torch_name) == ("GPU:0", "cuda:3")
        else:
            assert found[0] is None
        spoken = int(hint is not None and hvd.size() > 1 and hvd.local_rank() == 0)
        assert len(lines) == spoken, lines
        assert all("through host memory" in line and hint in line for line in lines)
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
