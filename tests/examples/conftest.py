"""What tests of examples share."""

from __future__ import annotations

import pytest

from tests.ranks import ROOT


@pytest.fixture
def environment(backend: str | None, without_torch: dict[str, str]) -> dict[str, str]:
    """Keras with a backend, if any is named."""
    if backend == "tensorflow":
        return without_torch
    return {"KERAS_BACKEND": backend} if backend else {}


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which PyTorch cannot be imported: TensorFlow's users need none."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text('raise ImportError("there shall be no PyTorch")')
    return {"PYTHONPATH": f"{folder}:{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
