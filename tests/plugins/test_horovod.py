"""Horovod's engine carries buffers: cases of all transports and its own, on ranks that MPI or Gloo connects."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from hvdkit.plugins.horovod.engine import NOT_INSTALLED, find_native_part
from tests.launch.launching import Result, run_to_end
from tests.on_ranks import RankedCases
from tests.ranks import ROOT, run_ranks

pytestmark = pytest.mark.skipif(find_native_part() is None, reason=f"{NOT_INSTALLED}: not tested")

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
JOB = [sys.executable, "-m", "tests.plugins.horovod_jobs"]
PATIENCE_SECONDS = 90

ASKED = {"HVDKIT_TRANSPORT": "horovod"}
OPERATIONS = RankedCases("tests.torch.test_ops", **ASKED)
OPTIMIZER = RankedCases("tests.torch.test_optimizer", **ASKED)
COMPRESSION = RankedCases("tests.torch.test_compression", **ASKED)
TRANSPORT = RankedCases("tests.transports.test_transports", **ASKED)
CASES = RankedCases("tests.plugins.horovod_cases", "tests.transports.launched", **ASKED)
# They look for the addresses of numpy arrays, and for what the algorithms of the host tell the timeline.
HOST_ONLY = {"test_the_timeline_is_valid_and_has_a_row_for_each_tensor"}


def job(name: str, ranks: int, connected: str, **environment: str) -> tuple[int, str]:
    """Run one of horovod_jobs under mpirun or with ranks that Gloo connects."""
    return run_ranks([*JOB, name], ranks, connected, PATIENCE_SECONDS, **{**ASKED, **environment})


def finished(command: list[str], **environment: str) -> Result:
    """Run a launcher to its end, which must be a good one."""
    done = run_to_end(command, PATIENCE_SECONDS, **environment)
    assert done.status == 0, done
    return done


@pytest.mark.parametrize(("ranks", "connected"), [(2, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", OPERATIONS.names)
def test_operations(case, ranks, connected):
    OPERATIONS.check(case, ranks, connected)


@pytest.mark.parametrize(("ranks", "connected"), [(2, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", [name for name in OPTIMIZER.names if name not in HOST_ONLY])
def test_optimizers(case, ranks, connected):
    OPTIMIZER.check(case, ranks, connected)


@pytest.mark.parametrize(("ranks", "connected"), [(2, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", COMPRESSION.names)
def test_nothing_is_lost_that_is_encoded(case, ranks, connected):
    COMPRESSION.check(case, ranks, connected)


@pytest.mark.parametrize(("ranks", "connected"), [(2, "mpi"), (3, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", [name for name in TRANSPORT.names if name not in HOST_ONLY])
def test_transport(case, ranks, connected):
    TRANSPORT.check(case, ranks, connected)


@pytest.mark.parametrize(("ranks", "connected"), [(2, "mpi"), (3, "mpi"), (2, "torch"), (3, "torch")])
@pytest.mark.parametrize("case", CASES.names)
def test_horovods_engine(case, ranks, connected):
    CASES.check(case, ranks, connected)


def test_a_lost_rank_is_named_and_nobody_waits_for_ever():
    _, output = job("lost", 3, "torch")
    assert output.count("told after") == 2, output
    assert len(re.findall(r"rank 1\b.*(ended|left|broke|connection)", output)) >= 2, output
    assert len(re.findall("^ended$", output, re.MULTILINE)) == 2, output


@pytest.mark.parametrize("connected", ["mpi", "torch"])
def test_a_rank_that_leaves_early_fails_what_the_others_wait_for(connected):
    _, output = job("only_some_call_shutdown", 2, connected)
    assert "told: allreduce 'late' on rank 1" in output, output
    assert "without rank 0, which has left the job" in output, output


@pytest.mark.parametrize("connected", ["mpi", "torch"])
def test_the_real_horovod_is_used_where_import_horovod_gives_hvdkit(connected):
    status, output = job("carried_as_horovod", 2, connected)
    assert status == 0, output
    assert output.count(": horovod 3.0") == 2, output


@pytest.mark.parametrize("connected", ["mpi", "torch"])
def test_nothing_is_said_about_operations_that_horovods_cache_forgets(connected):
    status, output = job("more_operations_than_horovods_cache_holds", 2, connected)
    assert status == 0, output
    assert "evicted" not in output


@pytest.mark.parametrize("flag", ["--mpi", "--gloo"])
def test_hvdkitrun_carries_it_with_either_controller(flag):
    command = [sys.executable, "-m", "hvdkit.launch", flag, "-np", "2", *JOB, "carried"]
    done = finished(command, **ASKED)
    assert done.stdout.count(": horovod 3.0") == 2, done


@pytest.mark.skipif(not HOROVODRUN.exists(), reason="horovodrun is not beside this Python: not tested")
def test_horovodrun_has_horovods_engine_carry_the_buffers():
    done = finished([str(HOROVODRUN), "--gloo", "-np", "2", *JOB, "carried"], HOROVOD_GLOO_IFACE="lo")
    assert done.stdout.count(": horovod 3.0") == 2, done


@pytest.mark.parametrize("connected", ["mpi", "torch"])
def test_an_engine_that_does_not_start_is_an_error_on_every_rank(connected):
    status, output = job("does_not_start", 2, connected)
    assert status != 0
    assert "TransportUnavailableError: Horovod's engine did not start: rank 1: it refused." in output, output
    assert "HOROVOD_GLOO_IFACE" in output, output
    assert f"HVDKIT_TRANSPORT={connected} works without it" in output, output


def broken_horovod(folder: Path) -> str:
    """A folder for PYTHONPATH with a native part that cannot be loaded."""
    place = folder / "horovod" / "torch"
    place.mkdir(parents=True)
    (place / f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}").write_text("built for another PyTorch")
    return f"{folder}{os.pathsep}{ROOT}"


@pytest.mark.parametrize("connected", ["mpi", "torch"])
def test_what_was_asked_for_and_cannot_be_had_is_an_error_on_every_rank(connected, tmp_path):
    status, output = job("carried", 2, connected, PYTHONPATH=broken_horovod(tmp_path))
    assert status != 0
    assert output.count("TransportUnavailableError: HVDKIT_TRANSPORT=horovod cannot be used: ") >= 1, output
    assert "built for another PyTorch or MPI" in output, output
    assert "HINT: build Horovod for this PyTorch" in output, output


@pytest.mark.skipif(not HOROVODRUN.exists(), reason="horovodrun is not beside this Python: not tested")
def test_a_broken_horovod_that_nobody_asked_for_is_told_once_and_left_alone(tmp_path):
    """On one rank only: all must decide alike."""
    broken = broken_horovod(tmp_path)
    script = f'[ "$HOROVOD_RANK" = 1 ] && export PYTHONPATH={broken}; exec {" ".join(JOB)} carried'
    command = [str(HOROVODRUN), "--gloo", "-np", "2", "sh", "-c", script]
    done = finished(command, HOROVOD_GLOO_IFACE="lo")
    assert done.stdout.count(": torch 3.0") == 2, done
    told = done.stdout + done.stderr
    assert told.count("Horovod's engine is not used") == 1, told
    assert "rank 1: Horovod's native part cannot be loaded" in told, told
