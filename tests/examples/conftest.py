"""What tests of examples share."""

from __future__ import annotations

import pytest

from tests.ranks import ROOT


@pytest.fixture
def environment(backend: str | None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Keras with a backend, if any is named. Beside TensorFlow no PyTorch can be imported: its users need none."""
    if backend != "tensorflow":
        return {"KERAS_BACKEND": backend} if backend else {}
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text('raise ImportError("there shall be no PyTorch")')
    return {"PYTHONPATH": f"{folder}:{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
