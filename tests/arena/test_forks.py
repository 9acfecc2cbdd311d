"""A fork has its parent's tensors, and nothing that it does to them reaches its parent."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from pathlib import Path

import torch

from hvdkit.arena import ARENA
from tests.arena.blocks import MIB, born, lies_in_arena, peer_of, served, used
from tests.forking import forked, in_child
from tests.on_ranks import on_ranks
from tests.transports.shared import in_thread, needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files, on_ranks((1, "torch"))]

CHILD_SECONDS = 60


def test_what_a_child_writes_does_not_reach_its_parent(hvd):
    with served(MIB):
        weight = torch.nn.Parameter(torch.ones(MIB // 4))
        (weight * 3).sum().backward()
        gradient = weight.grad
        assert lies_in_arena(gradient)

        def write() -> None:
            assert bool((gradient == 3).all())
            (weight * 4).sum().backward()  # adds to what is there
            assert bool((gradient == 7).all())
            gradient.zero_()
            ctypes.memset(gradient.data_ptr(), 0xFF, MIB)
            in_child(lambda: ctypes.memset(gradient.data_ptr(), 0, MIB))  # nor does what its own child writes
            assert bool(gradient.isnan().all())

        in_child(write)
        assert bool((gradient == 3).all())


def test_a_child_has_what_was_there_when_it_was_forked(hvd):
    """Whatever its parent, other ranks and its parent's next tensors write, before and after it has looked."""
    with served(MIB):
        written, dropped, by_a_peer = (born(MIB).fill_(number) for number in (1, 2, 3))
        offset = ARENA.pin(by_a_peer.data_ptr(), MIB)
        asked, told = os.pipe(), os.pipe()

        def look() -> None:
            assert os.read(asked[0], 1) == b"."
            for tensor, number in ((written, 1), (dropped, 2), (by_a_peer, 3)):
                assert bool((tensor == number).all()), number
                tensor[0] = 7
            os.write(told[1], b".")

        def look_again() -> None:
            assert all(int(tensor[0]) == 7 for tensor in (written, dropped, by_a_peer))
            assert [int(tensor[1]) for tensor in (written, dropped, by_a_peer)] == [1, 2, 3]

        child = forked(look_again, at_once=look)
        os.close(told[1])  # else the end of a child that failed would not be noticed
        written.fill_(9)
        dropped = torch.empty(0)
        ARENA.end_step()
        ARENA.trim()
        kept = [born(MIB).fill_(9) for _ in range(3)]
        with peer_of(offset, MIB) as peer:
            peer[:] = bytes([9]) * MIB
        os.write(asked[1], b".")
        os.read(told[0], 1)
        written.fill_(8)
        child()
        del kept
        assert int(by_a_peer[0]) == 9
        ARENA.unpin([offset])
        for descriptor in (*asked, told[0]):
            os.close(descriptor)


def test_forks_of_one_step_share_the_copy_and_the_end_of_the_step_gives_it_back(hvd):
    with served(64 * MIB):
        tensor = born(64 * MIB).fill_(1)
        ARENA.end_step()
        before = anonymous_bytes()
        for number in range(3):  # each has what was there when it was forked
            tensor[number * 4096] = number + 2
            expected = int(tensor.sum(dtype=torch.int64))

            def look(expected: int = expected) -> None:
                assert int(tensor.sum(dtype=torch.int64)) == expected
                tensor.fill_(100)

            in_child(look)
            assert int(tensor.sum(dtype=torch.int64)) == expected
            assert anonymous_bytes() - before < 80 * MIB
        assert anonymous_bytes() - before > 32 * MIB
        ARENA.end_step()
        assert anonymous_bytes() - before < 16 * MIB


def anonymous_bytes() -> int:
    """The memory that this process has to itself."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_child_frees_its_parents_blocks_without_effect_and_gets_ordinary_memory(hvd):
    with served(MIB):
        tensors = [born(MIB).fill_(number) for number in range(4)]
        before = used()

        def free_and_allocate() -> None:
            tensors.clear()
            ARENA.trim()
            made = [born(MIB).fill_(9) for _ in range(8)]
            assert not any(lies_in_arena(one) for one in made)
            assert used() == before  # what the parent has is its own business

        in_child(free_and_allocate)
        assert used() == before
        assert [int(one[MIB // 2]) for one in tensors] == [0, 1, 2, 3]
        assert lies_in_arena(born(MIB))


def test_what_a_parent_has_pinned_is_neither_unpinned_nor_moved_by_its_child(hvd):
    with served(MIB):
        tensor = born(MIB).fill_(1)
        offset = ARENA.pin(tensor.data_ptr(), MIB)

        def undo() -> None:
            ARENA.make_private([offset])
            ARENA.unpin([offset])
            assert ARENA.pin(tensor.data_ptr(), MIB) == -1

        in_child(undo)
        with peer_of(offset, MIB) as peer:
            peer[0] = 5
            assert int(tensor[0]) == 5
        ARENA.unpin([offset])


def test_a_child_can_reach_nothing_of_the_arenas_file(hvd):
    with served(MIB):
        tensor = born(MIB).fill_(1)

        def look() -> None:
            lines = [one.split() for one in Path("/proc/self/maps").read_text().splitlines()]
            rights = {line[1] for line in lines if "memfd:hvdkit-gradients" in " ".join(line)}
            assert rights == {"---s"}
            assert int(tensor[0]) == 1
            assert ARENA.open(True) == -1, "a fork makes an arena of its own"
            assert "fork" in ARENA.reason

        in_child(look)
        assert ARENA.open(True) >= 0


def test_a_fork_while_other_threads_allocate_does_not_hang(hvd):
    sizes = [65536, MIB]
    over = threading.Event()

    def allocate() -> None:
        while not over.is_set():
            for nbytes in sizes:
                born(nbytes)

    def allocate_once() -> None:
        assert not lies_in_arena(born(MIB).fill_(1))

    with served(*sizes):
        kept = born(MIB).fill_(3)
        threads = [in_thread(allocate) for _ in range(3)]
        try:
            for _ in range(30):
                in_child(allocate_once)
            for _ in range(5):
                subprocess.run(["true"], preexec_fn=allocate_once, check=True, timeout=CHILD_SECONDS)
        finally:
            over.set()
            for thread in threads:
                thread.result()
        assert bool((kept == 3).all())
