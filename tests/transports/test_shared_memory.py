"""Windows on memory files, cells in them, and bells: between objects of one process and between processes."""

from __future__ import annotations

import os
import platform
import time

import numpy as np
import pytest

from tests.transports.shared import (
    LINE,
    answer,
    bytes_of,
    mapped_memory_files,
    memory_file,
    native,
    needs_memory_files,
    needs_native,
    new_window,
    program,
)
from tests.transports.shared_programs import SECONDS, play
from tests.waiting import until

pytestmark = [needs_native, needs_memory_files]

PAGE = 4096
SEGMENT = 1 << 40
ROUNDS = 10_000


def kernel_version() -> tuple[int, ...]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int(minor)


def test_windows_of_a_segment_share_bytes_that_are_zeros_at_first_and_those_of_others_do_not():
    with memory_file() as descriptor:
        places = ((SEGMENT, PAGE), (SEGMENT, 5 * PAGE), (0, PAGE))
        short, long, other = (bytes_of(native.Window(descriptor, *place)) for place in places)
        assert not long.any()
        short[[0, -1]] = 7, 8
        assert long[[0, PAGE - 1]].tolist() == [7, 8]
        assert not other.any()
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.Window(-1, 0, PAGE)


def test_a_window_outlives_its_descriptor_and_goes_with_its_last_view():
    before = mapped_memory_files()
    view = bytes_of(new_window(PAGE))[10:20]
    assert mapped_memory_files() == before + 1
    view[:] = 3
    del view
    assert mapped_memory_files() == before


def test_populate_takes_memory_at_once_and_keeps_what_is_there():
    with memory_file() as descriptor:
        window = native.Window(descriptor, 0, 64 * PAGE)
        bytes_of(window)[5 * PAGE] = 9
        window.populate(3 * PAGE + 17, 20 * PAGE)
        assert np.flatnonzero(bytes_of(window)).tolist() == [5 * PAGE]
        if kernel_version() >= (5, 14):
            assert os.fstat(descriptor).st_blocks * 512 >= 20 * PAGE


@pytest.mark.skipif(kernel_version() < (5, 14), reason="kernels before 5.14 cannot populate")
def test_populate_where_there_is_no_memory_is_an_error_and_not_a_signal():
    with memory_file(PAGE) as descriptor:
        window = native.Window(descriptor, 0, 8 * PAGE)
        window.populate(0, PAGE)
        with pytest.raises(OSError, match=r"\[Errno \d+\]"):
            window.populate(PAGE, PAGE)


def test_what_is_given_back_is_zeros_for_all_and_nothing_else_is():
    with memory_file() as descriptor:
        others = bytes_of(native.Window(descriptor, 0, 6 * PAGE))
        window = native.Window(descriptor, 0, 6 * PAGE)
        bytes_of(window)[:] = 7
        blocks = os.fstat(descriptor).st_blocks
        window.give_back(PAGE, 2 * PAGE)
        window.give_back(4 * PAGE, PAGE)
        window.give_back(1, PAGE)  # has no whole page in it
        assert os.fstat(descriptor).st_blocks < blocks  # before anybody looks, which takes a page again
        assert [page for page in range(6) if (others[page * PAGE : (page + 1) * PAGE] == 7).all()] == [0, 3, 5]
        assert np.count_nonzero(others) == 3 * PAGE


def test_a_window_that_is_kept_from_forks_is_not_there_in_a_child():
    with memory_file() as descriptor:
        window = native.Window(descriptor, 0, PAGE)
        address = bytes_of(window).ctypes.data
        window.keep_from_forks()
        child = os.fork()
        if child == 0:
            with open("/proc/self/maps") as maps:
                there = any(int(line.split("-")[0], 16) == address for line in maps)
            del window
            os._exit(int(there))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("offset", [1, LINE - 1, PAGE - LINE + 1, PAGE, 1 << 63])
def test_a_place_off_its_line_or_outside_the_window_is_refused(offset):
    window = new_window(PAGE)
    for make in (
        lambda: native.Bell(window, offset),
        lambda: native.Cells(window, offset, 1),
        lambda: native.Cells(window, 0, PAGE // LINE + 1),
        lambda: native.MessageRings(window, offset, 1, 0, LINE, LINE, [native.Bell()]),
        lambda: native.Area(window, offset, 1, 0, 1, LINE, [native.Bell()]),
    ):
        with pytest.raises(ValueError, match="expected a place on a cache line inside the window"):
            make()


def test_cells_hold_numbers_of_64_bits_that_others_see():
    window = new_window(PAGE)
    mine, theirs = native.Cells(window, LINE, 3), native.Cells(window, LINE, 3)
    for index in range(3):
        mine.set(index, 2**64 - 1 - index)
    assert [theirs.get(index) for index in range(3)] == [2**64 - 1, 2**64 - 2, 2**64 - 3]
    assert not bytes_of(window)[4 * LINE :].any()
    for beyond in (lambda: mine.get(3), lambda: mine.set(3, 1)):
        with pytest.raises(IndexError, match="no such cell"):
            beyond()


@pytest.fixture(params=["own", "window"])
def bell(request):
    """A bell of this process alone, and one in a window."""
    return native.Bell() if request.param == "own" else native.Bell(new_window(PAGE), LINE)


@pytest.mark.parametrize("spin", [0.0, 0.05])
def test_a_sleep_ends_with_its_time_or_at_once_where_it_was_rung_or_has_no_time(bell, spin):
    def slept(seen: int, seconds: float) -> float:
        began = time.monotonic()
        bell.sleep(seen, seconds, spin)
        return time.monotonic() - began

    seen = bell.count()
    bell.ring()
    assert slept(seen, 30.0) < 5.0
    assert 0.19 < slept(bell.count(), 0.2) < 5.0
    for nothing in (0.0, -1.0, float("-inf"), float("nan")):
        assert slept(bell.count(), nothing) < 5.0


def test_a_ring_wakes_a_sleeper_of_another_process():
    with memory_file() as descriptor:
        window = native.Window(descriptor, 0, PAGE)
        bell, sleepers = native.Bell(window, 0), bytes_of(window)[4:8].view(np.uint32)
        with program("sleep", descriptor, descriptors=(descriptor,)) as sleeper:
            until(lambda: sleepers[0])
            time.sleep(0.05)  # between saying so and sleeping
            assert sleeper.poll() is None
            bell.ring()
            assert float(answer(sleeper)) < SECONDS / 2
        assert sleepers[0] == 0


def test_no_ring_is_lost_between_two_processes():
    with memory_file() as descriptor, program("play", descriptor, 1, ROUNDS, descriptors=(descriptor,)) as other:
        longest = play(descriptor, 0, ROUNDS)
        assert max(longest, float(answer(other))) < SECONDS / 2
