"""What each rank of the stress test runs: thousands of random operations, one rank late at random moments."""

from __future__ import annotations

import random
import sys
import time

import numpy as np
import torch

import hvdkit.torch as hvd

KINDS = [
    "sum",
    "average",
    "max",
    "grouped",
    "many",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "step",
    "barrier",
]
SIZES = [0, 1, 3, 17, 1000, 9000, 70_000, 400_000]  # elements: of one slot, of several chunks, of none
LARGE = 5_000_001  # in pieces between nodes, past the cache on one


def values(number: int, rank: int, count: int) -> torch.Tensor:
    """Small whole numbers, so that every order of summation gives the same."""
    return torch.from_numpy(np.random.default_rng([number, rank]).integers(-3, 4, count).astype(np.float32))


class Stress:
    """The same choices on every rank, since they come from one seed; only the delays differ."""

    def __init__(self, seed: int) -> None:
        self.shared = random.Random(seed)
        self.own = random.Random(seed * 1000 + hvd.rank())
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters(), op=hvd.Sum)

    def run(self, number: int) -> None:
        kind, count = self.shared.choice(KINDS), self.shared.choice(SIZES)
        if kind in ("sum", "average", "max") and self.shared.random() < 0.05:
            count = LARGE
        late = self.shared.randrange(hvd.size())
        if self.shared.random() < 0.02 and hvd.rank() == late:
            time.sleep(self.own.random() * 0.03)
        getattr(self, kind)(number, count)

    def everyones(self, number: int, count: int) -> list[torch.Tensor]:
        return [values(number, rank, count) for rank in range(hvd.size())]

    def sum(self, number: int, count: int) -> None:
        everyones = self.everyones(number, count)
        assert torch.equal(hvd.allreduce(everyones[hvd.rank()], op=hvd.Sum), sum(everyones)), number

    def average(self, number: int, count: int) -> None:
        everyones = self.everyones(number, count)
        got = hvd.allreduce_(everyones[hvd.rank()].clone(), op=hvd.Average)
        assert torch.allclose(got, sum(everyones) / hvd.size()), number

    def max(self, number: int, count: int) -> None:
        everyones = self.everyones(number, count)
        handle = hvd.allreduce_async(everyones[hvd.rank()], op=hvd.Max, name=f"max.{number}")
        assert torch.equal(hvd.synchronize(handle), torch.stack(everyones).amax(0)), number

    def grouped(self, number: int, count: int) -> None:
        everyones = self.everyones(number, count + 5)
        own = everyones[hvd.rank()]
        got = hvd.grouped_allreduce([own[:5].clone(), own[5:].clone()], op=hvd.Sum)
        assert torch.equal(torch.cat(list(got)), sum(everyones)), number

    def many(self, number: int, count: int) -> None:
        """Several in flight at once, one of them of two types, waited for in an order of each rank's own."""
        everyones = self.everyones(number, count + 50)
        mine = everyones[hvd.rank()]
        whole = mine.to(torch.int64)
        handles = {
            "both": hvd.grouped_allreduce_async([mine, whole], name=f"both.{number}", op=hvd.Sum),
            "first": hvd.allreduce_async(mine[:50], name=f"first.{number}", op=hvd.Sum),
            "last": hvd.allreduce_async(whole[-50:], name=f"last.{number}", op=hvd.Sum),
        }
        names = list(handles)
        self.own.shuffle(names)
        got = {name: hvd.synchronize(handles[name]) for name in names}
        total = sum(everyones)
        assert torch.equal(got["both"][0], total), number
        assert torch.equal(got["both"][1], total.to(torch.int64)), number
        assert torch.equal(got["first"], total[:50]), number
        assert torch.equal(got["last"], total[-50:].to(torch.int64)), number

    def allgather(self, number: int, count: int) -> None:
        everyones = [values(number, rank, count // 2 + rank) for rank in range(hvd.size())]
        assert torch.equal(hvd.allgather(everyones[hvd.rank()]), torch.cat(everyones)), number

    def broadcast(self, number: int, count: int) -> None:
        root = number % hvd.size()
        got = hvd.broadcast(values(number, hvd.rank(), count + 1), root)
        assert torch.equal(got, values(number, root, count + 1)), number

    def parts(self, number: int, count: int) -> tuple[list[torch.Tensor], slice]:
        """Everyone's values, of which each rank has a part, and this rank's part of them."""
        part = count // 8
        return self.everyones(number, part * hvd.size()), slice(part * hvd.rank(), part * (hvd.rank() + 1))

    def alltoall(self, number: int, count: int) -> None:
        everyones, own = self.parts(number, count)
        assert torch.equal(hvd.alltoall(everyones[hvd.rank()]), torch.cat([one[own] for one in everyones])), number

    def reducescatter(self, number: int, count: int) -> None:
        everyones, own = self.parts(number, count)
        assert torch.equal(hvd.reducescatter(everyones[hvd.rank()], op=hvd.Sum), sum(everyones)[own]), number

    def barrier(self, number: int, count: int) -> None:
        hvd.barrier()

    def step(self, number: int, count: int) -> None:
        """All ranks' gradients are small whole numbers, so their sum is exact."""
        self.optimizer.zero_grad()
        for index, parameter in enumerate(self.model.parameters()):
            weights = values(number * 10 + index, hvd.rank(), parameter.numel()).view_as(parameter)
            (parameter * weights).sum().backward()
        self.optimizer.synchronize()
        for index, parameter in enumerate(self.model.parameters()):
            all_weights = [values(number * 10 + index, rank, parameter.numel()) for rank in range(hvd.size())]
            assert torch.equal(parameter.grad.flatten(), sum(all_weights)), (number, index)
            parameter.grad.mul_(0.5)  # each rank's own, to change in place
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def main(seed: int, operations: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    stress = Stress(seed)
    for number in range(operations):
        stress.run(number)
    print("SURVIVED", hvd.rank())
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
