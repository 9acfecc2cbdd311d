"""Some ranks make a smaller job, and say where they are and what they sum; the others end at once."""

import json
import os
import socket
import sys

import torch

import hvdkit.torch as hvd


def main() -> None:
    members = [int(word) for word in sys.argv[1:]]
    if int(os.environ["HVDKIT_RANK"]) not in members:
        return
    hvd.init(comm=members)
    about = {
        "rank": hvd.rank(),
        "host": socket.gethostname(),
        "local_size": hvd.local_size(),
        "sum": hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item(),
    }
    sys.stdout.write(json.dumps(about) + "\n")  # in one write, so that the lines of two ranks do not mix
    hvd.shutdown()


if __name__ == "__main__":
    main()
