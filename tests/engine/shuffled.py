"""Runs programs of named operations that are made up: each rank submits and waits in an order of its own."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

import hvdkit.torch as hvd

PROGRAMS = 20
REDUCTIONS = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "prod": hvd.Product}  # as numpy calls them
KINDS = [*REDUCTIONS, "allgather", "broadcast"]
DTYPES = ["float32", "float64", "int32", "int64", "int8", "float16"]


class Step(NamedTuple):
    """One operation, the same on all ranks."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    root: int

    def values(self, rank: int) -> Any:
        """Small whole numbers, so that every order of summation gives the same."""
        generator = np.random.default_rng([*self.name.encode(), rank])
        return generator.integers(-2, 3, size=self.shape).astype(self.dtype)

    def submit(self) -> int:
        own = torch.from_numpy(self.values(hvd.rank()))
        if self.kind == "broadcast":
            return hvd.broadcast_async(own, self.root, name=self.name)
        if self.kind == "allgather":
            return hvd.allgather_async(own, name=self.name)
        return hvd.allreduce_async(own, name=self.name, op=REDUCTIONS[self.kind])

    def expected(self) -> Any:
        everyones = [self.values(rank) for rank in range(hvd.size())]
        if self.kind == "broadcast":
            return everyones[self.root]
        if self.kind == "allgather":
            return np.concatenate(everyones)
        return getattr(np.stack(everyones), self.kind)(0)


def made_up(shared: random.Random, name: str) -> Step:
    shape = tuple(shared.randint(0, 40) for _ in range(shared.randint(1, 3)))
    return Step(name, shared.choice(KINDS), shape, shared.choice(DTYPES), shared.randrange(hvd.size()))


def main(seed: int) -> None:
    hvd.init()
    shared, own = random.Random(seed), random.Random(seed * 100 + hvd.rank())
    for number in range(PROGRAMS):
        steps = [made_up(shared, f"program{number}.step{index}") for index in range(shared.randint(1, 25))]
        handles = {step: step.submit() for step in own.sample(steps, len(steps))}
        for step in own.sample(steps, len(steps)):
            np.testing.assert_array_equal(hvd.synchronize(handles[step]).numpy(), step.expected(), err_msg=str(step))
    print(f"RANK {hvd.rank()} AGREES", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
