"""What ranks show each other over a new connection of Gloo's: who cannot prove to be one is told from who can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdkit.errors import AuthenticationError
from hvdkit.transports.security.admission import pack_address, prove, unpack_address
from hvdkit.transports.security.credentials import Credentials

SESSION = Credentials(b"a secret of this job", "job", 1)


class Connection:
    """Rank 0's end of a connection to a peer that shows what it was given."""

    def __init__(self, shown: bytes) -> None:
        self.shown = shown
        self.sent = b""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent = tensors[0].numpy().tobytes()
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        tensors[0].copy_(torch.frombuffer(bytearray(self.shown), dtype=torch.uint8))
        return self

    def wait(self, timeout: Any) -> None:
        """At once: it is all there."""


def test_who_knows_the_secret_is_believed_and_shown_what_is_his():
    connection = Connection(SESSION.shown_by(2, to=0))
    prove(connection, 0, 2, SESSION, 7, lambda: None)
    assert connection.sent == SESSION.shown_by(0, to=2)


@pytest.mark.parametrize(
    "wrong",
    [
        Credentials(b"another secret", "job", 1).shown_by(2, to=0),
        SESSION.shown_by(1, to=0),  # what another rank showed
        SESSION.shown_by(0, to=2),  # what it was shown itself
        bytes(len(SESSION.shown_by(2, to=0))),
    ],
    ids=["another secret", "another rank's", "our own", "nothing"],
)
def test_who_does_not_know_the_secret_is_named(wrong):
    with pytest.raises(AuthenticationError, match=r"connected as rank 2 does not know.*\nHINT"):
        prove(Connection(wrong), 0, 2, SESSION, 7, lambda: None)


@pytest.mark.parametrize("place", [("10.1.2.3", 1), ("fe80:1234:5678:9abc:def0:1234:5678:9abc", 65535)])
def test_a_place_arrives_as_it_is(place):
    assert unpack_address(pack_address(place)) == place
    assert len(pack_address(place)) == len(pack_address(("", 0)))
