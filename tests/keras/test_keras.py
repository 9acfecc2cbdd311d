"""Keras on real ranks, on both of its backends that train: TensorFlow over MPI, PyTorch over Gloo."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = {
    backend: RankedCases("tests.keras.cases", runner="tests.keras.runner", KERAS_BACKEND=backend)
    for backend in ("tensorflow", "torch")
}
TRANSPORTS = {"tensorflow": "mpi", "torch": "torch"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("backend", list(RESULTS))
@pytest.mark.parametrize("case", RESULTS["torch"].names)
def test_keras(case: str, backend: str, ranks: int) -> None:
    RESULTS[backend].check(case, ranks, TRANSPORTS[backend])
