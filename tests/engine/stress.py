"""What each rank of the stress test runs: thousands of random operations, one rank late at random moments."""

from __future__ import annotations

import random
import sys
import time

import numpy as np
import torch

import hvdkit.torch as hvd

SIZES = [0, 1, 3, 17, 1000, 9000, 70_000, 400_000]  # elements: of one slot, of several chunks, of none
LARGE = 5_000_001  # in pieces between nodes, past the cache on one

# By kind: the operation on this rank's values, and its result from all ranks' values.
OPERATIONS = {
    "sum": (lambda own: hvd.allreduce(own, op=hvd.Sum), sum),
    "average": (lambda own: hvd.allreduce_(own.clone(), op=hvd.Average), lambda all_: sum(all_) / hvd.size()),
    "max": (lambda own: hvd.allreduce(own, op=hvd.Max), lambda all_: torch.stack(all_).amax(0)),
    "grouped": (lambda own: torch.cat(list(hvd.grouped_allreduce([own[:5], own[5:]], op=hvd.Sum))), sum),
    "allgather": (
        lambda own: hvd.allgather(own[hvd.rank() :]),
        lambda all_: torch.cat([v[r:] for r, v in enumerate(all_)]),
    ),
    "broadcast": (lambda own: hvd.broadcast(own, 1), lambda all_: all_[1]),
    "alltoall": (hvd.alltoall, lambda all_: torch.cat([part_of(values) for values in all_])),
    "reducescatter": (lambda own: hvd.reducescatter(own, op=hvd.Sum), lambda all_: part_of(sum(all_))),
}
KINDS = [*OPERATIONS, "many", "step", "barrier"]


def values(number: int, rank: int, count: int) -> torch.Tensor:
    """Small whole numbers, so that every order of summation gives the same."""
    return torch.from_numpy(np.random.default_rng([number, rank]).integers(-3, 4, count).astype(np.float32))


def everyones(number: int, count: int) -> list[torch.Tensor]:
    return [values(number, rank, count) for rank in range(hvd.size())]


def uneven(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor[rank:] for rank, tensor in enumerate(tensors)]


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(hvd.size())[hvd.rank()] if tensor.numel() else tensor


def many(own: random.Random, number: int, count: int) -> None:
    """Several in flight at once, one of them of two types, waited for in an order of each rank's own."""
    floats = values(number, hvd.rank(), count + 50)
    total, whole = sum(everyones(number, count + 50)), floats.to(torch.int64)
    handles = {
        "both": hvd.grouped_allreduce_async([floats, whole], name=f"both.{number}", op=hvd.Sum),
        "first": hvd.allreduce_async(floats[:50], name=f"first.{number}", op=hvd.Sum),
        "last": hvd.allreduce_async(whole[-50:], name=f"last.{number}", op=hvd.Sum),
    }
    got = {name: hvd.synchronize(handles[name]) for name in own.sample(list(handles), len(handles))}
    results, expected = [*got["both"], got["first"], got["last"]], [total, total, total[:50], total[-50:]]
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(results, expected, strict=True)), number


class Model:
    """Steps with gradients that are small whole numbers, so their sum is exact."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters(), op=hvd.Sum)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        for index, parameter in enumerate(self.model.parameters()):
            (parameter * values(number * 10 + index, hvd.rank(), parameter.numel()).view_as(parameter)).sum().backward()
        self.optimizer.synchronize()
        for index, parameter in enumerate(self.model.parameters()):
            expected = sum(everyones(number * 10 + index, parameter.numel()))
            assert torch.equal(parameter.grad.flatten(), expected), (number, index)
            parameter.grad.mul_(0.5)  # each rank's own, to change in place
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def main(seed: int, operations: int) -> None:
    torch.set_num_threads(1)
    hvd.init()
    model, shared, own = Model(), random.Random(seed), random.Random(seed * 1000 + hvd.rank())  # shared: alike on all
    for number in range(operations):
        kind, count = shared.choice(KINDS), shared.choice(SIZES)
        if kind in ("sum", "average", "max") and shared.random() < 0.05:
            count = LARGE
        late = shared.randrange(hvd.size())
        if shared.random() < 0.02 and hvd.rank() == late:
            time.sleep(own.random() * 0.03)
        if kind == "many":
            many(own, number, count)
        elif kind == "step":
            model.step(number)
        elif kind == "barrier":
            hvd.barrier()
        else:
            if kind in ("alltoall", "reducescatter"):
                count = count // 8 * hvd.size()
            operation, result = OPERATIONS[kind]
            all_values = everyones(number, count + 5 * (kind in ("grouped", "allgather", "broadcast")))
            torch.testing.assert_close(operation(all_values[hvd.rank()].clone()), result(all_values), msg=str(number))
    print("SURVIVED", hvd.rank())
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
