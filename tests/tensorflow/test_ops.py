"""TensorFlow's operations and layers on real ranks, in eager execution and in graphs; and beside PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.on_ranks import RankedCases
from tests.ranks import run_ranks

RUNNER = "tests.tensorflow.runner"
PRELOAD = ("tensorflow", "pytest", "hvdkit.tensorflow")
OPERATIONS = RankedCases("tests.tensorflow.ops_cases", "tests.tensorflow.complex_cases", runner=RUNNER, preload=PRELOAD)
GRADIENTS = RankedCases(
    *(f"tests.tensorflow.{subject}_cases" for subject in ("batch_norm", "gradient", "pairing")),
    runner=RUNNER,
    preload=PRELOAD,
)
VERIFIED = RankedCases("tests.tensorflow.verification_cases", runner=RUNNER, preload=PRELOAD, HVDKIT_VERIFY="1")

jobs = pytest.mark.parametrize(("ranks", "transport"), [(1, "mpi"), (2, "mpi"), (3, "mpi"), (2, "torch"), (3, "torch")])


@pytest.mark.essential(transport="torch")
@jobs
@pytest.mark.parametrize("case", OPERATIONS.names)
def test_operations(case, ranks, transport):
    OPERATIONS.check(case, ranks, transport)


@pytest.mark.essential(transport="mpi")
@jobs
@pytest.mark.parametrize("case", GRADIENTS.names)
def test_gradients(case, ranks, transport):
    GRADIENTS.check(case, ranks, transport)


@pytest.mark.parametrize("transport", ["mpi", pytest.param("torch", marks=pytest.mark.thorough)])
def test_forked_children_end_as_python_ends(transport):
    command = [sys.executable, "-m", "tests.tensorflow.programs", "fork"]
    status, output = run_ranks(command, 2, transport, timeout=200, preload=PRELOAD)
    assert status == 0, output
    assert all(f"RANK {rank} THROUGH" in output for rank in range(2)), output


@pytest.mark.parametrize(
    ("how", "transport", "way"),
    [
        ("left", "mpi", "graph"),
        ("left", "torch", "eager"),
        ("killed", "torch", "graph"),
        pytest.param("left", "mpi", "eager", marks=pytest.mark.thorough),
        pytest.param("left", "torch", "graph", marks=pytest.mark.thorough),
        pytest.param("killed", "torch", "eager", marks=pytest.mark.thorough),
    ],
)
def test_a_lost_rank_is_an_unknown_error_of_tensorflow(how, transport, way):
    command = [sys.executable, "-m", "tests.tensorflow.programs", "lose", how, way]
    _, output = run_ranks(command, 3, transport, timeout=120, preload=PRELOAD)
    assert sorted(re.findall(r"RANK (\d) CAUGHT PeerLostError", output)) == ["0", "2"], output


@pytest.mark.parametrize(("ranks", "transport"), [(2, "mpi"), (2, "torch"), (3, "mpi")])
@pytest.mark.parametrize("case", VERIFIED.names)
def test_verification(case, ranks, transport):
    VERIFIED.check(case, ranks, transport)


@pytest.mark.parametrize(
    "program",
    [
        "import sys, hvdkit.torch; assert 'tensorflow' not in sys.modules",
        "import sys, hvdkit.tensorflow; assert 'torch' not in sys.modules",
        "import hvdkit.torch as hvd, sys; hvd.init(); assert 'keras' not in sys.modules; import keras; "
        "assert keras.optimizers.SGD.apply.asks_hvdkit",
        "import torch, hvdkit.torch, tensorflow, hvdkit.tensorflow as hvd; hvd.init(); "
        "assert hvdkit.torch.size() == 1; hvdkit.torch.allreduce(torch.ones(2)); hvd.allreduce(tensorflow.ones(2))",
        "import os; os.environ['TF_USE_LEGACY_KERAS'] = '1'; import tensorflow, hvdkit.tensorflow as hvd; hvd.init(); "
        "kinds = tensorflow.keras.optimizers; "
        "assert kinds.Adam.apply_gradients.asks_hvdkit and kinds.legacy.Adam.apply_gradients.asks_hvdkit",
    ],
)
def test_frameworks_leave_each_other_alone(program):
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
