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
from tests.torch.optimizer_support import assert_close, assert_identical, batch, expect, joined_batch, loss_of, make_net

pytestmark = [
    on_ranks(2, 3),
    on_ranks(2, name="no memory", HVDKIT_NODE_MEMORY="0"),
]

LATE_SECONDS = 0.2  # for which a thread waits before its first step, on one half of the ranks


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def in_threads(run: Callable[[int], None]) -> None:
    """``run(0)`` and ``run(1)`` at the same time; raises what they raise."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            run(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,), name=f"trainer {index}") for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check_training_in_threads(
    hvd: Any, options: list[dict[str, Any]], made_by_threads: bool, starts_again: bool = False
) -> None:
    """Train two models of equal names and shapes, one on other data than the other, each in a thread of its own."""
    models = [make_net().double() for _ in range(2)]

    def made(index: int) -> Any:
        return hvd.DistributedOptimizer(sgd(models[index]), models[index].named_parameters(), **options[index])

    optimizers = {} if made_by_threads else {index: made(index) for index in range(2)}
    if starts_again:
        hvd.shutdown()
        hvd.init()

    def train(index: int) -> None:
        if hvd.rank() % 2 == index:  # what threads do first comes in another order on each rank
            time.sleep(LATE_SECONDS)
        optimizer = made(index) if made_by_threads else optimizers[index]
        for step in range(4):
            inputs, targets = batch(hvd.rank(), step)
            optimizer.zero_grad()
            (loss_of(models[index], (inputs.double(), targets.double())) * 10**index).backward()
            optimizer.step()

    in_threads(train)
    for index, model in enumerate(models):
        alone = make_net().double()
        plain = sgd(alone)
        for step in range(4):
            inputs, targets = joined_batch(hvd.size(), step)
            plain.zero_grad()
            (loss_of(alone, (inputs.double(), targets.double())) * 10**index).backward()
            plain.step()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert_close(ours.detach(), theirs.detach(), 1e-10)
        assert_identical(hvd, model)


def test_optimizers_are_paired_in_the_order_in_which_they_were_made(hvd: Any) -> None:
    for starts_again in (False, True):  # the order is that of before, also in the next job
        check_training_in_threads(hvd, [{}, {}], made_by_threads=False, starts_again=starts_again)


def test_optimizers_that_threads_make_are_paired_by_name(hvd: Any) -> None:
    for _ in range(2):  # a name may come again
        check_training_in_threads(hvd, [{"name": "actor"}, {"name": "critic"}], made_by_threads=True)


def test_losses_of_closures_are_paired_too(hvd: Any) -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([one], lr=0.0), [("weight", one)]) for one in weights]
    losses: list[list[float]] = [[], []]

    def train(index: int) -> None:
        def closure() -> float:
            optimizers[index].zero_grad()
            weights[index].sum().backward()
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
        try:
            made.append(hvd.DistributedOptimizer(sgd(models[index]), models[index].named_parameters()))
        except ValueError as error:
            errors.append(str(error))
        both.wait()

    in_threads(make)
    assert len(made) == len(errors) == 1
    assert "'SGD' was made in the threads 'trainer" in errors[0]
    assert "HINT: " in errors[0]
    assert "name='critic'" in errors[0]
    with expect(ValueError, errors[0]):
        made[0].step()  # which other rank's optimizer belongs to it nobody knows
    made.clear()


def test_copies_on_one_rank_change_no_pairs(hvd: Any) -> None:
    models = [make_net() for _ in range(2)]
    first = hvd.DistributedOptimizer(sgd(models[0]), models[0].named_parameters())
    kept = copy.deepcopy(first) if hvd.rank() == 0 else None
    second = hvd.DistributedOptimizer(sgd(models[1]), models[1].named_parameters())
    for optimizer, model, factor in ((second, models[1], 10), (first, models[0], 1)):
        optimizer.zero_grad()
        (loss_of(model, batch(hvd.rank())) * factor).backward()
        optimizer.synchronize()
        alone = make_net()
        (loss_of(alone, joined_batch(hvd.size())) * factor).backward()
        assert_close(model.out.weight.grad, alone.out.weight.grad)
        with optimizer.skip_synchronize():
            optimizer.step()
    del kept


class Plain:
    """A compression of Horovod's kind that changes nothing: all gradients go by name."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor


def check_joins(hvd: Any, has_batch: Callable[[int, int, int], bool], freezes: bool = False, **options: Any) -> None:
    """Train three epochs of three batches, which only some ranks have; ranks without one have joined."""
    net, alone = make_net().double(), make_net().double()
    optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **options)
    plain, step = sgd(alone), 0

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return loss_of(model, (inputs.double(), targets.double()))

    for epoch in range(3):
        for number in range(3):
            ranks = [rank for rank in range(hvd.size()) if has_batch(rank, epoch, number)]
            if not ranks:
                continue
            for model in (net, alone):
                model.hidden.weight.requires_grad_(not freezes or (epoch + number) % 2 == 0)
            if hvd.rank() in ranks:
                optimizer.zero_grad()
                loss(net, hvd.rank()).backward()
                optimizer.step()
            plain.zero_grad()
            for rank in ranks:
                (loss(alone, rank) / hvd.size()).backward()
            plain.step()
            step += 1
        last = hvd.join()
        hvd.broadcast_parameters(net.state_dict(), last)
        hvd.broadcast_optimizer_state(optimizer, last)
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            assert_close(ours.detach(), theirs.detach(), 1e-10)


def test_a_rank_without_a_batch_in_the_first_epoch_joins(hvd: Any) -> None:
    last = hvd.size() - 1
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"compression": Plain}):
        check_joins(hvd, lambda rank, epoch, number: rank != last or epoch > 0, **options)
    check_joins(hvd, lambda rank, epoch, number: rank != 0 or epoch > 0)
    # Ranks join one after the other, and other ones in each epoch.
    check_joins(hvd, lambda rank, epoch, number: number < 3 - (rank + epoch) % hvd.size())


def test_parameters_may_be_frozen_while_a_rank_has_joined(hvd: Any) -> None:
    check_joins(hvd, lambda rank, epoch, number: rank != 0 or epoch != 1, freezes=True)
