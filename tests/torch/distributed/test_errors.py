"""Calls that do not go together, lost ranks and ends of groups: an error on every rank, soon, that says what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.errors import ForkedChildError, HorovodInternalError, MismatchError, PeerLostError, StallError
from hvdkit.torch.distributed.session import open_session
from tests.on_ranks import on_ranks
from tests.ranks import TORCH, start_ranks
from tests.told import told
from tests.torch.distributed import ranks

two_and_three = on_ranks((2, "torch"), (3, "torch"), runner=ranks.RUNNER)
apart = on_ranks((3, "torch"), thorough=True, runner=ranks.RUNNER, name="apart", HVDKIT_NODE_MEMORY="0")

LARGE = 300_000
SECONDS = 3  # the timeout of groups that shall wait in vain


def group(seconds: float = 60) -> Any:
    """Return a group of all ranks, which may fail."""
    return dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=seconds))


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@two_and_three
@apart
def test_other_calls_in_the_same_place_are_an_error_on_all_ranks(hvd: Any) -> None:
    last, size = is_last(), dist.get_world_size()
    calls = {
        "all_reduce (sum) of 10 elements of float32": lambda on: dist.all_reduce(torch.ones(10), group=on),
        "all_reduce (max) of 10 elements of float32": lambda on: dist.all_reduce(
            torch.ones(10), op=dist.ReduceOp.MAX, group=on
        ),
        "all_reduce (sum) of 10 elements of int64": lambda on: dist.all_reduce(
            torch.ones(10, dtype=torch.int64), group=on
        ),
        f"all_reduce (sum) of {LARGE} elements of float32": lambda on: dist.all_reduce(torch.ones(LARGE), group=on),
        "broadcast of 10 elements of float32 with root 0": lambda on: dist.broadcast(torch.ones(10), 0, group=on),
        "broadcast of 10 elements of float32 with root 1": lambda on: dist.broadcast(torch.ones(10), 1, group=on),
        "all_gather of 10 elements of float32": lambda on: dist.all_gather_into_tensor(
            torch.ones(10 * size), torch.ones(10), group=on
        ),
        "barrier": lambda on: dist.barrier(group=on),
    }
    texts = list(calls)
    for first, second in zip(texts, texts[1:] + texts[:1], strict=True):
        on = group()
        with told(MismatchError, "operation 1", first, second, f"[{size - 1}]", "HINT"):
            calls[second if last else first](on)
        # The ranks of the group may be at different places of its order.
        with told(MismatchError, "an earlier operation", first):
            dist.all_reduce(torch.ones(1), group=on)
        dist.destroy_process_group(on)
    dist.barrier()


@two_and_three
@apart
def test_splits_that_do_not_go_together_are_an_error_on_all_ranks(hvd: Any) -> None:
    last, size = is_last(), dist.get_world_size()
    on = group()
    splits = [2, *[1] * (size - 1)]
    with told(MismatchError, "bytes to rank", "expects"):
        dist.all_to_all_single(
            torch.ones(size + 1), torch.ones(size + 1), splits if last else splits[::-1], splits, group=on
        )
    dist.destroy_process_group(on)


@two_and_three
def test_a_message_of_another_length_is_an_error_of_its_receiver(hvd: Any) -> None:
    if dist.get_rank() == 0:
        dist.send(torch.ones(10), 1)
    elif dist.get_rank() == 1:
        with told(MismatchError, "40 bytes", "80 bytes"):
            dist.recv(torch.ones(20), 0)
    dist.barrier()


@two_and_three
@apart
def test_a_rank_that_does_not_come_is_named_after_the_timeout_of_the_group(hvd: Any) -> None:
    on = group(SECONDS)
    if is_last():
        dist.barrier()
    else:
        # Between nodes a rank may not know yet that the parts of others have come.
        hint = (
            "HINT: all ranks of a group must call the same operations in the same order; if a rank may come later, "
            "give the group a longer timeout."
        )
        late = f"{dist.get_world_size() - 1}]: timed out.\n{hint}"
        with told(StallError, f" waited {SECONDS} s in ", late, "all_reduce"):
            dist.all_reduce(torch.ones(3), group=on)
        dist.barrier()
    on = group(SECONDS)
    if dist.get_rank() == 0:
        hint = (
            "HINT: check that the other rank makes the matching call, with the same tag; if that call may come later, "
            "give the group a longer timeout."
        )
        with told(StallError, f" waited {SECONDS} s in receive from ranks [1]", "tag 5", f": timed out.\n{hint}"):
            dist.recv(torch.ones(3), 1, group=on, tag=5)
    dist.barrier()


@two_and_three
def test_a_wait_has_a_limit_of_its_own_and_the_operation_goes_on(hvd: Any) -> None:
    last, tensor, token = dist.get_world_size() - 1, torch.ones(LARGE), torch.zeros(1)
    if is_last():
        for other in range(last):
            dist.recv(token, other)
        dist.all_reduce(tensor)
    else:
        work = dist.all_reduce(tensor, async_op=True)
        with told(StallError, "0.2 s", f"[{last}]"):
            work.wait(timedelta(seconds=0.2))
        dist.send(token, last)
        work.wait()
    assert tensor[0] == last + 1


@two_and_three
def test_waits_that_end_early_change_no_sum(hvd: Any) -> None:
    size = dist.get_world_size()
    for _ in range(20):
        tensor = torch.ones(8 * LARGE)
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(20):
            try:
                work.wait(timedelta(microseconds=50))
            except StallError:
                continue
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, float(size)))


@two_and_three
def test_a_group_may_be_destroyed_with_operations_in_flight(hvd: Any) -> None:
    for _ in range(15):
        on = group()
        works = [dist.all_reduce(torch.ones(LARGE), group=on, async_op=True) for _ in range(4)]
        dist.destroy_process_group(on)
        for work in works:
            try:
                work.wait()
            except HorovodInternalError as error:
                assert "destroyed" in str(error)  # noqa: PT017 (it may have ended before)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor[0] == dist.get_world_size()


@two_and_three
def test_a_group_that_has_an_earlier_one_s_name_is_another_group(hvd: Any) -> None:
    everyone = list(range(dist.get_world_size()))
    for _ in range(4):
        on = dist.new_group(everyone, use_local_synchronization=True)
        tensor = torch.ones(LARGE)
        dist.all_reduce(tensor, group=on)
        assert tensor[0] == len(everyone)
        dist.destroy_process_group(on)


@two_and_three
def test_a_result_that_has_no_place_is_an_error_of_that_call_alone(hvd: Any) -> None:
    for elements in (3, LARGE):
        with told((HorovodInternalError, RuntimeError), "single memory location"):
            dist.all_reduce(torch.ones(1).expand(elements))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == dist.get_world_size()


@two_and_three
def test_groups_of_different_ranks_in_different_order_do_not_hang(hvd: Any) -> None:
    rank = dist.get_rank()
    first, second = group(), group()
    one, other = torch.ones(LARGE), torch.ones(LARGE)
    works = [
        dist.all_reduce(one if on is first else other, group=on, async_op=True)
        for on in ((first, second) if rank == 0 else (second, first))
    ]
    for work in works:
        work.wait()
    assert one[0] == other[0] == dist.get_world_size()


@two_and_three
def test_a_group_that_was_destroyed_says_so(hvd: Any) -> None:
    on = group()
    inner = on
    dist.destroy_process_group(on)
    with told(HorovodInternalError, "destroyed"):
        inner.allreduce([torch.ones(2)]).wait()


@two_and_three
def test_a_fork_cannot_communicate(hvd: Any) -> None:
    child = os.fork()
    if child == 0:
        calls = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.send(torch.ones(3), 1 - min(dist.get_rank(), 1))]
        errors = []
        for call in calls:
            try:
                call()
            except ForkedChildError as error:
                errors.append(error)
        os._exit(7 if len(errors) == len(calls) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


PROGRAM = """
import os, signal, sys, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from hvdkit import autoload
warnings.simplefilter("ignore")
autoload.register()
dist.init_process_group("hvdkit")
rank, way = dist.get_rank(), sys.argv[1]
def leave():
    if way == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if way == "leaves": dist.destroy_process_group(); sys.exit()
    raise ZeroDivisionError("on purpose")
net = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.Linear(700, 700))
if sys.argv[2] == "fsdp":
    from torch.distributed.fsdp import fully_shard
    for layer in net: fully_shard(layer)
    model = fully_shard(net)
else:
    model = DistributedDataParallel(net)
    if rank == 1: next(net.parameters()).register_hook(lambda gradient: leave() if step == 3 else None)
for step in range(100):
    output = model(torch.ones(2, 64))
    if rank == 1 and step == 3 and sys.argv[2] == "fsdp": output.register_hook(lambda gradient: leave())
    output.sum().backward()
"""


def test_a_lost_rank_is_an_error_of_all_others_in_backward_passes_of_ddp_and_fsdp() -> None:
    for kind in ("ddp", "fsdp"):
        for way, words in (("killed", "is lost"), ("leaves", "has left the job"), ("raises", "rank 1")):
            command = [sys.executable, "-c", PROGRAM, way, kind]
            processes = start_ranks(command, 3, "torch", preload=TORCH)
            outputs = [finished(process) for process in processes]
            for rank in (0, 2):
                status, output = outputs[rank]
                assert status == 1, (kind, way, rank, status, output)
                assert "PeerLostError" in output, (kind, way, output)
                assert words in output, (kind, way, output)


def finished(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_a_rank_that_does_not_come_to_the_default_group_is_named() -> None:
    fact = "rank 0 waited 0.1 s for ranks [1] to make the group."
    with told(PeerLostError, fact, "HINT: see what these ranks printed; all ranks must call init_process_group."):
        open_session(dist.HashStore(), 2, 0, 0.1)


@two_and_three
def test_a_monitored_barrier_names_the_ranks_that_do_not_come(hvd: Any) -> None:
    size = dist.get_world_size()
    for waits_for_all in (False, True):
        on = group()
        if dist.get_rank() == 0:
            late = list(range(1, size)) if waits_for_all else [1]
            fact = f"': ranks {late} did not come within 1 s."
            hint = (
                "HINT: see what these ranks are doing (py-spy dump), and whether they take another path through the "
                "script."
            )
            with told(StallError, "monitored_barrier of group '", f"{fact}\n{hint}"):
                on.monitored_barrier(timedelta(seconds=1), wait_all_ranks=waits_for_all)
        dist.barrier()
        if dist.get_rank() > 0:
            with told(StallError, "waited 1 s"):
                on.monitored_barrier(timedelta(seconds=1))
        dist.barrier()


@two_and_three
def test_calls_end_when_their_group_is_aborted(hvd: Any) -> None:
    on = group()
    if is_last():
        work = dist.all_reduce(torch.ones(3), group=on, async_op=True)
        on.abort()
        with told(HorovodInternalError, "was destroyed"):
            work.wait()
    dist.barrier()


ABORTED = """
import torch, torch.distributed as dist
from hvdkit import autoload
autoload.register()
dist.init_process_group("cpu:hvdkit,cuda:nccl")
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor[0] == dist.get_world_size()
if dist.get_rank() == 0: dist.group.WORLD.abort()
else: dist.all_reduce(tensor)
"""


def test_the_end_of_a_default_group_that_is_aborted_reaches_the_others() -> None:
    processes = start_ranks([sys.executable, "-c", ABORTED], 2, "torch", preload=TORCH)
    (first, printed), (second, output) = [finished(process) for process in processes]
    assert first == 0, printed
    assert second == 1
    assert "which has left the job: it called abort()" in output


OLDER = """
import torch
torch.__version__ = "2.6.0"
frames = torch._C._dynamo.eval_frame
del frames._FrameExecStrategy, frames.set_code_exec_strategy
import hvdkit.torch as hvd
hvd.init()
assert hvd.allreduce(torch.ones(3)).tolist() == [1.0] * 3
from hvdkit import autoload
autoload.register()
torch.distributed.init_process_group("hvdkit", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
"""


def test_an_older_pytorch_has_all_but_the_backend() -> None:
    result = subprocess.run([sys.executable, "-c", OLDER], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "RuntimeError: the backend hvdkit needs PyTorch 2.13 or later, this is 2.6.0\nHINT: use" in result.stderr


FROM_ANY = """
import torch, torch.distributed as dist
from hvdkit import autoload
autoload.register()
dist.init_process_group("hvdkit")
if dist.get_rank() == 0: dist.recv(torch.ones(3))
dist.destroy_process_group()
"""


def test_a_receive_from_any_rank_ends_when_all_have_left() -> None:
    processes = start_ranks([sys.executable, "-c", FROM_ANY], 3, "torch", preload=TORCH)
    (status, output), *others = [finished(process) for process in processes]
    assert [other for other, _ in others] == [0, 0]
    assert status == 1
    fact = r"PeerLostError: receive from ranks \[1, 2\].*: all senders have left the job, rank ([12]) last\.\n"
    assert re.search(rf"{fact}.*HINT: see what rank \1 printed\. All ranks must make the same calls: ", output), output


BESIDE_GLOO = """
import torch, torch.distributed as dist
from hvdkit import autoload
autoload.register()
dist.init_process_group("gloo")
group = dist.new_group(list(range(dist.get_world_size())), backend="hvdkit")
tensor = torch.ones(300000)
dist.all_reduce(tensor, group=group)
dist.destroy_process_group(group)
print("sum", tensor[0].item())
dist.destroy_process_group()
"""


def test_a_group_may_be_of_hvdkit_where_the_default_group_is_not() -> None:
    processes = start_ranks([sys.executable, "-c", BESIDE_GLOO], 2, "torch", preload=TORCH)
    for status, output in [finished(process) for process in processes]:
        assert status == 0, output
        assert "sum 2.0" in output, output
