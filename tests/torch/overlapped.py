"""Runs cases with updates left to the next forward pass wherever that can be: nothing else changes."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any


class Overlapping:
    """``hvd``, whose optimizers overlap."""

    overlaps = True

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd

        @functools.wraps(hvd.DistributedOptimizer)
        def overlapping(*args: Any, **kwargs: Any) -> Any:
            try:
                return hvd.DistributedOptimizer(*args, overlap_forward=True, **kwargs)
            except ValueError as error:
                if "overlap_forward" not in str(error):
                    raise
                return hvd.DistributedOptimizer(*args, **kwargs)

        self.DistributedOptimizer = overlapping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hvd, name)


def main(modules: str, folder: str) -> None:
    """What a rank runs, as in tests.ranks."""
    import hvdkit.torch as hvd
    from tests import ranks

    hvd.init()
    ranks.run_cases(modules, Path(folder, f"{hvd.rank()}.json"), Overlapping(hvd))
    hvd.shutdown()
    ranks.leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
