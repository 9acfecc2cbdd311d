"""What tests of examples share."""

from __future__ import annotations

import pytest

from tests.ranks import ROOT


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which PyTorch cannot be imported: TensorFlow's users need none."""
    folder = tmp_path_factory.mktemp("without_torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text('raise ImportError("there shall be no PyTorch")')
    return {"PYTHONPATH": f"{folder}:{ROOT}", "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
