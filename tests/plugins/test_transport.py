"""Horovod's engine and the transport below it."""

from __future__ import annotations

from hvdkit.environments.base import World
from hvdkit.plugins.horovod.transport import HorovodTransport
from tests.network import MemoryTransport, Wires


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
