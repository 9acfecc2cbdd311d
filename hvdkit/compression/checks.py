"""Checks of codecs' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def check_flag(codec: str, argument: str, value: Any) -> None:
    """Raise TypeError unless a value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"Compression.{codec}: {argument} must be True or False, got {value!r}")


def check_choice(codec: str, argument: str, value: Any, choices: Sequence[str]) -> None:
    """Raise ValueError unless a value is among ``choices``."""
    if value not in choices:
        listed = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"Compression.{codec}: {argument} must be {listed}, got {value!r}")


def check_integer(codec: str, argument: str, value: Any, least: int, most: int) -> None:
    """Raise TypeError unless a value is an integer, ValueError unless it is from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Compression.{codec}: {argument} must be an integer, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"Compression.{codec}: {argument} must be from {least} to {most}, got {value}")


def check_block(codec: str, block: Any, multiple: int) -> None:
    """Raise TypeError or ValueError unless a block is a positive multiple of ``multiple``."""
    check_integer(codec, "block", block, multiple, 1 << 20)
    if block % multiple:
        raise ValueError(f"Compression.{codec}: block must be a multiple of {multiple}, got {block}")


def check_seed(codec: str, seed: Any) -> None:
    """Raise TypeError or ValueError unless a seed is an integer of 32 bits."""
    check_integer(codec, "seed", seed, 0, 2**32 - 1)


def check_number(codec: str, argument: str, value: Any) -> float:
    """Return a value as float. Raises TypeError unless it is a real number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Compression.{codec}: {argument} must be a number, got {value!r}")
    return float(value)


def check_ratio(codec: str, ratio: Any) -> None:
    """Raise TypeError unless a ratio is a number, ValueError unless it is above 0 and at most 1."""
    if not 0.0 < check_number(codec, "ratio", ratio) <= 1.0:
        raise ValueError(
            f"Compression.{codec}: ratio must be above 0 and at most 1 (0.01 sends one value of 100), got {ratio}"
        )
