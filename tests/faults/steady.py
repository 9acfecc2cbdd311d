"""A rank that sums until it is told to end, and looks at every sum; then it starts anew and sums once more."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd

ELEMENTS = 1000
PAUSE_SECONDS = 0.005


def check_sum(round_number: int) -> None:
    mine = torch.full((ELEMENTS,), float((hvd.rank() + 1) * round_number))
    total = hvd.allreduce(mine, op=hvd.Sum, name="sum")
    assert torch.equal(total, torch.full((ELEMENTS,), float(sum(range(hvd.size() + 1)) * round_number))), round_number


def main(folder: Path) -> None:
    hvd.init()
    rounds, ending = 0, False
    while not ending:
        rounds += 1
        check_sum(rounds)
        if rounds == 3:
            Path(folder, f"started.{hvd.rank()}").touch()
        asked = torch.tensor([float(Path(folder, "end").exists())])
        ending = hvd.allreduce(asked, op=hvd.Max, name="end").item() > 0  # the same on all ranks
        time.sleep(PAUSE_SECONDS)
    hvd.shutdown()
    hvd.init()
    check_sum(1)
    Path(folder, f"done.{hvd.rank()}").write_text(str(rounds))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
