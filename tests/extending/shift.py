"""An operation of one's own, in one file: each rank gets the array of the rank before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.collectives.group import Steps
from hvdkit.engine.ops import KINDS, Batch, Kind


def _shift(batch: Batch) -> Steps[list[Any]]:
    group, (array,) = batch.group, batch.submissions[0].arrays
    came = np.array(array)
    if group.size > 1:
        after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        yield [
            group.isend(array.reshape(-1), after, batch.tag),
            group.irecv(came.reshape(-1), before, batch.tag),
        ]
    return [came]


KINDS["shift"] = Kind("shift", run=lambda batch: [_shift(batch)])
