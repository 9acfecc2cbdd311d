"""The ranks of a process set, asked for by several threads."""

import time

from hvdkit.collectives.group import AUTO
from hvdkit.engine.ranks import groups
from tests.network import MemoryTransport, Wires
from tests.transports.shared import in_thread


def test_threads_that_ask_at_once_get_one_group(monkeypatch):
    made = []

    def slowly(group, *_):
        time.sleep(0.05)
        made.append(group)

    monkeypatch.setattr(groups, "_layout_of", slowly)
    everyone = groups.Groups(MemoryTransport(0, 1, Wires(1)), [], AUTO, 0.0)
    got = [outcome.result(60) for outcome in [in_thread(everyone.group, 0) for _ in range(3)]]
    assert got == [made[0]] * 3
    assert len(made) == 1
