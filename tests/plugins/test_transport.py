"""Horovod's engine and the transport below it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from hvdkit.environments.base import World
from hvdkit.errors import TransportUnavailableError
from hvdkit.plugins.horovod.engine import NativeHorovod
from hvdkit.plugins.horovod.transport import HorovodTransport
from tests.network import MemoryTransport, Wires
from tests.told import told


class Starting(MemoryTransport):
    """Another transport is used once it has started."""

    def start(self, exchange, start_seconds, silence_seconds):
        self.started = MemoryTransport(0, 1, self.wires)
        assert exchange(b"connected") == [b"connected"]
        return self.started


def test_the_transport_below_starts_first_also_where_there_is_no_engine():
    below = Starting(0, 1, Wires(1))
    transport = HorovodTransport(below, None, World("threads", 0, 1), required=False)
    assert transport.start(lambda blob: [blob], 1.0, 1.0) is below.started


def test_a_native_part_that_cannot_be_loaded_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "broken.so").write_text("built for another PyTorch")
    below = MemoryTransport(0, 1, Wires(1))
    transport = HorovodTransport(below, tmp_path / "broken.so", World("threads", 0, 1), required=False)
    assert transport.start(lambda blob: [blob], 1.0, 1.0) is below
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("Horovod's engine is not used (Horovod's native part cannot be loaded; ")
    assert text.endswith("); hvdkit's own engine sends tensors over memory")


def test_an_engine_that_cannot_be_ours_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(NativeHorovod, "__init__", lambda native: vars(native).update(_stuck="", calls=MagicMock()))
    native = NativeHorovod()  # type: ignore[call-arg]
    assert native.problem() == "other code has started Horovod in this process"
    native.stopping, native.was_given_ranks = MagicMock(), False
    native.calls.horovod_rank.return_value, native.calls.horovod_size.return_value = 1, 2
    fact = "it counts rank 0 of 2 as rank 1 of 2, so it uses another MPI"
    assert native.start(0, 2, [], 10.0, {}) == fact


def test_an_engine_that_does_not_start_is_an_error():
    transport = HorovodTransport(MemoryTransport(0, 1, Wires(1)), None, World("threads", 0, 1), required=False)
    own = {"problem": "", "controller": "mpi", "meeting": None, "interface": "", "by_number": False}
    transport._prepare = lambda: (own, None)  # type: ignore[method-assign]
    transport._native = MagicMock(start=lambda *arguments: "it refused")
    hint = (
        "HINT: see what it printed, and whether hosts reach each other (HOROVOD_GLOO_IFACE, firewalls); "
        "HVDKIT_TRANSPORT=memory works without it."
    )
    with told(TransportUnavailableError, f"Horovod's engine did not start: rank 0: it refused.\n{hint}"):
        transport.start(lambda blob: [blob], 1.0, 1.0)
