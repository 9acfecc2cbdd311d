"""Assertions on what is said to users."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def told(kind: type[BaseException], *texts: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """What runs inside raises ``kind`` with a message that holds all ``texts``."""
    with pytest.raises(kind) as caught:
        yield caught
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@contextmanager
def warned(text: str, times: int = 1) -> Iterator[None]:
    """What runs inside warns with the text, so often."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [str(one.message) for one in caught if text in str(one.message)]
    assert len(found) == times, (found, [str(one.message) for one in caught])
