"""Ranks that have met and are cut off while Gloo connects them."""

from __future__ import annotations

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
