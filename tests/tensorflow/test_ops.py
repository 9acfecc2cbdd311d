"""TensorFlow's operations and layers on real ranks, in eager execution and in graphs; and beside PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import RankedCases

MODULES = ("tests.tensorflow.ops_cases", "tests.tensorflow.batch_norm_cases", "tests.tensorflow.gradient_cases")
RESULTS = RankedCases(*MODULES, runner="tests.tensorflow.runner")


@pytest.mark.parametrize(("ranks", "transport"), [(1, "mpi"), (2, "mpi"), (3, "mpi"), (2, "torch")])
@pytest.mark.parametrize("case", RESULTS.names)
def test_ops(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)


@pytest.mark.parametrize(
    "program",
    [
        "import sys, hvdkit.torch; assert 'tensorflow' not in sys.modules",
        "import sys, hvdkit.tensorflow; assert 'torch' not in sys.modules",
        "import torch, hvdkit.torch, tensorflow, hvdkit.tensorflow as hvd; hvd.init(); "
        "assert hvdkit.torch.size() == 1; hvdkit.torch.allreduce(torch.ones(2)); hvd.allreduce(tensorflow.ones(2))",
    ],
)
def test_frameworks_leave_each_other_alone(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
