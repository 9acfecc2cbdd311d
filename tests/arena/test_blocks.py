"""What the arena of one process does: which tensors are born there, what becomes of their memory."""

from __future__ import annotations

import os
import queue
import random
from typing import Any

import torch

from hvdkit.arena import ARENA, Arena
from tests.arena.blocks import MIB, born, counts, lies_in_arena, peer_of, populated, served, used
from tests.on_ranks import on_ranks
from tests.transports.shared import in_thread, needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files, on_ranks((1, "torch"))]

STEPS_UNTIL_MEMORY_IS_FORGOTTEN = 64
WORTH_GIVING_BACK = 16 * MIB


class AllocatesInBackward(torch.autograd.Function):
    """Makes tensors of some sizes where autograd makes gradients."""

    sizes: tuple[int, ...] = ()
    made: tuple[torch.Tensor, ...] = ()

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        cls = AllocatesInBackward
        cls.made = tuple(torch.empty(nbytes, dtype=torch.uint8) for nbytes in cls.sizes)
        return gradient


def test_registered_sizes_are_served_in_backward_passes_and_on_request_only(hvd):
    with served(MIB):
        assert not lies_in_arena(torch.empty(MIB, dtype=torch.uint8))
        assert lies_in_arena(born(MIB))
        assert not lies_in_arena(torch.empty(MIB, dtype=torch.uint8))
        AllocatesInBackward.sizes = (MIB, MIB + 64, MIB - 64, 64)
        AllocatesInBackward.apply(torch.ones(1, requires_grad=True)).backward()
        assert [lies_in_arena(one) for one in AllocatesInBackward.made] == [True, False, False, False]
        AllocatesInBackward.made = ()
        weight = torch.nn.Parameter(torch.ones(MIB // 4))
        (weight * 2).sum().backward()
        assert lies_in_arena(weight.grad)
        with ARENA.serving():  # of this thread alone
            assert not lies_in_arena(in_thread(torch.empty, MIB // 4).result())
        with served(MIB, 2 * MIB):
            assert lies_in_arena(born(2 * MIB))
        assert lies_in_arena(born(MIB)), "a size is served until it was removed as often as it was added"
        assert not lies_in_arena(born(2 * MIB))
    assert not lies_in_arena(born(MIB))  # of no size any more


def test_blocks_are_whole_and_come_back_whoever_frees_them_in_whatever_order(hvd):
    sizes = [65536, 70000, 262144, MIB]
    before = used()
    passed: queue.Queue[tuple[torch.Tensor, int]] = queue.Queue()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        kept: list[tuple[torch.Tensor, int]] = []
        for number in range(200):
            value = draw.randrange(256)
            tensor = born(draw.choice(sizes)).fill_(value)
            assert lies_in_arena(tensor)
            (kept.append if number % 2 else passed.put)((tensor, value))
            del tensor
            if draw.random() < 0.5 and kept:
                one, expected = kept.pop(draw.randrange(len(kept)))
            else:
                one, expected = passed.get()
                passed.put((torch.zeros(1, dtype=torch.uint8), 0))  # so that nobody waits in vain
            assert bool((one == expected).all()), "a block has bytes of another one"

    with served(*sizes):
        for outcome in [in_thread(work, seed) for seed in range(8)]:
            outcome.result()
        while not passed.empty():
            passed.get()
    assert used() == before


def test_freed_blocks_are_used_for_other_sizes_before_the_arena_grows(hvd):
    with served(MIB, 2 * MIB, 3 * MIB):
        ARENA.trim()
        blocks = [born(MIB) for _ in range(6)]
        grown = populated()
        del blocks
        larger = [born(2 * MIB), born(2 * MIB), born(2 * MIB)]
        assert populated() == grown
        del larger
        mixed = [born(3 * MIB), born(MIB), born(2 * MIB)]
        assert populated() == grown
        mixed.append(born(MIB))
        assert populated() == grown + MIB
        del mixed


def test_memory_that_no_step_needs_any_more_goes_back_after_a_while_and_not_before(hvd):
    with served(MIB, 64 * MIB):
        ARENA.trim()
        least = populated()
        for _ in range(STEPS_UNTIL_MEMORY_IS_FORGOTTEN):  # nothing is remembered of the cases before
            ARENA.end_step()
        large = born(64 * MIB)
        del large
        for _ in range(STEPS_UNTIL_MEMORY_IS_FORGOTTEN):
            born(MIB)
            assert populated() == least + 64 * MIB
            ARENA.end_step()
        for _ in range(STEPS_UNTIL_MEMORY_IS_FORGOTTEN):
            born(MIB)
            ARENA.end_step()
        assert populated() <= least + MIB + WORTH_GIVING_BACK
        born(64 * MIB)
        grown = populated()
        for step in range(3 * STEPS_UNTIL_MEMORY_IS_FORGOTTEN):  # that need the same in turn
            born(64 * MIB if step % 4 == 0 else MIB)
            assert populated() == grown
            ARENA.end_step()


def test_trim_gives_back_all_that_no_tensor_has(hvd):
    with served(MIB, 8 * MIB):
        kept = born(MIB).fill_(7)
        gone = born(8 * MIB)
        del gone
        ARENA.trim()
        assert populated() == used()
        assert bool((kept == 7).all())
        again = born(8 * MIB).fill_(1)
        assert lies_in_arena(again)


def test_a_pinned_block_outlives_its_tensor(hvd):
    with served(MIB):
        before = used()
        tensor = born(MIB).fill_(3)
        address = tensor.data_ptr()
        offset = ARENA.pin(address, MIB)
        again = ARENA.pin(address + 4096, 4096)
        assert again == offset + 4096
        with peer_of(offset, MIB) as peer:
            del tensor
            others = [born(MIB).fill_(4) for _ in range(8)]
            assert address not in [one.data_ptr() for one in others]
            assert set(peer[:]) == {3}
            del others
            ARENA.unpin([offset])
            assert used() == before + MIB
            ARENA.unpin([again])
            assert used() == before


def test_what_is_in_no_block_cannot_be_pinned(hvd):
    with served(MIB):
        tensor = born(MIB)
        address = tensor.data_ptr()
        assert ARENA.pin(torch.empty(MIB, dtype=torch.uint8).data_ptr(), MIB) == -1
        assert ARENA.pin(address, MIB + 4096) == -1
        del tensor
        assert ARENA.pin(address, MIB) == -1


def test_a_block_made_private_keeps_address_and_bytes_and_no_peer_sees_or_changes_it(hvd):
    with served(MIB):
        neighbours = [born(MIB).fill_(number) for number in range(3)]
        tensor = neighbours[1]
        address = tensor.data_ptr()
        offset = ARENA.pin(address, MIB)
        before = populated()
        with peer_of(offset, MIB) as peer:
            peer[5] = 77
            assert tensor[5] == 77
            ARENA.make_private([offset])
            assert tensor.data_ptr() == address
            assert tensor[5] == 77
            assert int((tensor == 1).sum()) == MIB - 1
            peer[:] = bytes([9]) * MIB
            assert int((tensor == 1).sum()) == MIB - 1
            tensor.fill_(8)
            assert set(peer[:]) == {9}
        assert populated() == before - MIB
        assert bool((neighbours[0] == 0).all())
        assert bool((neighbours[2] == 2).all())
        assert ARENA.pin(address, MIB) == -1  # no peer reaches it
        ARENA.unpin([offset])
        assert bool((tensor == 8).all())
        del tensor, neighbours
        assert address not in [one.data_ptr() for one in [born(MIB) for _ in range(8)]]  # a peer may still write there


def test_a_private_block_that_was_freed_meanwhile_comes_back_when_it_is_unpinned(hvd):
    with served(MIB):
        before = used()
        tensor = born(MIB)
        offset = ARENA.pin(tensor.data_ptr(), MIB)
        del tensor
        ARENA.make_private([offset])
        assert used() == before + MIB
        ARENA.unpin([offset])
        assert used() == before


def test_where_the_file_cannot_grow_tensors_are_born_in_ordinary_memory(hvd):
    with served(MIB, 32 * MIB):
        descriptor = ARENA.open(True)
        ARENA.trim()
        kept = born(MIB).fill_(6)
        end = ARENA.pin(kept.data_ptr(), MIB) + MIB
        ARENA.unpin([end - MIB])
        nbytes = os.fstat(descriptor).st_size
        refused = counts()["refused"]
        highest = max(end, 64 * MIB)
        os.ftruncate(descriptor, highest)  # behind its end the system gives no memory
        try:
            several = [born(32 * MIB).fill_(1) for _ in range(8)]
            assert not lies_in_arena(several[-1])
            assert counts()["refused"] > refused
            assert all(bool((one == 1).all()) for one in several)
        finally:
            os.ftruncate(descriptor, nbytes)
        assert bool((kept == 6).all())
        assert lies_in_arena(born(32 * MIB))


def test_a_default_device_of_pytorch_does_not_pass_for_another_allocator(hvd):
    with served(), torch.device("meta"):
        another = Arena()
        assert another.open(True) >= 0
        assert another.serve_torch() == ""
