"""TensorFlow's tensors on a device that PyTorch's collectives serve: ranks with the CPU in its place, and a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.ranks import RankedCases

RUNNER = "tests.tensorflow.pretend_device"
PRELOAD = ("tensorflow", "pytest", "hvdkit.tensorflow")
CASES = RankedCases("tests.tensorflow.device_cases", runner=RUNNER, preload=PRELOAD)
OPERATIONS = RankedCases("tests.tensorflow.ops_cases", runner=RUNNER, preload=PRELOAD)
GRADIENTS = RankedCases("tests.tensorflow.gradient_cases", runner=RUNNER, preload=PRELOAD)

ON_A_GPU = """
import sys
import numpy as np, tensorflow as tf, torch
gpus = tf.config.list_physical_devices("GPU")
if not gpus:
    sys.exit(5)
tf.config.set_visible_devices(gpus[-1:], "GPU")
tf.config.experimental.set_memory_growth(gpus[-1], True)
from hvdkit.tensorflow.ops.bridge import call
from hvdkit.tensorflow.ops.device import DTYPES, Device, _number_of
number = _number_of("GPU:0")
assert number == len(gpus) - 1, number
device = Device("GPU:0", f"cuda:{number}")
for name in sorted(DTYPES):
    for shape in ((), (0, 3), (5,), (1000, 1000)):
        values = (np.arange(int(np.prod(shape))) % 100).reshape(shape)
        with tf.device("GPU:0"):
            tensor = tf.cast(tf.constant(values, tf.float64), name)
        (taken,) = device.take([tensor])
        assert taken.tensor.device == torch.device(device.torch_name)
        np.testing.assert_array_equal(taken.tensor.double().cpu().numpy(), values)
        (given,) = device.give([taken.tensor.clone()])
        assert given.device.endswith("GPU:0")
        assert given.dtype == tensor.dtype
        np.testing.assert_array_equal(tf.cast(given, tf.float64).numpy(), values)
        there_and_back = lambda x: device.give([device.take([x])[0].tensor + 0])[0]
        in_a_graph = tf.function(lambda x: call(device, there_and_back, [x], x.dtype, "test"))
        np.testing.assert_array_equal(tf.cast(in_a_graph(tensor), tf.float64).numpy(), values)

with tf.device("GPU:0"):
    factor = tf.random.normal([4000, 4000]) / 70
    product = factor
    for _ in range(50):  # which TensorFlow is still at when the next line runs
        product = product @ factor
    (taken,) = device.take([product])
np.testing.assert_array_equal(taken.tensor.cpu().numpy(), product.numpy())
collective = torch.cuda.Stream(device.torch_name)
with torch.cuda.stream(collective):
    torch.cuda._sleep(10**11)  # as one that waits for another rank
    end = collective.record_event()
device.take([product])
assert not end.query(), "it waited for what another rank may never end"
"""


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("case", CASES.names)
def test_device(case: str, ranks: int) -> None:
    CASES.check(case, ranks, "torch")


@pytest.mark.thorough
@pytest.mark.parametrize("case", OPERATIONS.names)
def test_operations_give_the_same_on_a_device(case: str) -> None:
    OPERATIONS.check(case, 2, "torch")


@pytest.mark.thorough
@pytest.mark.parametrize("case", GRADIENTS.names)
def test_gradients_are_the_same_on_a_device(case: str) -> None:
    GRADIENTS.check(case, 2, "torch")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
def test_tensors_of_a_gpu_change_hands() -> None:
    status = subprocess.run([sys.executable, "-c", ON_A_GPU], check=False, timeout=300).returncode
    if status == 5:
        pytest.skip("no GPU that TensorFlow can use")
    assert status == 0
