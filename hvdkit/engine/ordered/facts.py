"""Facts that the ranks of a group compare, at length, before they communicate by them."""

from __future__ import annotations

import json

import numpy as np

from hvdkit.engine.ops.agreements import PLAN
from hvdkit.engine.ops.requests import Key, Request, Signature
from hvdkit.engine.ordered.calls import NO_ARRAY, Collective, CollectiveKind, Description
from hvdkit.engine.ordered.group import OrderedGroup
from hvdkit.errors import MismatchError


def agree(group: OrderedGroup, name: str, facts: Signature) -> None:
    """Compare the facts of all ranks, and raise MismatchError on all if they differ, with the first that does. Blocks.

    ``facts``: as a named operation of the kind "plan" has them, with its "slots". ``name`` is for errors.
    """
    size, own = group.group.size, np.frombuffer(bytearray(json.dumps(facts).encode()), dtype=np.uint8)
    lengths = np.empty(size, dtype=np.int64)
    description = Description(CollectiveKind.ALL_GATHER, "int64", 1)
    _run(group, Collective(description, np.array([own.size], dtype=np.int64), lengths))
    texts = [np.empty(length, dtype=np.uint8) for length in lengths.tolist()]
    description = Description(CollectiveKind.ALL_GATHER, "bytes", -1)
    _run(group, Collective(description, NO_ARRAY, NO_ARRAY, outgoing=[own] * size, incoming=texts))
    requests = {
        rank: Request(json.loads(text.tobytes())) for rank, text in zip(group.group.members, texts, strict=True)
    }
    assert PLAN.mismatch is not None
    if (problem := PLAN.mismatch(Key(0, "plan", name), requests)) is not None:
        raise MismatchError(problem)


def _run(group: OrderedGroup, call: Collective) -> None:
    if (operation := group.run(call)) is not None:
        operation.wait()
