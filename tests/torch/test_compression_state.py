"""What is refused of what codecs kept, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdkit.torch.gradients import compression_state
from tests.told import told

OURS = {"weight": (50, 60)}


def saved(**changes: Any) -> dict[str, Any]:
    """A state of one parameter of 50 x 60."""
    kept = {"weight": {"residual": torch.ones(3000)}}
    units = {"weight": {"residual": 1.0, "owed": 1.0}}
    where = {"format": compression_state.FORMAT, "rank": 0, "size": 2, "place": "", "turn": 1, "notes": []}
    return {**where, "shapes": {"weight": [50, 60]}, "kept": kept, "units": units, **changes}


def test_what_was_saved_is_taken() -> None:
    two = [saved(), saved(rank=1)]
    assert compression_state.check(two, OURS) == two
    assert compression_state.check(two[0], OURS) == two[:1]
    assert compression_state.check(saved(), {"bias": (60,)}), "of a parameter that is not here"


@pytest.mark.parametrize(
    ("wrong", "error", "texts"),
    [
        (3, TypeError, ("got int",)),
        ("state", TypeError, ("got str",)),
        ([3], TypeError, ("got int in a list",)),
        ([saved(), saved(format=1)], ValueError, ("not written by this version",)),
        ([saved(), saved()], ValueError, ("what rank 0 of 2 kept is there twice", "HINT")),
        (saved(shapes={"weight": [60, 50]}), ValueError, ("'weight' was 60 x 50", "is 50 x 60 here", "HINT")),
        (
            saved(kept={"weight": {"residual": torch.ones(1)}}),
            ValueError,
            ("'residual' of 'weight' has 1 elements", "3000"),
        ),
        (saved(kept={"weight": {"nonsense": torch.ones(3000)}}), ValueError, ("of 'weight' there is ['nonsense']",)),
    ],
)
def test_what_was_not_saved_is_refused(wrong: Any, error: type[Exception], texts: tuple[str, ...]) -> None:
    with told(error, *texts):
        compression_state.check(wrong, OURS)
