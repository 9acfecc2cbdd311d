"""What was asked of an optimizer travels in its pickle, or is an error."""

from __future__ import annotations

import pickle

import pytest

from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.kernels import ReduceOp


def test_settings_are_pickled_whole():
    settings = GradientSettings("DistributedSGD", op=ReduceOp.SUM, groups=3)
    again = pickle.loads(pickle.dumps(settings))  # noqa: S301 (our own)
    assert again == settings


@pytest.mark.parametrize("name", ["title", "predivide"])
def test_a_pickle_without_some_of_them_is_an_error(name):
    settings = GradientSettings("DistributedSGD", op=ReduceOp.SUM)
    vars(settings).pop(name)
    data = pickle.dumps(settings)
    with pytest.raises(ValueError, match=f"another version of hvdkit, without {name}.\nHINT"):
        pickle.loads(data)  # noqa: S301 (our own)
