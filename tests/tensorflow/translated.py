"""What AutoGraph translates while a function is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tensorflow.python.autograph.impl import api


@contextmanager
def translated() -> Iterator[list[str]]:
    """The modules and names of the functions that AutoGraph translates inside."""
    names: list[str] = []
    translate = api._convert_actual

    def told(function: Any, context: Any) -> Any:
        names.append(f"{function.__module__}.{function.__qualname__}")
        return translate(function, context)

    with mock.patch.object(api, "_convert_actual", told):
        yield names
    assert any(name.startswith("tests.") for name in names), names  # it looks where it should


def ours(names: list[str]) -> list[str]:
    """Those of hvdkit."""
    return [name for name in names if name.startswith("hvdkit.")]
