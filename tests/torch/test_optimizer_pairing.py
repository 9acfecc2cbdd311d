"""Which optimizers of the ranks belong together: in threads, and where a rank has joined before its first step."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.optimizer_support import (
    Comparison,
    Passing,
    assert_identical,
    assert_same_weights,
    distributed_sgd,
    loss_on,
    make_double,
    make_net,
    sgd,
)
from tests.transports.shared import in_thread

pytestmark = on_ranks(2, 3)

LATE_SECONDS = 0.2  # for which a thread waits before its first step, on one half of the ranks


def in_threads(run: Callable[[int], None]) -> None:
    """Call ``run(0)`` and ``run(1)`` at the same time; raise what they raise."""
    for outcome in [in_thread(run, index) for index in range(2)]:
        outcome.result()


def check_training_in_threads(
    hvd: Any, options: list[dict[str, Any]], made_by_threads: bool, starts_again: bool = False
) -> None:
    """Train two models of equal names and shapes, one on other losses than the other, each in a thread of its own."""
    models = [make_double() for _ in range(2)]

    def made(index: int) -> Any:
        return distributed_sgd(hvd, models[index], **options[index])

    optimizers = {} if made_by_threads else {index: made(index) for index in range(2)}
    if starts_again:
        hvd.shutdown()
        hvd.init()

    def steps(optimizer: Any, model: nn.Module, ranks: list[int], factor: int) -> None:
        for step in range(4):
            optimizer.zero_grad()
            (loss_on(model, ranks, step) * factor).backward()
            optimizer.step()

    def train(index: int) -> None:
        if hvd.rank() % 2 == index:  # what threads do first comes in another order on each rank
            time.sleep(LATE_SECONDS)
        steps(made(index) if made_by_threads else optimizers[index], models[index], [hvd.rank()], 10**index)

    in_threads(train)
    for index, model in enumerate(models):
        alone = make_double()
        steps(hvd.unsynchronized(sgd(alone)), alone, list(range(hvd.size())), 10**index)
        assert_same_weights(model, alone, 1e-10)
        assert_identical(hvd, model)


def test_optimizers_are_paired_in_the_order_in_which_they_were_made(hvd: Any) -> None:
    for starts_again in (False, True):  # the order is that of before, also in the next job
        check_training_in_threads(hvd, [{}, {}], made_by_threads=False, starts_again=starts_again)


def test_optimizers_that_threads_make_are_paired_by_name(hvd: Any) -> None:
    for _ in range(2):  # a name may come again
        check_training_in_threads(hvd, [{"name": "actor"}, {"name": "critic"}], made_by_threads=True)


def test_losses_of_closures_are_paired_too(hvd: Any) -> None:
    nets = [nn.ParameterList([torch.zeros(1)]) for _ in range(2)]
    optimizers = [distributed_sgd(hvd, net, lr=0.0) for net in nets]
    losses: list[list[float]] = [[], []]

    def train(index: int) -> None:
        def closure() -> float:
            optimizers[index].zero_grad()
            nets[index][0].sum().backward()
            return 10.0**index + hvd.rank()

        for step in range(3):
            if (hvd.rank() + step) % 2 == index:
                time.sleep(LATE_SECONDS / 4)
            losses[index].append(optimizers[index].step(closure))

    in_threads(train)
    mean = (hvd.size() - 1) / 2
    assert losses == [[1.0 + mean] * 3, [10.0 + mean] * 3]


def test_optimizers_that_threads_make_without_names_are_an_error(hvd: Any) -> None:
    models, made, errors = [make_net(), make_net()], [], []
    both = threading.Barrier(2)

    def make(index: int) -> None:
        threading.current_thread().name = f"trainer {index}"
        try:
            made.append(distributed_sgd(hvd, models[index]))
        except ValueError as error:
            errors.append(str(error))
        both.wait()

    in_threads(make)
    assert len(made) == len(errors) == 1
    assert "'SGD' was made in the threads 'trainer" in errors[0]
    assert "HINT: " in errors[0]
    assert "name='critic'" in errors[0]
    with told(ValueError, errors[0]):
        made[0].step()  # which other rank's optimizer belongs to it nobody knows
    made.clear()


def test_copies_on_one_rank_change_no_pairs(hvd: Any) -> None:
    first = Comparison(hvd)
    kept = copy.deepcopy((first.net, first.optimizer)) if hvd.rank() == 0 else None
    second = Comparison(hvd, loss=lambda *args: 10 * loss_on(*args))
    for pair in (second, first):
        pair.train()
    del kept


def check_joins(hvd: Any, has_batch: Callable[[int, int, int], bool], freezes: bool = False, **options: Any) -> None:
    """Train three epochs of three batches, which only some ranks have; ranks without one have joined."""
    net, alone = make_double(), make_double()
    optimizer, plain, step = distributed_sgd(hvd, net, **options), hvd.unsynchronized(sgd(alone)), 0
    for epoch in range(3):
        for number in range(3):
            ranks = [rank for rank in range(hvd.size()) if has_batch(rank, epoch, number)]
            if not ranks:
                continue
            for model in (net, alone):
                model.hidden.weight.requires_grad_(not freezes or (epoch + number) % 2 == 0)
            if hvd.rank() in ranks:
                optimizer.zero_grad()
                loss_on(net, [hvd.rank()], step).backward()
                optimizer.step()
            plain.zero_grad()
            for rank in ranks:
                (loss_on(alone, [rank], step) / hvd.size()).backward()
            plain.step()
            step += 1
        last = hvd.join()
        hvd.broadcast_parameters(net.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
        assert_same_weights(net, alone, 1e-10)


def test_a_rank_without_a_batch_in_the_first_epoch_joins(hvd: Any) -> None:
    last = hvd.size() - 1
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"compression": Passing}):
        check_joins(hvd, lambda rank, epoch, number: rank != last or epoch > 0, **options)
    check_joins(hvd, lambda rank, epoch, number: rank != 0 or epoch > 0)
    # Ranks join one after the other, and other ones in each epoch.
    check_joins(hvd, lambda rank, epoch, number: number < 3 - (rank + epoch) % hvd.size())


def test_parameters_may_be_frozen_while_a_rank_has_joined(hvd: Any) -> None:
    check_joins(hvd, lambda rank, epoch, number: rank != 0 or epoch != 1, freezes=True)
