"""Keras on real ranks, on both of its backends that train: TensorFlow over MPI, PyTorch over Gloo."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.launch.launching import run_to_end
from tests.on_ranks import RankedCases
from tests.ranks import TORCH

PRELOADS = {"tensorflow": ("tensorflow", "keras", "pytest", "hvdkit.keras"), "torch": (*TORCH, "keras", "hvdkit.keras")}


def cases(*modules: str, backend: str, preload: tuple[str, ...] = (), **options: Any) -> RankedCases:
    """The cases of modules of this folder on a backend."""
    return RankedCases(
        *(f"tests.keras.{module}" for module in modules),
        runner="tests.tensorflow.runner",
        preload=preload or PRELOADS[backend],
        KERAS_BACKEND=backend,
        **options,
    )


RESULTS = {backend: cases("shared_cases", "cases", backend=backend) for backend in PRELOADS}
VERIFIED = {backend: cases("verification_cases", backend=backend, HVDKIT_VERIFY="1") for backend in PRELOADS}
OF_KERAS_2 = {"preload": ("tensorflow", "pytest", "hvdkit.tensorflow.keras"), "TF_USE_LEGACY_KERAS": "1"}
KERAS_2 = cases("shared_cases", "keras2_cases", backend="tensorflow", **OF_KERAS_2)
BACKWARD = {  # gradients are in several buckets
    where: cases("backward_cases", backend="torch", per_node=per_node, HVDKIT_FUSION_THRESHOLD="65536")
    for where, per_node in (("one node", None), ("two nodes", 1))
}
TRANSPORTS = {"tensorflow": "mpi", "torch": "torch"}


def jobs(*ranks: int) -> pytest.MarkDecorator:
    """Each backend on these numbers of ranks; `make test` has two."""
    found = [(backend, number) for number in ranks for backend in TRANSPORTS]
    values = [pytest.param(*job, marks=[] if job[1] == 2 else [pytest.mark.thorough]) for job in found]
    return pytest.mark.parametrize(("backend", "ranks"), values)


@jobs(1, 2, 3)
@pytest.mark.parametrize("case", RESULTS["torch"].names)
def test_keras(case, backend, ranks):
    RESULTS[backend].check(case, ranks, TRANSPORTS[backend])


@pytest.mark.essential(backend="tensorflow")
@jobs(2, 3)
@pytest.mark.parametrize("case", VERIFIED["torch"].names)
def test_verification(case, backend, ranks):
    VERIFIED[backend].check(case, ranks, TRANSPORTS[backend])


@pytest.mark.parametrize("case", KERAS_2.names)
def test_keras_2(case):
    KERAS_2.check(case, 2, "mpi")


def test_the_api_of_tf_keras_on_another_backend_is_an_error_that_says_what_to_do():
    program = "import keras, hvdkit.tensorflow.keras"  # PyTorch may crash if it is loaded after TensorFlow
    result = run_to_end([sys.executable, "-c", program], KERAS_BACKEND="torch", CUDA_VISIBLE_DEVICES="-1")
    assert result.status == 1
    assert (
        "ImportError: hvdkit.tensorflow.keras needs Keras on TensorFlow, but Keras runs on torch.\n"
        "HINT: set KERAS_BACKEND=tensorflow, or import hvdkit.keras.\n"
    ) in result.stderr


@pytest.mark.essential(where="two nodes")
@pytest.mark.parametrize("where", BACKWARD)
@pytest.mark.parametrize("case", BACKWARD["one node"].names)
def test_gradients_during_backward(case, where):
    BACKWARD[where].check(case, 2, "torch")
