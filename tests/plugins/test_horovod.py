"""Horovod's engine carries buffers: cases of all transports and its own, on ranks that MPI or Gloo connects."""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from hvdkit.plugins.horovod.engine import NOT_INSTALLED, find_native_part
from tests.ranks import ROOT, RankedCases, run_ranks

pytestmark = pytest.mark.skipif(find_native_part() is None, reason=f"{NOT_INSTALLED}: not tested")

PATIENCE_SECONDS = 90

ASKED = {"HVDKIT_TRANSPORT": "horovod"}
OPERATIONS = RankedCases("tests.torch.ops_cases", **ASKED)
OPTIMIZER = RankedCases("tests.torch.optimizer_cases", **ASKED)
COMPRESSION = RankedCases("tests.torch.compression_cases", **ASKED)
TRANSPORT = RankedCases("tests.transports.transport_cases", **ASKED)
CASES = RankedCases("tests.plugins.horovod_cases", "tests.transports.launched", **ASKED)
# They look for the addresses of numpy arrays, and for what the algorithms of the host tell the timeline.
HOST_ONLY = {"case_the_timeline_is_valid_and_has_a_row_for_each_tensor"}


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


@pytest.mark.parametrize("connected", ["mpi", "torch"])
def test_what_was_asked_for_and_cannot_be_had_is_an_error_on_every_rank(connected, tmp_path):
    place = tmp_path / "horovod" / "torch"
    place.mkdir(parents=True)
    (place / f"mpi_lib_v2{EXTENSION_SUFFIXES[0]}").write_text("built for another PyTorch")
    command = [sys.executable, "-c", "import hvdkit.torch as hvd; hvd.init()"]
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    status, output = run_ranks(command, 2, connected, PATIENCE_SECONDS, **ASKED, PYTHONPATH=path)
    assert status != 0
    assert "TransportUnavailableError: HVDKIT_TRANSPORT=horovod cannot be used: " in output, output
    assert "built for another PyTorch or MPI" in output, output
    assert "HINT: build Horovod for this PyTorch" in output, output
