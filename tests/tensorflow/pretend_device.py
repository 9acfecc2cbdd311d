"""What a rank of TensorFlow's tests runs whose tensors travel as those of a GPU do; see tests.transports."""

from __future__ import annotations

import sys

from tests.tensorflow import runner
from tests.transports import pretend_device


def main(modules: str, folder: str) -> None:
    pretend_device.pretend()
    from hvdkit.tensorflow import gradient_planned

    gradient_planned.DEVICE_PART_BYTES = gradient_planned.PART_BYTES  # which is what cases make models for
    runner.main(modules, folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
