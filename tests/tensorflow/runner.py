"""The program of a rank of the tests of TensorFlow and of Keras, on the backend that KERAS_BACKEND names.

Of TensorFlow alone PyTorch cannot be imported under MPI: its users need none.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")


class WithoutTorch(MetaPathFinder):
    """Another finder, but for PyTorch."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return None if name.partition(".")[0] == "torch" else self._finder.find_spec(name, path, target)


def main(modules: str, folder: str) -> None:
    backend = os.environ.get("KERAS_BACKEND")
    if backend is None and os.environ["HVDKIT_TRANSPORT"] == "mpi":
        sys.meta_path[:] = [WithoutTorch(finder) for finder in sys.meta_path]
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)  # so that what blocks it shows
        tf.config.threading.set_intra_op_parallelism_threads(1)
    of_keras = "tensorflow.keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras"
    hvd = importlib.import_module(f"hvdkit.{of_keras if backend else 'tensorflow'}")
    from tests.ranks import leave, run_cases

    hvd.init(process_sets="dynamic")
    run_cases(modules, Path(folder, f"{hvd.rank()}.json"), hvd)
    hvd.shutdown()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
