"""What was asked of an optimizer: it travels in its pickle, or is an error, and codecs can be told apart."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from hvdkit.api.gradients.compression import Compressions, check_compression, check_policy
from hvdkit.api.gradients.planning import local_variables
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.compression import CodecState, CustomCodec
from hvdkit.kernels import ReduceOp
from tests.told import told


def test_settings_are_pickled_whole():
    settings = GradientSettings("DistributedSGD", op=ReduceOp.SUM, groups=3)
    again = pickle.loads(pickle.dumps(settings))  # noqa: S301 (our own)
    assert again == settings


@pytest.mark.parametrize("name", ["title", "predivide"])
def test_a_pickle_without_some_of_them_is_an_error(name):
    settings = GradientSettings("DistributedSGD", op=ReduceOp.SUM)
    vars(settings).pop(name)
    data = pickle.dumps(settings)
    fact = f"this optimizer was pickled by another version of hvdkit, without {name}.\n"
    hint = "HINT: make a new DistributedOptimizer, and load the state_dict() of the old one."
    with told(ValueError, fact + hint):
        pickle.loads(data)  # noqa: S301 (our own)


class WithInit(CustomCodec):
    """Two of these with other shares would look the same to other ranks."""

    name: ClassVar[str] = "with_init"

    share = 0.5

    def __init__(self, share: float) -> None:
        self.share, self._scratch = share, None

    def encode(self, values: Any) -> Any:
        return values

    def decode(self, payload: Any, elements: int) -> Any:
        return payload.view(np.float32)


@dataclass(frozen=True)
class WithFields(CustomCodec):
    """As it should be; what is computed once is no parameter."""

    name: ClassVar[str] = "with_fields"
    share: float = 0.5

    @cached_property
    def square(self) -> float:
        return self.share**2

    encode, decode = WithInit.encode, WithInit.decode


def test_codecs_whose_parameters_ranks_cannot_compare_are_refused():
    with pytest.raises(TypeError) as caught:
        check_compression("DistributedOptimizer", WithInit(0.5))
    assert str(caught.value) == (
        "DistributedOptimizer: compression: WithInit keeps share outside of dataclass fields: ranks cannot compare "
        "their values.\n"
        "HINT: make the class a @dataclass(frozen=True) with a field for each parameter, and no __init__ of its own; "
        "begin the names of all other attributes with _."
    )
    codec = WithFields(0.25)
    assert codec.square == 0.0625
    assert check_compression("DistributedOptimizer", codec) is codec
    assert codec.summary == "with_fields(feedback=True, compress='between_nodes', share=0.25)"


def test_several_compressions_go_with_some_operations_only():
    fact = "DistributedOptimizer: op=hvd.Adasum takes one compression for all parameters, not one for each"
    with told(ValueError, fact):
        check_policy("DistributedOptimizer", {"*": Compressions.int8}, ReduceOp.ADASUM)
    fact = "DistributedOptimizer: a function for compression works only with op=hvd.Average or Sum"
    with told(ValueError, fact):
        check_policy("DistributedOptimizer", lambda name, parameter: Compressions.int8, ReduceOp.MIN)


def test_a_local_layer_without_variables_is_refused():
    layer = SimpleNamespace(name="dense", built=False, trainable_weights=[])
    fact = "local_layers: layer 'dense' has no variables yet\n"
    with told(ValueError, f"{fact}HINT: build the model first: model.build(input_shape)."):
        local_variables(layer)


def test_a_codec_that_returns_more_than_it_may_is_refused():
    codec = WithFields(feedback=False)
    payload = np.empty(codec.most_bytes(3), np.uint8)
    fact = f"{codec.summary}: encode returned 8000 bytes, more than the 1036 that most_bytes allows\n"
    hint = "HINT: set largest_ratio of the class to the largest ratio of payload bytes to gradient bytes."
    with told(TypeError, fact + hint):
        codec.encode_into(payload, np.ones(2000, np.float32), CodecState(2000, ()))
