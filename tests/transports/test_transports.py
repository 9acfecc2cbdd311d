"""What every transport must hold on real ranks."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest
import torch

from hvdkit.engine.session import runtime
from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.test_timeline import recorded
from tests.transports.shared import grown, held, in_thread, shared_files
from tests.waiting import until

# An operation that lacks a rank is an error after 60 s, which names it.
LATER_THAN_A_STALL_SECONDS = 180

pytestmark = on_ranks(1, 2, 3, 4, every_size=True)


def good_allreduce(hvd) -> None:
    result = hvd.allreduce(torch.full((3,), float(hvd.rank())), op=hvd.Sum)
    assert result.tolist() == [sum(range(hvd.size()))] * 3


def use(hvd, number: int) -> None:
    """All that takes memory of the node: messages, staged tensors, buckets."""
    total = hvd.allreduce(torch.full((30_000,), 1.0 + hvd.rank()), op=hvd.Sum, name=f"round{number}")
    assert total.unique().tolist() == [sum(range(hvd.size() + 1))]
    assert hvd.broadcast_object(number, root_rank=hvd.size() - 1) == number
    model = torch.nn.Linear(300, 10)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()


def test_init_again_after_shutdown_works_and_leaks_nothing(hvd):
    files = shared_files()
    for number in range(15):
        hvd.shutdown()
        assert not hvd.is_initialized()
        until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("hvdkit-")])
        if number == 5:  # whatever the first rounds open for good
            before = held()
        hvd.init()
        hvd.init()  # a second call does nothing
        good_allreduce(hvd)
        if number % 2:
            use(hvd, number)
    hvd.shutdown()
    until(lambda: not grown(before, held()), 10.0)
    assert before["mapped"] == 0
    until(lambda: not shared_files() - files, 10.0, lambda: shared_files() - files)
    hvd.init()


def test_long_control_messages_arrive_whole(hvd):
    # Thousands of parameters make a plan's request longer than any frame.
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(1500)]
    names = [(f"a.rather.long.name.of.a.parameter.{number}", one) for number, one in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named_parameters=names)
    for one in parameters:
        one.grad = torch.full((2,), float(hvd.rank()))
    optimizer.step()
    expected = -(hvd.size() - 1) / 2
    assert all(one.tolist() == [expected, expected] for one in parameters)


def test_several_threads_may_use_the_engine_at_once(hvd):
    def work(number: int) -> None:
        for step in range(20):
            result = hvd.allreduce(torch.ones(50) * number, op=hvd.Sum, name=f"thread{number}.{step}")
            assert result.tolist() == [float(number * hvd.size())] * 50

    for outcome in [in_thread(work, number) for number in range(4)]:
        outcome.result(LATER_THAN_A_STALL_SECONDS)


def test_the_timeline_is_valid_and_has_a_row_for_each_tensor(hvd):
    with recorded(hvd) as shown:
        hvd.allreduce(torch.ones(10), name="seen")
        hvd.grouped_allreduce([torch.ones(10), torch.ones(20)], name="together")
        parameter = torch.nn.Parameter(torch.ones(100))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("weight", parameter)])
        for _ in range(2):
            (parameter * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert bool(shown) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        assert any("seen" in one.row for one in shown), shown
        copied = {"MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"}
        assert {"NEGOTIATE_ALLREDUCE", *copied} <= {one.name for one in shown}
    if shown and hvd.size() > 1:
        reduced = [one.args for one in shown if one.name == "ALLREDUCE"]
        assert any(args.get("operations") == 1 and "bytes" in args["reason"] for args in reduced), reduced
        ordered = [args for args in reduced if "order" in args]
        assert ordered, reduced
        assert all(args["size"] and args["algorithm"] and " of " in args["order"] for args in ordered), ordered
        on_buckets = {one.name for one in shown if "bucket" in one.row}
        assert {"WAIT_FOR_TURN", "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE"} <= on_buckets, on_buckets


def test_an_array_of_more_bytes_than_one_message_arrives(hvd):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hvdkit.transports.mpi.LARGEST_MESSAGE", 4096)
        values = torch.arange(100_000, dtype=torch.float64)
        assert torch.equal(hvd.allreduce(values, op=hvd.Average), values)


def test_ranks_that_share_memory_keep_no_connections_and_no_threads_for_each_other(hvd):
    if runtime.engine().transport.name != "torch":
        return
    transport = runtime.engine().transport
    together = getattr(transport, "members", [hvd.rank()])
    serving = [thread.name for thread in threading.enumerate() if thread.name == "hvdkit-control"]
    if len(together) < hvd.size():
        assert len(serving) == 1  # for all peers
    else:
        assert not serving
        assert sum(stat.S_ISSOCK(one.stat().st_mode) for one in Path("/proc/self/fd").iterdir() if one.exists()) <= 4
    good_allreduce(hvd)


def test_communication_statistics_count_bytes(hvd):
    before = hvd.communication_stats()
    hvd.allreduce(torch.ones(1 << 16))
    after = hvd.communication_stats()
    sent = after.bytes_sent - before.bytes_sent
    assert abs(sent - 2 * 4 * (1 << 16) * (hvd.size() - 1) // hvd.size()) <= 256
    assert after.seconds >= before.seconds


def test_a_process_group_of_the_user_is_left_alone(hvd):
    if runtime.engine().transport.name != "torch":
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        for _ in range(5):
            handle = hvd.allreduce_async(torch.ones(1000))
            mine = torch.full((4,), float(hvd.rank()))
            dist.all_reduce(mine)
            assert mine.tolist() == [sum(range(hvd.size()))] * 4
            hvd.synchronize(handle)
        hvd.shutdown()
        hvd.init()  # bootstraps from the user's group
        good_allreduce(hvd)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    good_allreduce(hvd)


def test_settings_that_decide_the_layout_are_those_of_rank_0(hvd):
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_FUSION_THRESHOLD", str(1000 * (rank + 1)))
        hvd.init()
        assert runtime.engine().settings.fusion_threshold == 1000
        parameters = [torch.nn.Parameter(torch.zeros(200)) for _ in range(4)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for _ in range(2):
            for one in parameters:
                one.grad = torch.full((200,), float(rank))
            optimizer.step()
        assert all(one[0].item() == -2 * (size - 1) / 2 for one in parameters)
    hvd.shutdown()
    hvd.init()


def test_different_static_process_sets_are_an_error_on_every_rank(hvd):
    if hvd.size() == 1:
        return
    rank = hvd.rank()
    hvd.shutdown()
    hint = "HINT: pass the same sets, in the same order, on all ranks."
    with told(hvd.HorovodInternalError, "hvd.init() was given different process sets: ", f".\n{hint}"):
        hvd.init(process_sets=[hvd.ProcessSet([rank % 2])])
    hvd.init()
    good_allreduce(hvd)


def test_some_ranks_make_a_smaller_job_while_others_call_nothing(hvd):
    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    for members in (list(range(1, size)), list(range(max(1, size - 1)))):  # without rank 0, and without the last one
        if rank in members:  # only these call init
            hvd.init(comm=members)
            assert (hvd.rank(), hvd.size()) == (members.index(rank), len(members))
            good_allreduce(hvd)
            hvd.shutdown()
        elif rank > 0:
            fact = f"init(): argument comm: rank {rank} is not among {members}."
            with told(ValueError, f"{fact}\nHINT: call hvd.init(comm=ranks) only on the ranks in comm."):
                hvd.init(comm=members)
    hvd.init()
    good_allreduce(hvd)
    assert (hvd.rank(), hvd.size()) == (rank, size)
