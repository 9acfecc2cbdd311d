"""What a rank of TensorFlow's tests runs whose tensors travel as those of a GPU do; see tests.transports."""

from __future__ import annotations

import sys

from tests.tensorflow import runner
from tests.transports import pretend_device

if __name__ == "__main__":
    pretend_device.pretend()
    runner.main(sys.argv[1], sys.argv[2])
