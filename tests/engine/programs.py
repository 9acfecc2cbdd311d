"""Runs programs of named operations that a test made up: each rank submits and waits in an order of its own."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

import hvdkit.torch as hvd

# (name in the program, torch's, the reduction in numpy)
REDUCTIONS = {
    "sum": (hvd.Sum, lambda stack: stack.sum(0)),
    "min": (hvd.Min, lambda stack: stack.min(0)),
    "max": (hvd.Max, lambda stack: stack.max(0)),
    "product": (hvd.Product, lambda stack: stack.prod(0)),
}


def values(program: int, place: int, rank: int, shape: list[int], dtype: str) -> np.ndarray:
    """Small whole numbers, so that every order of summation gives the same."""
    generator = np.random.default_rng([program, place, rank])
    return generator.integers(-2, 3, size=shape).astype(dtype)


def submit(step: dict, program: int, place: int) -> int:
    name = f"program{program}.step{place}"
    own = torch.from_numpy(values(program, place, hvd.rank(), step["shape"], step["dtype"]))
    kind = step["kind"]
    if kind == "broadcast":
        return hvd.broadcast_async(own, step["root"] % hvd.size(), name=name)
    if kind == "allgather":
        return hvd.allgather_async(own, name=name)
    return hvd.allreduce_async(own, name=name, op=REDUCTIONS[kind][0])


def expected(step: dict, program: int, place: int) -> np.ndarray:
    all_values = [values(program, place, rank, step["shape"], step["dtype"]) for rank in range(hvd.size())]
    kind = step["kind"]
    if kind == "broadcast":
        return all_values[step["root"] % hvd.size()]
    if kind == "allgather":
        return np.concatenate(all_values)
    return REDUCTIONS[kind][1](np.stack(all_values))


def main(path: str) -> None:
    hvd.init()
    for number, steps in enumerate(json.loads(Path(path).read_text())):
        order = list(range(len(steps)))
        random.Random(number * 100 + hvd.rank()).shuffle(order)
        handles = {place: submit(steps[place], number, place) for place in order}
        random.Random(number * 100 + hvd.rank() + 50).shuffle(order)
        for place in order:
            result = hvd.synchronize(handles[place])
            np.testing.assert_array_equal(
                result.numpy(), expected(steps[place], number, place), err_msg=str(steps[place])
            )
    print(f"RANK {hvd.rank()} AGREES", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
