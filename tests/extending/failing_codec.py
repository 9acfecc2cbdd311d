"""Each rank trains with a codec that fails on rank 1, ``encode`` or ``decode`` as asked, and prints what it is told."""

from __future__ import annotations

import sys

import torch

import hvdkit.torch as hvd
from hvdkit.compression import Memory
from hvdkit.compression.codec import Array, Bytes
from tests.extending.running_sign import RunningSign


class Failing(RunningSign):
    """The same codec, as far as ranks can compare it."""

    def encode_into(self, payload: Bytes, values: Array, memory: Memory) -> int:
        if sys.argv[1] == "encode" and hvd.rank() == 1:
            raise RuntimeError("no room for signs")
        return super().encode_into(payload, values, memory)

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        if sys.argv[1] == "decode" and hvd.rank() == 1:
            raise ValueError("signs of another kind")
        super().decode_into(payload, out, scale, add)


def main() -> None:
    hvd.init()
    model = torch.nn.Linear(40, 40)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=Failing(compress="everywhere"),
    )
    model(torch.ones(2, 40)).sum().backward()
    for call in (optimizer.step, hvd.barrier):
        try:
            call()
        except hvd.HorovodInternalError as error:
            text = str(error).replace("\n", " / ")
            print(f"RANK {hvd.rank()} {type(error).__name__} {getattr(error, 'rank', '-')}: {text}", flush=True)
    sys.exit(3)


if __name__ == "__main__":
    main()
