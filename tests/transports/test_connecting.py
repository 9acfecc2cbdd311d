"""Ranks that have met and are cut off while Gloo connects them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hvdkit.environments.base import World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports import torch_distributed
from hvdkit.transports.security.credentials import Credentials

SECRET = Credentials(b"a secret of this job", "job", 1)


@pytest.mark.parametrize("session", [None, SECRET], ids=["open", "sealed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_stopped_after_they_met_is_named(
    rank: int, session: Credentials | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(torch_distributed, "open_store", lambda *_: (store, None))
    monkeypatch.setattr(torch_distributed, "meet", lambda *_: (store, session))
    with pytest.raises(TransportUnavailableError, match=f"within 1 s: rank {1 - rank} did not say where it listens; "):
        torch_distributed.TorchTransport(World("by hand", rank, 2, rank, 2), 1, 1.0)


def test_a_word_to_a_rank_whose_connection_broke_is_no_error_of_its_own() -> None:
    """Who looks for lost ranks tells of it, with the names of both and after a goodbye that may have come."""
    store, gloo = dist.HashStore(), dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], timedelta(seconds=30)
    groups: dict[int, Any] = {}

    def connect(rank: int) -> None:
        groups[rank] = gloo(store, rank, 2, options)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours, theirs = (torch_distributed.GlooTransport(rank, 2, groups.pop(rank)) for rank in range(2))
    try:
        theirs.send_control(0, b"goodbye")
        deadline = time.monotonic() + 30
        while not (arrived := ours.poll_control()):
            assert time.monotonic() < deadline
        theirs.close(graceful=False)
        while not ours.lost_peers():
            assert time.monotonic() < deadline
            ours.send_control(1, b"a word" * 1000)
        ours.send_control(1, b"a word")
    finally:
        theirs.close(graceful=False)
        ours.close(graceful=False)
    assert arrived == [(1, b"goodbye")]
    assert ours.lost_peers().keys() == {1}
