"""What a rank of the launcher tests runs: one allreduce, then a line of JSON that says who it is."""

from __future__ import annotations

import json
import sys

import torch

import hvdkit.torch as hvd
from hvdkit.engine.session import runtime


def main() -> None:
    """Sum the ranks' own numbers 1, 2, ... and print what this rank knows about itself and the sum."""
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    about = {
        "transport": runtime.engine().transport.name,
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "local_size": hvd.local_size(),
        "cross_rank": hvd.cross_rank(),
        "cross_size": hvd.cross_size(),
        "sum": total.item(),
    }
    sys.stdout.write(json.dumps(about) + "\n")  # in one write, so that the lines of two ranks do not mix
    sys.stdout.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
