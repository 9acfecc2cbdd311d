"""Tensors that travel from device to device, with the CPU as the device: see pretend_device."""

from __future__ import annotations

import numpy as np
import torch

from hvdkit.engine.session import runtime
from hvdkit.engine.steps.plan import Slot
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels import ReduceOp
from tests.told import told
from tests.transports import pretend_device
from tests.transports.launched import COUNT, model_and_optimizer


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


def case_gradients_on_a_device_on_some_ranks_only_have_the_same_sums(hvd):
    """All ranks share a device but rank 1, whose gradients are in the host."""
    hvd.shutdown()
    pretend_device.SHARED.append(True)
    pretend_device.HOSTS.append(1)
    try:
        hvd.init()
        model, optimizer = model_and_optimizer(hvd)
        for step in range(3):
            drawn = torch.randn(hvd.size(), 4, 5, generator=torch.Generator().manual_seed(step))
            everyones = [torch.autograd.grad(model(one).square().sum(), list(model.parameters())) for one in drawn]
            optimizer.zero_grad()
            model(drawn[hvd.rank()]).square().sum().backward()
            optimizer.synchronize()
            for parameter, *gradients in zip(model.parameters(), *everyones, strict=True):
                expected = sum(gradients) / hvd.size()
                assert (parameter.grad - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
            with optimizer.skip_synchronize():
                optimizer.step()
        (lane,) = runtime.engine().lanes.values()
        assert lane.on_device == (hvd.rank() != 1)
    finally:
        pretend_device.SHARED.clear()
        pretend_device.HOSTS.clear()
        hvd.shutdown()
        hvd.init()


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
