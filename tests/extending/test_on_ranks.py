"""What stands outside of hvdkit and registers itself does all that the built-in ones do, on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session import runtime
from tests.extending import numpy_framework as framework
from tests.extending import shift  # noqa: F401 (it registers itself)
from tests.extending.running_sign import MAGNITUDE, RunningSign
from tests.on_ranks import on_ranks
from tests.told import told

pytestmark = on_ranks((2, "mpi"), (3, "torch"))


def start_shift(array: np.ndarray, name: str) -> Any:
    fields = {"dtype": [array.dtype.name], "shape": [list(array.shape)]}
    return runtime.engine().named.submit("shift", [array], fields, Call(name))


def test_an_operation_gives_its_result(hvd: Any) -> None:
    hvd.barrier()  # all ranks have imported it, as they must before any asks for it
    for number in range(3):  # a repeated signature travels as a number
        came = start_shift(np.full((2, 3), 10 * number + hvd.rank()), "shifted").wait()
        np.testing.assert_array_equal(came, np.full((2, 3), 10 * number + (hvd.rank() - 1) % hvd.size()))


def test_an_operation_is_checked_on_all_ranks(hvd: Any) -> None:
    with told(hvd.HorovodInternalError, "Mismatched shapes for shift 'clash'", "rank 0", "[2]", "[1]"):
        start_shift(np.zeros(2 if hvd.rank() == 0 else 1), "clash").wait()
    with told(hvd.HorovodInternalError, "Mismatched operations for 'kinds'", "sent shift", "sent allreduce"):
        if hvd.rank() == 0:
            start_shift(np.zeros(2), "kinds").wait()
        else:
            hvd.allreduce(torch.zeros(2), name="kinds")


def test_an_operation_without_zeros_does_not_go_with_join(hvd: Any) -> None:
    if hvd.rank() == 0:
        with told(hvd.HorovodInternalError, "shift is not supported with Join"):
            start_shift(np.zeros(2), "joined").wait()
    hvd.join()


def test_a_codec_trains_and_keeps_its_state(hvd: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=RunningSign(compress="everywhere"),
    )
    start, magnitudes = model.weight.detach().clone(), []
    total = torch.zeros_like(start)
    for step in range(4):
        optimizer.zero_grad()
        rows = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        model(rows).square().mean().backward()
        total += hvd.allreduce(model.weight.grad.clone(), name=f"dense.{step}")
        optimizer.step()
        lane = next(lane for lane in runtime.engine().lanes.values() if lane.reducer.residuals.keeps_anything)
        kept = lane.reducer.residuals.of_bucket(0).shared.numbers
        magnitudes.append([number for (name, _, _), number in sorted(kept.items()) if name == MAGNITUDE])
    assert len(magnitudes[0]) >= 1
    assert magnitudes[0] != magnitudes[1]
    weights = hvd.allgather_object(model.weight.detach().numpy())
    assert all(np.array_equal(one, weights[0]) for one in weights)
    # What was handed on and what is kept is all that came in.
    residuals = hvd.allreduce(torch.from_numpy(lane.reducer.residuals.of_slot(0)["residual"].copy()), name="kept")
    went = (start - model.weight.detach()) / 0.1
    torch.testing.assert_close(went.flatten() + residuals, total.flatten(), rtol=1e-3, atol=1e-4)
    assert any(name.startswith("running_sign(") for name in hvd.compression_stats().by_codec)


def test_a_framework_has_operations_in_all_forms(hvd: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    array = np.full((2, 3), rank, dtype=np.float32)
    handle = framework.allreduce_async(array, "async")
    array[...] = 99.0  # an operation in flight has its own copy
    np.testing.assert_array_equal(framework.synchronize(handle), np.full((2, 3), total))
    one, two = framework.grouped_allreduce([np.float64(rank).reshape(()), np.arange(3)], "group")
    assert (one.shape, one.item()) == ((), total)
    np.testing.assert_array_equal(two, size * np.arange(3))
    np.testing.assert_array_equal(framework.broadcast(np.arange(3) + rank, size - 1), np.arange(3) + size - 1)
    target = np.full(5, rank)[::2]  # not contiguous
    assert framework.broadcast_(target, 0) is target
    np.testing.assert_array_equal(target, np.zeros(3))
    gathered = framework.allgather(np.full((rank + 1, 2), rank))
    np.testing.assert_array_equal(gathered[:, 0], np.repeat(np.arange(size), np.arange(size) + 1))
    np.testing.assert_array_equal(framework.reducescatter(np.arange(size) + rank), [size * rank + total])
    rows, received = framework.alltoall(np.full(size, rank), np.ones(size, dtype=np.int64))
    np.testing.assert_array_equal(rows, np.arange(size))
    assert (received.dtype, received.tolist()) == (np.dtype(np.int64), [1] * size)


def test_a_framework_is_checked_as_others_are(hvd: Any) -> None:
    with told(TypeError, "allreduce_async: name must be a string or None, got int"):
        framework.allreduce_async(np.zeros(1), 3)  # type: ignore[arg-type]
    with told(ValueError, "allgather: tensor must have at least one dimension", "HINT: use array.reshape(1)."):
        framework.allgather(np.array(1.0))
    with told(ValueError, "alltoall: splits must have one entry for each worker"):
        framework.alltoall(np.zeros(3), [1] * (hvd.size() + 1), "splits")


def test_ranks_of_two_frameworks_reduce_together(hvd: Any) -> None:
    if hvd.rank() == 0:
        result = framework.synchronize(framework.allreduce_async(np.ones(3, dtype=np.float32), "both"))
    else:
        result = hvd.allreduce(torch.ones(3), name="both", op=hvd.Sum).numpy()
    np.testing.assert_array_equal(result, np.full(3, hvd.size()))


def test_a_framework_trains_with_gradients_written_by_hand(hvd: Any) -> None:
    rank, size, rows = hvd.rank(), hvd.size(), 8
    numbers = np.random.default_rng(0)
    weights = [numbers.normal(size=(5, 4)), numbers.normal(size=(4, 2))]
    by_torch = [torch.tensor(weight, requires_grad=True) for weight in weights]
    weights = [framework.broadcast(weight + rank, 0) for weight in weights]  # others begin elsewhere
    for _ in range(3):
        inputs, wanted = numbers.normal(size=(size * rows, 5)), numbers.normal(size=(size * rows, 2))
        mine = slice(rank * rows, (rank + 1) * rows)
        framework.train(weights, inputs[mine], wanted[mine], rate=0.1)
        output = torch.relu(torch.tensor(inputs) @ by_torch[0]) @ by_torch[1]
        gradients = torch.autograd.grad((output - torch.tensor(wanted)).square().mean(), by_torch)
        with torch.no_grad():
            for weight, gradient in zip(by_torch, gradients, strict=True):
                weight -= 0.1 * gradient
    for weight, alone in zip(weights, by_torch, strict=True):
        np.testing.assert_allclose(weight, alone.detach().numpy(), rtol=1e-10)
        np.testing.assert_array_equal(weight, framework.broadcast(weight, 0))
    result, backward = framework.differentiable_sum(np.full(2, rank), "sum")
    np.testing.assert_array_equal(result, np.full(2, sum(range(size))))
    np.testing.assert_array_equal(backward(np.ones(2)), np.full(2, size))
