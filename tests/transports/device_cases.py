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
from tests.transports.launched import COUNT, launches, model_and_optimizer


def case_a_lanes_gradients_live_on_the_device_and_are_averaged(hvd):
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model, optimizer = model_and_optimizer(hvd, compression=compression)
        for step in range(3):
            batches = [
                torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + r)) for r in range(hvd.size())
            ]
            expected = [torch.zeros_like(p) for p in model.parameters()]
            for batch in batches:
                gradients = torch.autograd.grad(model(batch).square().sum(), list(model.parameters()))
                for sum_, gradient in zip(expected, gradients, strict=True):
                    sum_ += gradient / hvd.size()
            optimizer.zero_grad()
            model(batches[hvd.rank()]).square().sum().backward()
            optimizer.synchronize()
            tolerance = 1e-5 if compression is hvd.Compression.none else 5e-3
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                scale = max(1.0, gradient.abs().max().item())
                assert (parameter.grad - gradient).abs().max() <= tolerance * scale
            with optimizer.skip_synchronize():
                optimizer.step()
        lane = next(iter(runtime.engine().lanes.values()))
        assert lane.on_device
        del model, optimizer, lane


def case_lossy_codecs_work_on_the_device_where_they_can(hvd):
    compression = hvd.Compression
    for codec, on_device in (
        (compression.int8(compress="everywhere"), True),
        (compression.powersgd(2, compress="everywhere"), True),
        (compression.threshold(0.1, compress="everywhere"), False),
        (compression.threshold(0.1), True),  # nothing is encoded on one node
    ):
        model, optimizer = model_and_optimizer(hvd, compression=codec)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 5) * (1 + hvd.rank())).square().sum().backward()
            optimizer.step()
        lane = list(runtime.engine().lanes.values())[-1]
        assert lane.on_device == on_device, codec
        encoded = [one for one in lane.reducer.reports() if one[2].bytes_after]
        assert bool(encoded) == codec.everywhere
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert len(set(hvd.allgather_object(weights.numpy().tobytes()))) == 1
        del model, optimizer, lane


def case_all_ranks_hold_the_same_bits_after_fp16(hvd):
    model, optimizer = model_and_optimizer(hvd, compression=hvd.Compression.fp16)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 5) * (hvd.rank() + 1)).square().sum().backward()
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyones = hvd.allgather(flat.view(1, -1))
    assert all(torch.equal(row, everyones[0]) for row in everyones)


def case_many_operations_in_an_order_of_each_ranks_own(hvd):
    order = list(range(12)) if hvd.rank() % 2 else list(reversed(range(12)))
    handles = {}
    for number in order:
        if number % 3 == 0:
            handles[number] = hvd.allgather_async(torch.full((hvd.rank() + 1,), float(number)), name=f"mixed.{number}")
        else:
            handles[number] = hvd.allreduce_async(torch.full((50,), float(number)), name=f"mixed.{number}", op=hvd.Sum)
    for number in reversed(order):
        result = hvd.synchronize(handles[number])
        rows = sum(range(1, hvd.size() + 1)) if number % 3 == 0 else 50
        value = float(number) if number % 3 == 0 else float(number * hvd.size())
        assert result.tolist() == [value] * rows


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
    hvd.shutdown()
    pretend_device.SHARED.append(True)
    try:
        hvd.init()
        own = torch.full((3,), float(hvd.rank()))
        total = [float(sum(range(hvd.size())))] * 3

        def work() -> None:
            assert hvd.allreduce(own, op=hvd.Sum).tolist() == total
            assert hvd.allreduce_(own.clone(), op=hvd.Sum).tolist() == total
            assert hvd.broadcast(own, 1).tolist() == [1.0] * 3
            assert hvd.broadcast_(own.clone(), 1).tolist() == [1.0] * 3
            assert hvd.allgather(own[:1]).tolist() == [float(rank) for rank in range(hvd.size())]
            model, optimizer = model_and_optimizer(hvd)
            before = pretend_device.COPIED[0]
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()
            assert pretend_device.COPIED[0] > before
            lane = list(runtime.engine().lanes.values())[-1]
            assert lane.on_device
            assert "copied" in lane.reducer.reason
            if hvd.rank() == 0:
                assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name="staged").tolist() == [1.0] * 2
            hvd.join()

        assert launches(work) == 0
    finally:
        pretend_device.SHARED.clear()
        hvd.shutdown()
        hvd.init()


def case_gradients_on_a_device_on_some_ranks_only_have_the_same_sums(hvd):
    hvd.shutdown()
    pretend_device.SHARED.append(True)
    pretend_device.HOSTS.append(1)
    try:
        hvd.init()
        model, optimizer = model_and_optimizer(hvd)
        for step in range(3):
            optimizer.zero_grad()
            batches = [torch.full((4, 5), 1.0 + rank + step) for rank in range(hvd.size())]
            everyones = [torch.autograd.grad(model(batch).sum(), list(model.parameters())) for batch in batches]
            model(batches[hvd.rank()]).sum().backward()
            optimizer.synchronize()
            for parameter, *gradients in zip(model.parameters(), *everyones, strict=True):
                torch.testing.assert_close(parameter.grad, sum(gradients) / hvd.size())
            with optimizer.skip_synchronize():
                optimizer.step()
        assert list(runtime.engine().lanes.values())[-1].on_device == (hvd.rank() != 1)
        del model, optimizer
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
