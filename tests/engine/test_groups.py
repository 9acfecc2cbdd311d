"""The ranks of a process set, asked for by several threads."""

import threading
import time

from hvdkit.collectives.group import AUTO
from hvdkit.engine.ranks import groups
from tests.network import MemoryTransport, Wires


def test_threads_that_ask_at_once_get_one_group(monkeypatch):
    made, got = [], []

    def slowly(group, *_):
        time.sleep(0.05)
        made.append(group)

    monkeypatch.setattr(groups, "_layout_of", slowly)
    everyone = groups.Groups(MemoryTransport(0, 1, Wires(1)), [], AUTO, 0.0)
    threads = [threading.Thread(target=lambda: got.append(everyone.group(0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [made[0]] * 3
    assert len(made) == 1
