"""Ranks of torch.distributed with the backend hvdkit; hvd.init() is never called. Run as a program, a rank's own."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

RUNNER = __name__


def main(module: str, folder: str) -> None:
    import hvdkit.torch as hvd
    from hvdkit import autoload
    from tests.ranks import leave, run_cases

    autoload.register()  # PyTorch did it if hvdkit is installed, and not only in the path
    dist.init_process_group("hvdkit", timeout=timedelta(seconds=60))
    run_cases(module, Path(folder, f"{dist.get_rank()}.json"), hvd)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
