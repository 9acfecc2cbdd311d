"""A rank of tests of launchers: one step of an optimizer and one sum, then a line of JSON that says who it is."""

import json
import socket
import sys

import torch

import hvdkit.torch as hvd


def main() -> None:
    hvd.init()
    model = torch.nn.Linear(300, 100, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(torch.full((1, 300), hvd.rank() + 1.0)).sum().backward()
    optimizer.step()
    about = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local_rank": hvd.local_rank(),
        "local_size": hvd.local_size(),
        "cross_rank": hvd.cross_rank(),
        "cross_size": hvd.cross_size(),
        "host": socket.gethostname(),
        "sum": hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item(),
        "weight": sorted(set(model.weight.flatten().tolist())),
        "transport": transport(),
        "mpi": library(),
    }
    sys.stdout.write(json.dumps(about) + "\n")  # in one write, so that the lines of two ranks do not mix
    sys.stdout.flush()
    hvd.shutdown()


def transport() -> str:
    from hvdkit.engine.session import runtime

    return str(runtime.engine().transport.name)


def library() -> str:
    """The MPI that mpi4py found, if MPI carries the job."""
    if not hvd.mpi_enabled():
        return ""
    from mpi4py import MPI

    return MPI.Get_library_version().split(",")[0]


if __name__ == "__main__":
    main()
