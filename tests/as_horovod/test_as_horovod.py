"""Scripts that import horovod run on hvdkit as they are, by hvdkitrun --as-horovod or install_as_horovod()."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.launch.launching import call_bare, run_to_end
from tests.ranks import JOB_TIMEOUT_SECONDS, ROOT

SCRIPTS = Path(__file__).with_name("scripts")
HOROVOD_ITSELF = "raise RuntimeError('this is Horovod itself')\n"


@pytest.mark.parametrize(
    ("controller", "script", "arguments", "legacy"),
    [
        ("--mpi", "pytorch_digits.py", ["--fp16-allreduce"], "0"),
        pytest.param("--gloo", "pytorch_digits.py", [], "0", marks=pytest.mark.thorough),
        pytest.param("--mpi", "keras_digits.py", ["horovod.keras"], "0", marks=pytest.mark.thorough),
        pytest.param("--gloo", "keras_digits.py", ["horovod.tensorflow.keras"], "0", marks=pytest.mark.thorough),
        pytest.param("--mpi", "keras_digits.py", ["horovod.tensorflow.keras"], "1", marks=pytest.mark.thorough),
    ],
)
def test_a_script_for_horovod_trains_as_it_is(controller, script, arguments, legacy, tmp_path):
    # A Horovod that is installed is not what the script gets.
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text(HOROVOD_ITSELF)
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    flags = [controller, "-np", "2", "--as-horovod"]
    environment = {"TF_USE_LEGACY_KERAS": legacy, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    # It imports a framework and trains.
    result = call_bare(*flags, *command, seconds=JOB_TIMEOUT_SECONDS, **environment, PYTHONPATH=path)
    assert result.status == 0, result.stdout + result.stderr
    [last] = [line for line in result.stdout.splitlines() if "done: " in line]
    assert last.startswith("[0]<stdout>: done: 2 workers, loss ")
    assert last.endswith("same weights: True")


def output_of(program: str, *, folder: Path | None = None, status: int = 0) -> str:
    """What a program prints, in a Python that finds packages of ``folder`` too."""
    done = run_to_end([sys.executable, "-c", f"import sys; sys.path.append({str(folder)!r})\n{program}"], 120)
    assert done.status == status, done.stderr
    return done.stdout + done.stderr


def test_modules_of_both_names_are_one():
    program = """
import importlib, pkgutil, hvdkit
from importlib.util import find_spec
hvdkit.install_as_horovod()
hvdkit.install_as_horovod()
assert find_spec("horovod") and not hasattr(importlib.import_module("horovod.common.exceptions"), "__path__")
import horovod, horovod.torch as theirs, hvdkit.torch as ours
import horovod.torch.mpi_ops, horovod.torch.compression, horovod.torch.optimizer, horovod.torch.functions
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import gloo_built, mpi_built, nccl_built, split_list
from horovod.runner.elastic.discovery import HostDiscoveryScript
assert find_spec("horovod").name == "horovod" and find_spec("horovod.torch") and not find_spec("horovod.spark")
assert importlib.reload(horovod).torch is theirs
assert theirs is ours and ours.__spec__.name == "hvdkit.torch" and ours.__name__ == "hvdkit.torch"
assert HorovodInternalError is ours.HorovodInternalError and ProcessSet is ours.ProcessSet
from horovod.data.data_loader_base import AsyncDataLoaderMixin
import horovod.data, hvdkit.data
assert AsyncDataLoaderMixin is hvdkit.data.AsyncDataLoaderMixin and horovod.data is hvdkit.data
assert horovod.torch.compression.Compression is ours.Compression
assert gloo_built(verbose=True) and split_list([1, 2, 3], 2) == [[1, 2], [3]]
assert tuple(map(int, horovod.__version__.split("."))) >= (0, 28)
print("imported")
"""
    assert output_of(program) == "imported\n"


def test_horovods_util_asks_the_frameworks():
    program = """
import hvdkit
hvdkit.install_as_horovod()
import torch, hvdkit.tensorflow, hvdkit.torch
from horovod.common.util import gpu_available, nccl_built, num_rank_is_power_2
assert gpu_available("torch") == torch.cuda.is_available()
assert gpu_available("tensorflow") == hvdkit.tensorflow.gpu_available()
assert not gpu_available("mxnet")
assert nccl_built() == (hvdkit.torch.nccl_built() > 0)
assert [number for number in range(9) if num_rank_is_power_2(number)] == [1, 2, 4, 8]
print("asked")
"""
    assert output_of(program).startswith("asked\n")  # then TensorFlow's log


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("import horovod.spark", "No module named 'horovod.spark'"),
        ("import horovod.ray", "No module named 'horovod.ray'"),
        ("import horovod.runner.launch", "start the job with hvdkitrun"),
    ],
)
def test_what_hvdkit_does_not_have_is_an_import_error(statement, told):
    program = f"import hvdkit\nhvdkit.install_as_horovod()\n{statement}"
    assert told in output_of(program, status=1)


def test_horovod_run_runs_a_function_on_all_ranks():
    program = "import hvdkit\nhvdkit.install_as_horovod()\nimport horovod\nprint(horovod.run(abs, (-3,), np=2))"
    assert output_of(program).startswith("[3, 3]\n")  # then the word that the ranks did not call hvd.init()


def test_after_horovod_itself_it_is_too_late(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("")
    program = "import horovod, hvdkit\nhvdkit.install_as_horovod()"
    assert "was imported before" in output_of(program, folder=tmp_path, status=1)
