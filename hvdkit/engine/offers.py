"""One rank's gradient of one slot, for one step: where it lies, and where its result shall be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.collectives.group import Array


class Offer:
    """A gradient in memory of its owner, who neither reads nor writes it until the step is over.

    ``address``: where its elements lie, in the order of its slot. ``make_array`` gives them as a flat array, which is
    asked for only where one is needed, and keeps what they lie in. ``source``: where the gradient is to be read, if the
    result goes elsewhere than it came from.
    """

    __slots__ = ("_array", "_make_array", "address", "source")

    def __init__(self, address: int, make_array: Callable[[], Any], source: Array | None = None) -> None:
        self.address = address
        self.source = source
        self._make_array = make_array
        self._array: Any = None

    @property
    def array(self) -> Any:
        """The memory of the result, flat: an array, or a tensor of a device."""
        if self._array is None:
            self._array = self._make_array()
        return self._array


def offer_of(array: Array, source: Array | None = None) -> Offer:
    """A flat array as an offer."""
    return Offer(array.__array_interface__["data"][0], lambda: array, source)


def _nothing() -> Any:
    raise AssertionError("the gradient of a small slot lies in the slot")


# The gradient has been copied into its slot; see Buckets.small.
FILLED = Offer(0, _nothing)
