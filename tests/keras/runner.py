"""The program of a rank of Keras's tests, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")


def main(module: str, folder: str) -> None:
    if os.environ["KERAS_BACKEND"] == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(1)  # so that what blocks it shows
        tf.config.threading.set_intra_op_parallelism_threads(1)
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        import hvdkit.tensorflow.keras as hvd
    else:
        import hvdkit.keras as hvd
    from tests.ranks import leave, run_cases

    hvd.init(process_sets="dynamic")
    run_cases(module, Path(folder, f"{hvd.rank()}.json"), hvd)
    hvd.shutdown()
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
