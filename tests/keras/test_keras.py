"""Keras on real ranks, on both of its backends that train: TensorFlow over MPI, PyTorch over Gloo."""

from __future__ import annotations

import pytest

from tests.on_ranks import RankedCases
from tests.ranks import TORCH

RUNNER = "tests.tensorflow.runner"
PRELOADS = {"tensorflow": ("tensorflow", "keras", "pytest", "hvdkit.keras"), "torch": (*TORCH, "keras", "hvdkit.keras")}
RESULTS = {
    backend: RankedCases(
        *("tests.keras.shared_cases", "tests.keras.cases"), runner=RUNNER, preload=preload, KERAS_BACKEND=backend
    )
    for backend, preload in PRELOADS.items()
}
VERIFIED = {
    backend: RankedCases(
        "tests.keras.verification_cases", runner=RUNNER, preload=preload, KERAS_BACKEND=backend, HVDKIT_VERIFY="1"
    )
    for backend, preload in PRELOADS.items()
}
KERAS_2 = RankedCases(
    *("tests.keras.shared_cases", "tests.keras.keras2_cases"),
    runner=RUNNER,
    preload=("tensorflow", "pytest", "hvdkit.tensorflow.keras"),
    KERAS_BACKEND="tensorflow",
    TF_USE_LEGACY_KERAS="1",
)
BACKWARD = {
    where: RankedCases(
        "tests.keras.backward_cases",
        runner=RUNNER,
        preload=PRELOADS["torch"],
        per_node=per_node,
        KERAS_BACKEND="torch",
        HVDKIT_FUSION_THRESHOLD="65536",  # so that gradients are in several buckets
    )
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


@pytest.mark.essential(where="two nodes")
@pytest.mark.parametrize("where", BACKWARD)
@pytest.mark.parametrize("case", BACKWARD["one node"].names)
def test_gradients_during_backward(case, where):
    BACKWARD[where].check(case, 2, "torch")
