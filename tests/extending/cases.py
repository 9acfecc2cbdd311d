"""What stands outside of hvdkit and registers itself does all that the built-in ones do, on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdkit.compression import PayloadCodec
from hvdkit.engine import runtime
from hvdkit.engine.requests import Call
from tests.extending import shift  # noqa: F401 (it registers itself)
from tests.extending.running_sign import MAGNITUDE, RunningSign
from tests.ranks import Skip
from tests.told import told


def case_errors_that_scripts_catch_and_the_base_of_codecs_are_there(hvd: Any) -> None:
    for name in ("PeerLostError", "StallError", "PayloadError"):
        assert issubclass(getattr(hvd, name), hvd.HorovodInternalError)
    assert hvd.CustomCodec in PayloadCodec.__subclasses__()


def start_shift(array: np.ndarray, name: str) -> Any:
    fields = {"dtype": [array.dtype.name], "shape": [list(array.shape)]}
    return runtime.engine().submit("shift", [array], fields, Call(name))


def case_an_operation_gives_its_result(hvd: Any) -> None:
    hvd.barrier()  # all ranks have imported it, as they must before any asks for it
    for number in range(3):  # a repeated signature travels as a number
        came = start_shift(np.full((2, 3), 10 * number + hvd.rank()), "shifted").wait()
        np.testing.assert_array_equal(came, np.full((2, 3), 10 * number + (hvd.rank() - 1) % hvd.size()))


def case_an_operation_is_checked_on_all_ranks(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs two ranks")
    with told(hvd.HorovodInternalError, "Mismatched shapes for shift 'clash'", "rank 0", "[2]", "[1]"):
        start_shift(np.zeros(2 if hvd.rank() == 0 else 1), "clash").wait()
    with told(hvd.HorovodInternalError, "Mismatched operations for 'kinds'", "sent shift", "sent allreduce"):
        if hvd.rank() == 0:
            start_shift(np.zeros(2), "kinds").wait()
        else:
            hvd.allreduce(torch.zeros(2), name="kinds")


def case_an_operation_without_zeros_does_not_go_with_join(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs two ranks")
    if hvd.rank() == 0:
        with told(hvd.HorovodInternalError, "shift is not supported with Join"):
            start_shift(np.zeros(2), "joined").wait()
    hvd.join()


def case_a_codec_trains_and_keeps_its_state(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs two ranks")
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
        lane = next(lane for lane in runtime.engine().lanes.values() if lane.home.memories.keeps_anything)
        kept = lane.home.memories.of_bucket(0).shared.numbers
        magnitudes.append([number for (name, _, _), number in sorted(kept.items()) if name == MAGNITUDE])
    assert len(magnitudes[0]) >= 1
    assert magnitudes[0] != magnitudes[1]
    weights = hvd.allgather_object(model.weight.detach().numpy())
    assert all(np.array_equal(one, weights[0]) for one in weights)
    # What was handed on and what is kept is all that came in.
    residuals = hvd.allreduce(torch.from_numpy(lane.home.memories.of_slot(0)["residual"].copy()), name="kept")
    went = (start - model.weight.detach()) / 0.1
    torch.testing.assert_close(went.flatten() + residuals, total.flatten(), rtol=1e-3, atol=1e-4)
    assert any(name.startswith("running_sign(") for name in hvd.compression_stats().by_codec)
