"""Tensors that travel from device to device, with the CPU as the device: see pretend_device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from hvdkit.engine.session import runtime
from hvdkit.engine.steps.plan import Slot
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels import ReduceOp
from tests.told import told
from tests.transports import pretend_device
from tests.transports.launched import COUNT, launches, model_and_optimizer


@contextmanager
def sharing_a_device(hvd, *on_host: int) -> Iterator[None]:
    """A job of the same ranks of which all share a device, but those ``on_host``, whose gradients are in the host."""
    hvd.shutdown()
    pretend_device.SHARED.append(True)
    pretend_device.HOSTS.extend(on_host)
    try:
        hvd.init()
        yield
    finally:
        pretend_device.SHARED.clear()
        pretend_device.HOSTS.clear()
        hvd.shutdown()
        hvd.init()


def newest_lane():
    return list(runtime.engine().lanes.values())[-1]


def lane_of_checked_steps(hvd, tolerance: float, **arguments):
    """Train on batches of each rank's own; every gradient must be the mean of those that one process computes."""
    model, optimizer = model_and_optimizer(hvd, **arguments)
    for step in range(3):
        batches = [
            torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + rank)) for rank in range(hvd.size())
        ]
        everyones = [torch.autograd.grad(model(batch).square().sum(), list(model.parameters())) for batch in batches]
        optimizer.zero_grad()
        model(batches[hvd.rank()]).square().sum().backward()
        optimizer.synchronize()
        for parameter, *gradients in zip(model.parameters(), *everyones, strict=True):
            expected = sum(gradients) / hvd.size()
            assert (parameter.grad - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())
        with optimizer.skip_synchronize():
            optimizer.step()
    return newest_lane()


def case_a_lanes_gradients_live_on_the_device_and_are_averaged(hvd):
    for compression, tolerance in ((hvd.Compression.none, 1e-5), (hvd.Compression.fp16, 5e-3)):
        assert lane_of_checked_steps(hvd, tolerance, compression=compression).on_device


def case_lossy_codecs_work_on_the_device_where_they_can(hvd):
    compression = hvd.Compression
    for codec, on_device in (
        (compression.int8(compress="everywhere"), True),
        (compression.powersgd(2, compress="everywhere"), True),
        (compression.threshold(0.1, compress="everywhere"), False),
        (compression.threshold(0.1), True),  # nothing is encoded on one node
        (compression.fp16, True),
    ):
        model, optimizer = model_and_optimizer(hvd, compression=codec)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 5) * (1 + hvd.rank())).square().sum().backward()
            optimizer.step()
        assert newest_lane().on_device == on_device, codec
        encoded = [report for report in newest_lane().reducer.reports() if report[2].bytes_after]
        assert bool(encoded) == (codec is compression.fp16 or codec.everywhere)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert len(set(hvd.allgather_object(weights.numpy().tobytes()))) == 1
        del model, optimizer


def case_a_rank_that_joined_contributes_zeros_to_lanes_and_operations(hvd):
    model, optimizer = model_and_optimizer(hvd)
    inputs = torch.ones(4, 5)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.synchronize()

    step()
    alone = [p.grad.clone() for p in model.parameters()]
    if hvd.rank() != 0:
        hvd.join()
    else:
        step()
        for parameter, gradient in zip(model.parameters(), alone, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / hvd.size())
        result = hvd.allreduce(torch.ones(4), op=hvd.Sum, name="while.others.joined")
        assert result.tolist() == [1.0] * 4
        hvd.join()
    step()


def case_plans_on_different_devices_are_an_error(hvd):
    engine = runtime.engine()
    engine.transport.device_types = frozenset({"cpu", "odd"})
    try:
        with told(HorovodInternalError, "Mismatched devices", "sent odd"):
            engine.register_plan(
                "devices",
                [Slot("weight", (3,), np.dtype(np.float32))],
                op=ReduceOp.SUM,
                device="odd:0" if hvd.rank() else "cpu",
            )
    finally:
        engine.transport.device_types = frozenset({"cpu"})


def case_ranks_that_share_a_device_are_staged(hvd):
    own = torch.full((3,), float(hvd.rank()))
    total = [float(sum(range(hvd.size())))] * 3

    def work() -> None:
        assert hvd.allreduce(own, op=hvd.Sum).tolist() == total
        assert hvd.allreduce_(own.clone(), op=hvd.Sum).tolist() == total
        assert hvd.broadcast(own, 1).tolist() == hvd.broadcast_(own.clone(), 1).tolist() == [1.0] * 3
        assert hvd.allgather(own[:1]).tolist() == [float(rank) for rank in range(hvd.size())]
        before = pretend_device.COPIED[0]
        lane = lane_of_checked_steps(hvd, 1e-5)
        assert pretend_device.COPIED[0] > before
        assert lane.on_device
        assert "copied" in lane.reducer.reason
        if hvd.rank() == 0:
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="staged").tolist() == [1.0] * 2
        hvd.join()

    with sharing_a_device(hvd):
        assert launches(work) == 0


def case_gradients_on_a_device_on_some_ranks_only_have_the_same_sums(hvd):
    with sharing_a_device(hvd, 1):
        assert lane_of_checked_steps(hvd, 1e-5).on_device == (hvd.rank() != 1)


def case_a_launch_that_fails_is_an_error_on_every_rank(hvd):
    hvd.allreduce(torch.ones(2))
    if hvd.rank() == 1:
        pretend_device.FAIL_AT.append(COUNT[0] + 1)
    with told(HorovodInternalError, "pretended failure"):
        hvd.allreduce(torch.ones(2), name="fails")
    pretend_device.FAIL_AT.clear()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
