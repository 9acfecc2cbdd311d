"""What a rank runs that forks children which end in each way that a process can, while the job goes on."""

from __future__ import annotations

import atexit
import os
import sys

if "mpi4py first" in sys.argv:
    import mpi4py.MPI  # noqa: F401

import torch

import hvdkit.torch as hvd
from tests.forking import status_of

WAYS = {"returns": 0, "exits": 0, "exits with 3": 3, "caught": 0, "raises": 1, "leaves": 0}


def end(way: str) -> None:
    atexit.register(print, f"CHILD {way} CLEANED UP")
    if way == "exits":
        sys.exit(0)
    if way == "exits with 3":
        sys.exit(3)
    if way == "caught":
        try:
            sys.exit(3)
        except SystemExit:
            sys.exit()
    if way == "raises":
        raise RuntimeError("as it should")
    if way == "leaves":
        hvd.shutdown()


def main() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(3))
    for way, expected in WAYS.items():
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            end(way)
            return
        found = status_of(child)
        assert found == expected, f"{way}: {found}"
        assert hvd.allreduce(torch.full((3,), 1.0 + hvd.rank()), op=hvd.Sum)[0] == sum(range(1, hvd.size() + 1))
    print(f"RANK {hvd.rank()} THROUGH", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
