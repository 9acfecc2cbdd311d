"""TensorFlow's operations and layers on real ranks, in eager execution and in graphs; and beside PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.ranks import RankedCases, run_ranks

RUNNER = "tests.tensorflow.runner"
PRELOAD = ("tensorflow", "pytest", "hvdkit.tensorflow")
OPERATIONS = RankedCases("tests.tensorflow.ops_cases", "tests.tensorflow.complex_cases", runner=RUNNER, preload=PRELOAD)
GRADIENTS = RankedCases(
    "tests.tensorflow.batch_norm_cases",
    "tests.tensorflow.gradient_cases",
    "tests.tensorflow.pairing_cases",
    runner=RUNNER,
    preload=PRELOAD,
)
VERIFIED = RankedCases("tests.tensorflow.verification_cases", runner=RUNNER, preload=PRELOAD, HVDKIT_VERIFY="1")

jobs = pytest.mark.parametrize(("ranks", "transport"), [(1, "mpi"), (2, "mpi"), (3, "mpi"), (2, "torch"), (3, "torch")])


@pytest.mark.essential(transport="torch")
@jobs
@pytest.mark.parametrize("case", OPERATIONS.names)
def test_operations(case: str, ranks: int, transport: str) -> None:
    OPERATIONS.check(case, ranks, transport)


@pytest.mark.essential(transport="mpi")
@jobs
@pytest.mark.parametrize("case", GRADIENTS.names)
def test_gradients(case: str, ranks: int, transport: str) -> None:
    GRADIENTS.check(case, ranks, transport)


@pytest.mark.parametrize(
    ("how", "transport", "way"),
    [
        ("left", "mpi", "graph"),
        ("left", "torch", "eager"),
        ("killed", "torch", "graph"),
        pytest.param("killed", "torch", "eager", marks=pytest.mark.thorough),
    ],
)
def test_a_lost_rank_is_an_unknown_error_of_tensorflow(how: str, transport: str, way: str) -> None:
    command = [sys.executable, "-m", "tests.tensorflow.lost_rank", how, way]
    _, output = run_ranks(command, 3, transport, timeout=120, preload=PRELOAD)
    assert sorted(re.findall(r"RANK (\d) CAUGHT PeerLostError", output)) == ["0", "2"], output


@pytest.mark.parametrize(("ranks", "transport"), [(2, "mpi"), (2, "torch"), (3, "mpi")])
@pytest.mark.parametrize("case", VERIFIED.names)
def test_verification(case: str, ranks: int, transport: str) -> None:
    VERIFIED.check(case, ranks, transport)


@pytest.mark.parametrize(
    ("program", "legacy"),
    [
        ("import sys, hvdkit.torch; assert 'tensorflow' not in sys.modules", "0"),
        ("import sys, hvdkit.tensorflow; assert 'torch' not in sys.modules", "0"),
        (
            "import hvdkit.torch as hvd, sys; hvd.init(); assert 'keras' not in sys.modules; import keras; "
            "assert keras.optimizers.SGD.apply.asks_hvdkit",
            "0",
        ),
        (
            "import torch, hvdkit.torch, tensorflow, hvdkit.tensorflow as hvd; hvd.init(); "
            "assert hvdkit.torch.size() == 1; hvdkit.torch.allreduce(torch.ones(2)); hvd.allreduce(tensorflow.ones(2))",
            "0",
        ),
        (
            "import tensorflow, hvdkit.tensorflow as hvd; hvd.init(); kinds = tensorflow.keras.optimizers; "
            "assert kinds.Adam.apply_gradients.asks_hvdkit and kinds.legacy.Adam.apply_gradients.asks_hvdkit",
            "1",
        ),
    ],
)
def test_frameworks_leave_each_other_alone_and_keras_is_watched(program: str, legacy: str) -> None:
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": legacy}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
