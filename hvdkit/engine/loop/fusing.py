"""Which operations that are ready travel together: a pure decision of the coordinator."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from hvdkit.engine.ops import KINDS
from hvdkit.engine.ops.requests import Signature

# An estimate is enough to bound a batch, so every element counts as the widest real one.
WIDEST_ELEMENT = 8


def batch_size(ready: Iterable[tuple[int, Signature]], threshold: int) -> int:
    """How many of the first operations, as (process set, signature), run as one: at least the first.

    Those of one kind that fuses, of one dtype in one process set, with the same operation and factors, of at most
    ``threshold`` bytes.
    No operation is looked at beyond the first that runs by itself.
    """
    rest = iter(ready)
    process_set, first = next(rest)
    nbytes = _fusible_bytes(first)
    if nbytes is None:
        return 1
    count = 1
    for other_set, signature in rest:
        more = _fusible_bytes(signature)
        if more is None or other_set != process_set or nbytes + more > threshold:
            break
        if _fusion_class(first) != _fusion_class(signature):
            break
        nbytes += more
        count += 1
    return count


def _fusible_bytes(signature: Signature) -> int | None:
    """Bytes of an operation that may share a batch, else None."""
    # What is encoded together decides the values: it must not depend on what else was ready.
    if not KINDS[signature["kind"]].fuses or "codec" in signature or len(set(signature["dtype"])) != 1:
        return None
    return WIDEST_ELEMENT * sum(int(prod(shape)) for shape in signature["shape"])


def _fusion_class(signature: Signature) -> tuple[Any, ...]:
    fields = ("kind", "op", "prescale", "postscale", "device", "direct")
    return (signature["dtype"][0], *(signature.get(name) for name in fields))
