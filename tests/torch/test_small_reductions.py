"""Small allreduces that the ranks of a node call in the same order: reduced without the coordinator."""

from __future__ import annotations

import os
import threading

import torch

from hvdkit import kernels
from hvdkit.engine.ranks import turns
from hvdkit.engine.ranks.turns import SKIPPED_TURNS, VAIN_TURNS
from hvdkit.engine.session import runtime
from tests.on_ranks import on_ranks
from tests.ranks import Skip
from tests.scale_factors import PRODUCTS
from tests.told import told
from tests.torch.data import equal
from tests.transports.shared import in_thread

pytestmark = on_ranks(2, 3, 4, HOROVOD_DYNAMIC_PROCESS_SETS="1")

TIMES = 50


def small_reductions():
    """Return the small reductions of all ranks; None where they cannot reduce anything themselves."""
    return runtime.engine().groups.small_reductions.get(0)


def needs_turns():
    if kernels.backend() != "native":
        raise Skip("needs the native kernels")
    assert small_reductions() is not None


def numbers(rank, step, elements=33):
    return torch.linspace(-1, 1, elements) * (rank + 1) + step / 7


def expected(hvd, step, average=False):
    total = numbers(0, step)
    for rank in range(1, hvd.size()):
        total = total + numbers(rank, step)
    return total / hvd.size() if average else total


def test_calls_in_the_same_order_go_without_the_coordinator_if_ranks_have_a_core_each(hvd):
    hvd.shutdown()
    os.sched_getaffinity = lambda process: set(range(64))  # for all cases: a machine may have fewer than ranks
    hvd.init()
    hvd.allreduce(torch.ones(3), name="first")  # makes the ranks' memory
    if kernels.backend() != "native":
        assert small_reductions() is None
        raise Skip("needs the native kernels")
    needs_turns()
    patience, turns.PATIENCE_SECONDS = turns.PATIENCE_SECONDS, 10.0  # on a busy machine ranks come late
    for _ in range(TIMES):
        hvd.allreduce(torch.ones(3), name="again")
        hvd.allreduce(torch.ones(3))
    assert small_reductions().reduced == 2 * TIMES
    turns.PATIENCE_SECONDS = patience
    hvd.barrier()


def test_the_same_bits_as_the_first_time(hvd):
    for step in range(TIMES):
        tensor = numbers(hvd.rank(), step)
        got = hvd.allreduce(tensor, name="sum", op=hvd.Sum)
        assert equal(got, expected(hvd, step)), step
        assert equal(tensor, numbers(hvd.rank(), step))
        in_place = tensor.clone()
        assert hvd.allreduce_(in_place, name="in.place") is in_place
        assert equal(in_place, expected(hvd, step, average=True)), step
    hvd.barrier()


def test_types_shapes_and_operations_are_told_apart(hvd):
    size = hvd.size()
    for step in range(8):
        for dtype in (torch.float32, torch.float64, torch.int32, torch.bfloat16):
            got = hvd.allreduce(torch.full((3,), 2, dtype=dtype), name=f"typed.{dtype}", op=hvd.Sum)
            assert equal(got, torch.full((3,), 2 * size, dtype=dtype))
        assert equal(hvd.allreduce(torch.tensor(float(hvd.rank())), name="max", op=hvd.Max), torch.tensor(size - 1.0))
        got = hvd.allreduce(torch.ones(2), name="scaled", op=hvd.Sum, postscale_factor=0.5)
        assert equal(got, torch.full((2,), 0.5 * size))
        got = hvd.allreduce(torch.ones(2), name="scaled.before", op=hvd.Sum, prescale_factor=0.5)
        assert equal(got, torch.full((2,), 0.5 * size))
        for name, ((element, factor, product), *_) in PRODUCTS.items():
            tensor = torch.full((5,), element if hvd.rank() == 0 else 0, dtype=getattr(torch, name))
            got = hvd.allreduce(tensor, name=f"factor.{name}", op=hvd.Sum, postscale_factor=factor)
            assert equal(got, torch.full((5,), product, dtype=tensor.dtype)), (name, factor)
        # One name, of which the shape changes now and then.
        count = 4 if step % 4 else 5
        assert equal(hvd.allreduce(torch.ones(count), name="changing", op=hvd.Sum), torch.full((count,), float(size)))


def test_calls_without_a_name_meet_by_their_numbers(hvd):
    rank = hvd.rank()
    for step in range(TIMES):
        assert equal(hvd.allreduce(numbers(rank, step), op=hvd.Sum), expected(hvd, step))
        waits = (step + rank) % 4 != 0
        got = (hvd.allreduce if waits else hvd.allreduce_async)(numbers(rank, step + 1), op=hvd.Sum)
        other = hvd.allreduce(torch.ones(2), op=hvd.Sum)
        assert equal(got if waits else hvd.synchronize(got), expected(hvd, step + 1))
        assert equal(other, torch.full((2,), float(hvd.size())))


def test_calls_without_a_name_in_another_order_are_an_error(hvd):
    shapes = (3, 4)
    for _ in range(4):
        for shape in shapes:
            hvd.allreduce(torch.ones(shape))
    first, second = shapes if hvd.rank() == 0 else reversed(shapes)
    for shape in (first, second):
        with told(hvd.HorovodInternalError, "Mismatched shapes", "[3]", "[4]"):
            hvd.allreduce(torch.ones(shape))
    for step in range(4):
        assert equal(hvd.allreduce(numbers(hvd.rank(), step), op=hvd.Sum), expected(hvd, step))


def test_what_failed_once_is_reduced_later(hvd):
    for name in ("failing", None):
        for _ in range(3):
            hvd.allreduce(torch.ones(4), name=name)
        with told(hvd.HorovodInternalError, "Mismatched shapes"):
            hvd.allreduce(torch.ones(3 + (hvd.rank() == 0)), name=name)
        for step in range(3):
            assert equal(hvd.allreduce(numbers(hvd.rank(), step), name=name, op=hvd.Sum), expected(hvd, step))


def test_ranks_that_made_different_numbers_of_calls_meet_again(hvd):
    needs_turns()
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(4), name="twice")
        for _ in range(3):  # each takes a turn on this rank alone
            with told(ValueError, "twice", "currently being processed"):
                hvd.allreduce_async(torch.ones(4), name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(4), name="twice")
    hvd.synchronize(handle)
    for step in range(4):
        assert equal(hvd.allreduce(numbers(hvd.rank(), step), name="after", op=hvd.Sum), expected(hvd, step))
    assert len(set(hvd.allgather_object(small_reductions().turn))) == 1


def test_ranks_that_wait_in_vain_stop_waiting_for_a_while(hvd):
    needs_turns()
    rounds = VAIN_TURNS + 2 * SKIPPED_TURNS
    names = ["a", "b"] if hvd.rank() == 0 else ["b", "a"]
    for step in range(rounds):
        # In another order on one rank: two threads, since each waits for its result.
        results = {}

        def reduce(name, results=results, step=step):
            results[name] = hvd.allreduce(numbers(hvd.rank(), step), name=name, op=hvd.Sum)

        for outcome in [in_thread(reduce, name) for name in names]:
            outcome.result(60)
        assert all(equal(results[name], expected(hvd, step)) for name in names)
    hvd.barrier()
    before, patience, turns.PATIENCE_SECONDS = small_reductions().reduced, turns.PATIENCE_SECONDS, 10.0
    for step in range(4 * SKIPPED_TURNS):
        assert equal(hvd.allreduce(numbers(hvd.rank(), step), name="in order", op=hvd.Sum), expected(hvd, step))
    assert small_reductions().reduced > before
    turns.PATIENCE_SECONDS = patience


def test_calls_of_two_threads_never_cross(hvd):
    needs_turns()
    sent, steps, rank = hvd.communication_stats().bytes_sent, 300, hvd.rank()
    wrong = []

    def repeat(name, base):
        both.wait()
        for step in range(steps):
            got = hvd.allreduce(torch.full((500,), float(base + rank)), name=name, op=hvd.Sum)
            if not equal(got, torch.full((500,), float(sum(base + each for each in range(hvd.size()))))):
                wrong.append((name, step))

    both = threading.Barrier(2, timeout=60)
    for outcome in [in_thread(repeat, "old", 1000), in_thread(repeat, "new", 1)]:
        outcome.result(120)
    assert not wrong
    assert hvd.communication_stats().bytes_sent - sent >= 2 * steps * 2000, "what ranks reduce alone counts too"


def test_process_sets_have_their_own(hvd):
    if hvd.size() < 3:
        raise Skip("needs three ranks")
    some = hvd.add_process_set([0, 2])
    for step in range(8):
        if some.included():
            got = hvd.allreduce(torch.full((2,), float(hvd.rank() + step)), name="of.set", op=hvd.Sum, process_set=some)
            assert equal(got, torch.full((2,), 2.0 + 2 * step))
        got = hvd.allreduce(torch.full((2,), 1.0), name="of.set", op=hvd.Sum)
        assert equal(got, torch.full((2,), float(hvd.size())))
    hvd.remove_process_set(some)
    with told(ValueError, "must be registered"):
        hvd.allreduce(torch.ones(2), name="of.set", op=hvd.Sum, process_set=some)


def test_joined_ranks_give_zeros(hvd):
    size, rank = hvd.size(), hvd.rank()
    for _ in range(4):
        hvd.allreduce(torch.ones(4), name="uneven", op=hvd.Sum)
    for step in range(4 * rank):
        contributors = size - 1 - step // 4
        got = hvd.allreduce(torch.ones(4), name="uneven", op=hvd.Sum)
        assert equal(got, torch.full((4,), float(contributors))), step
    hvd.join()
    for _ in range(4):
        assert equal(hvd.allreduce(torch.ones(4), name="uneven", op=hvd.Sum), torch.full((4,), float(size)))
