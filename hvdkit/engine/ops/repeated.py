"""Which allreduces the ranks of a node may do alone when they come again; see ranks/repetitions."""

from __future__ import annotations

import math

from hvdkit.engine.ops.batch import Submission, effective
from hvdkit.engine.ops.kind import Assigned, Requests
from hvdkit.engine.ops.requests import Key, automatic_number
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.ranks.repetitions import Content, most_bytes
from hvdkit.kernels import DTYPES, ReduceOp


def region_for(assigned: Assigned, key: Key, requests: Requests) -> int | None:
    """The number of a region, once, for what comes again and is small and simple enough."""
    signature = next(iter(requests.values())).signature
    is_simple = len(signature["shape"]) == 1 and signature["prescale"] == 1.0 and signature["op"] != ReduceOp.ADASUM
    is_plain = "codec" not in signature and "direct" not in signature and signature["device"] == "cpu"
    is_plain = is_plain and signature["dtype"][0] in DTYPES  # the region's kernels do not know complex numbers
    if not is_simple or not is_plain or math.prod(signature["shape"][0]) > most_bytes(2):
        return None
    # What has no name is the same again where all else is.
    return assigned.next_region(key if automatic_number(key) is None else str(signature), signature)


def learn(groups: Groups, submission: Submission, number: int | None) -> None:
    """What was submitted runs, and has a region from now on if ``number`` is one and these ranks can do it alone."""
    repetitions, signature = groups.repetitions.get(submission.key.process_set), submission.signature
    if repetitions is None or "direct" in signature or (number is None and not repetitions):
        return
    array, label = submission.arrays[0], submission.handle.label
    op, postscale = ReduceOp(signature["op"]), signature["postscale"]
    content = Content(label, array.dtype, array.shape, op, postscale)
    if number is None:
        repetitions.ran(content)
        return
    size = len(groups.ranks[submission.key.process_set])
    repetitions.learn(content, array.nbytes, number, *effective(op, postscale, size))
