"""Loaders yield what a subclass reads, ahead or not; errors, an early end and a new epoch leave no thread behind."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from hvdkit.data import AsyncDataLoaderMixin, BaseDataLoader
from tests.launch.launching import run_to_end
from tests.waiting import until

SIZES = [0, 1, 3, 64]


class Numbers(BaseDataLoader):
    """The numbers below ``count``, or an error after them."""

    def __init__(self, count: int = 10, error: BaseException | None = None) -> None:
        self.count, self.error = count, error
        self.begun, self.read, self.ended = 0, 0, 0
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return self.count

    def _iterate(self):
        self.begun += 1
        self.threads.append(threading.current_thread())
        try:
            for number in range(self.count):
                self.read += 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.ended += 1

    def _process_batch(self, batch):
        return batch, threading.current_thread() is threading.main_thread()


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def no_threads_left(loader: Numbers) -> bool:
    return not any(thread.is_alive() for thread in loader.threads if thread is not threading.main_thread())


def batches(count: int) -> list[tuple[int, bool]]:
    return [(number, True) for number in range(count)]


def test_a_base_loader_yields_what_its_subclass_reads():
    assert (list(Numbers(3)), len(Numbers(3))) == (batches(3), 3)
    for ask in (len, list):
        with pytest.raises(NotImplementedError, match="BaseDataLoader does not define"):
            ask(BaseDataLoader())


@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_has_all_batches_in_order_and_no_thread_stays(size):
    loader = AsyncNumbers(size, False, 10)
    for epoch in range(1, 4):
        assert list(loader) == batches(10)
        assert (loader.begun, loader.ended) == (epoch, epoch)
        assert no_threads_left(loader)
    is_main = [thread is threading.main_thread() for thread in loader.threads]
    assert is_main == [size == 0] * 3


def test_the_defaults_and_further_arguments_are_horovods():
    loader = AsyncNumbers(count=4)
    assert (loader.async_loader_queue_size, loader.debug_data_loader, len(loader)) == (64, False, 4)


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_batches_are_read_ahead_than_the_queue_holds(size):
    loader = AsyncNumbers(size, count=100)
    iterator = iter(loader)
    for used in range(1, 4):
        next(iterator)
        until(lambda used=used: loader.read == used + size + 1, 10, lambda: "batches that are read ahead")
    iterator.close()
    assert loader.read == 3 + size + 1
    assert no_threads_left(loader)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("error", [ValueError("broken file"), SystemExit(3)], ids=["exception", "exit"])
def test_an_error_arrives_behind_the_batches_before_it_and_the_next_epoch_is_whole(size, error):
    loader, seen = AsyncNumbers(size, count=5, error=error), []
    with pytest.raises(type(error)) as caught:
        seen.extend(iter(loader))
    assert caught.value is error
    assert "_iterate" in [entry.name for entry in caught.traceback]
    assert no_threads_left(loader)
    loader.error = None
    assert list(loader) == batches(5)


@pytest.mark.parametrize("size", SIZES)
def test_a_loop_that_is_left_early_ends_the_thread_and_the_next_epoch_starts_anew(size):
    loader = AsyncNumbers(size, count=1000)
    for batch in loader:
        if batch == (2, True):
            break
    gc.collect()
    assert no_threads_left(loader)
    assert (loader.begun, loader.ended) == (1, 1)
    assert next(iter(loader)) == (0, True)


@pytest.mark.parametrize("size", [1, 64])
def test_closing_ends_threads_and_loops_and_a_new_loop_starts_anew(size):
    loader = AsyncNumbers(size, count=1000)
    loader.close_async_loader()
    iterators = [iter(loader), iter(loader)]
    assert [next(iterator) for iterator in iterators] == [(0, True)] * 2
    loader.close_async_loader()
    loader.close_async_loader()
    assert no_threads_left(loader)
    assert [list(iterator) for iterator in iterators] == [[], []]
    loader.count = 7
    assert list(loader) == batches(7)


def test_closing_wakes_a_loop_that_waits_for_a_batch():
    asked, go_on = threading.Event(), threading.Event()

    class Slow(AsyncDataLoaderMixin, BaseDataLoader):
        def _iterate(self):
            asked.set()
            go_on.wait(10)
            yield 1

    loader, got = Slow(), []
    loop = threading.Thread(target=lambda: got.extend(iter(loader)))
    loop.start()
    assert asked.wait(10)
    closing = threading.Thread(target=loader.close_async_loader)
    closing.start()
    go_on.set()
    closing.join(10)
    loop.join(10)
    assert not loop.is_alive()
    assert not closing.is_alive()
    assert got in ([], [1])  # the loop may have been quicker


def test_debugging_tells_what_a_loop_waited_for(capsys):
    assert list(AsyncNumbers(2, True, 3)) == batches(3)
    assert capsys.readouterr().out.startswith("AsyncNumbers: used 3 batches, waited ")


@pytest.mark.parametrize("ending", ["", "raise ValueError", "import os; os.kill(os.getpid(), 2)"])
def test_a_program_ends_although_a_loop_is_open(ending):
    code = f"""
from tests.data.test_data import AsyncNumbers
loop = iter(AsyncNumbers(1, count=10**9))
next(loop)
{ending}
"""
    assert run_to_end([sys.executable, "-c", code]).status == {"": 0, "raise ValueError": 1}.get(ending, -2)
