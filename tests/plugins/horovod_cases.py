"""What Horovod's engine carries, what it is not given, and what comes of it."""

from __future__ import annotations

import hashlib
import os

import torch

from hvdkit.engine.session import runtime
from hvdkit.plugins.horovod import engine as horovod_engine
from hvdkit.plugins.horovod.engine import HorovodGroup
from tests.transports.launched import COUNT, launches, model_and_optimizer

_launch = HorovodGroup.launch


def _counted(self, *arguments):
    COUNT[0] += 1
    return _launch(self, *arguments)


HorovodGroup.launch = _counted


def trained(hvd, steps=3, **arguments):
    model, optimizer = model_and_optimizer(hvd, **arguments)
    for step in range(steps):
        torch.manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def case_horovods_engine_is_there_and_messages_go_by_what_connects_the_ranks(hvd):
    transport = runtime.engine().transport
    assert (transport.name, transport.carrier) == (
        "horovod",
        "mpi" if "OMPI_COMM_WORLD_RANK" in os.environ else "torch",
    )


def case_gradients_go_by_horovods_engine(hvd):
    def train():
        trained(hvd)
        assert all(lane.on_device for lane in runtime.engine().lanes.values())

    assert launches(train) >= 3


def case_process_sets_stay_with_our_own_algorithms(hvd):
    hvd.shutdown()
    members = list(range(hvd_size() - 1)) or [0]
    pair = hvd.ProcessSet(members)
    hvd.init(process_sets=[pair])

    def use():
        if pair.included():
            own = torch.full((5,), float(hvd.rank() + 1))
            total = hvd.allreduce(own, op=hvd.Sum, process_set=pair)
            assert total.tolist() == [sum(rank + 1.0 for rank in members)] * 5
            assert hvd.allgather(own[:1], process_set=pair).tolist() == [rank + 1.0 for rank in members]
            trained(hvd, process_set=pair)

    assert launches(use) == 0
    hvd.barrier()
    hvd.shutdown()
    hvd.init()


def hvd_size() -> int:
    return int(os.environ["RANKS_PER_NODE"])


def case_lossy_codecs_are_encoded_by_our_own_kernels(hvd):
    model, optimizer = model_and_optimizer(hvd, compression=hvd.Compression.int8(compress="everywhere"))
    model(torch.ones(4, 5)).square().sum().backward()
    optimizer.step()
    assert runtime.engine().lanes
    assert not any(lane.on_device for lane in runtime.engine().lanes.values())
    del model, optimizer


def case_every_type_is_summed_moved_and_gathered(hvd):
    size, rank = hvd.size(), hvd.rank()
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype in (*floats, torch.uint8, torch.int8, torch.int32, torch.int64):
        own = torch.arange(7).add(rank).to(dtype)
        expected = sum(torch.arange(7).add(other).to(dtype) for other in range(size))
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), expected), dtype
        assert torch.equal(hvd.allreduce(own, op=hvd.Max), torch.arange(7).add(size - 1).to(dtype)), dtype
        assert torch.equal(hvd.allreduce(own, op=hvd.Min), torch.arange(7).to(dtype)), dtype
    for dtype in (*floats, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool):
        own = torch.arange(7).add(rank).to(dtype)
        root = size - 1
        assert torch.equal(hvd.broadcast(own, root), torch.arange(7).add(root).to(dtype)), dtype
        rows = hvd.allgather(own[: rank + 1])
        assert torch.equal(rows, torch.cat([torch.arange(r + 1).add(r).to(dtype) for r in range(size)])), dtype


def case_all_ranks_and_all_runs_hold_the_same_bits(hvd):
    def digest(tensor):
        return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()

    for count in (1, 1001, 300_001):
        torch.manual_seed(hvd.rank())
        own = torch.randn(count)
        first, second = (digest(hvd.allreduce(own, op=hvd.Average)) for _ in range(2))
        assert set(hvd.allgather_object(first)) == {second}
    first, second = (digest(trained(hvd)) for _ in range(2))
    assert set(hvd.allgather_object(first)) == {second}


def case_what_horovod_cannot_count_goes_in_pieces(hvd):
    size, rank = hvd.size(), hvd.rank()
    before, horovod_engine.LARGEST = horovod_engine.LARGEST, 7
    try:
        own = torch.arange(50.0).add(rank)
        assert torch.equal(hvd.allreduce(own, op=hvd.Sum), sum(torch.arange(50.0).add(r) for r in range(size)))
        halves = hvd.allreduce(own.half(), op=hvd.Sum)
        assert torch.equal(halves, sum(torch.arange(50.0).add(r) for r in range(size)).half())
        assert torch.equal(hvd.broadcast(own, size - 1), torch.arange(50.0).add(size - 1))
        gathered = hvd.allgather(own[: 10 + rank])
        assert torch.equal(gathered, torch.cat([torch.arange(10.0 + r).add(r) for r in range(size)]))
    finally:
        horovod_engine.LARGEST = before


def case_nothing_of_horovods_place_stays_in_the_environment(hvd):
    assert not [name for name in os.environ if name.startswith(("HOROVOD_GLOO", "HOROVOD_RANK", "HOROVOD_CONTROLLER"))]
    assert os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") == "60"
