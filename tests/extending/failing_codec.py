"""Each rank trains with a codec that fails on rank 1, and prints what it is told.

``python -m tests.extending.failing_codec encode|decode FOLDER``
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic, sleep

import torch

import hvdkit.torch as hvd
from hvdkit.compression import CodecState
from hvdkit.compression.codec import Array, Bytes
from tests.extending.running_sign import RunningSign
from tests.torch.optimizer_support import distributed_sgd

PATIENCE_SECONDS = 60


class Failing(RunningSign):
    """The same codec, as far as ranks can compare it."""

    def encode_into(self, payload: Bytes, values: Array, memory: CodecState) -> int:
        if sys.argv[1] == "encode" and hvd.rank() == 1:
            raise RuntimeError("no room for signs")
        return super().encode_into(payload, values, memory)

    def decode_into(self, payload: Bytes, out: Array, scale: float, add: bool) -> None:
        if sys.argv[1] == "decode" and hvd.rank() == 1:
            raise ValueError("signs of another kind")
        super().decode_into(payload, out, scale, add)


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    optimizer = distributed_sgd(hvd, model, compression=Failing(compress="everywhere"))
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()


def tell(folder: Path) -> None:
    """Print what this and the next call raise, and leave when all have."""
    for call in (train, hvd.barrier):
        try:
            call()
        except hvd.HorovodInternalError as error:
            text = str(error).replace("\n", " / ")
            print(f"RANK {hvd.rank()} {type(error).__name__} {getattr(error, 'rank', '-')}: {text}", flush=True)
    (folder / str(hvd.rank())).touch()
    deadline = monotonic() + PATIENCE_SECONDS
    while len(list(folder.iterdir())) < hvd.size() and monotonic() < deadline:
        sleep(0.01)
    sys.exit(3)


if __name__ == "__main__":
    hvd.init()
    tell(Path(sys.argv[2]))
