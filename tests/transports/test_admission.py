"""What ranks show each other over a new connection: who cannot prove to be one is told from who can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdkit.environments.base import World
from hvdkit.errors import AuthenticationError
from hvdkit.transports.security.admission import greet
from hvdkit.transports.security.credentials import Credentials

SESSION = Credentials(b"a secret of this job", "job", 1)


class Connections:
    """Rank 0's end of connections to peers of which each shows what it was given."""

    def __init__(self, shown: dict[int, bytes]) -> None:
        self.shown = shown
        self.sent: dict[int, bytes] = {}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent[peer] = tensors[0].numpy().tobytes()
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if peer in self.shown:
            tensors[0].copy_(torch.frombuffer(bytearray(self.shown[peer]), dtype=torch.uint8))
        return self

    def wait(self, timeout: Any) -> None:
        """At once: it is all there."""


def greeted(shown: dict[int, bytes]) -> Connections:
    connections = Connections(shown)
    greet(connections, World("test", 0, 3), SESSION, 7, 1.0)
    return connections


def test_ranks_that_know_the_secret_are_let_in_and_shown_what_is_theirs() -> None:
    connections = greeted({peer: SESSION.shown_by(peer, to=0) for peer in (1, 2)})
    assert connections.sent == {peer: SESSION.shown_by(0, to=peer) for peer in (1, 2)}


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
def test_who_does_not_know_the_secret_is_named(wrong: bytes) -> None:
    with pytest.raises(AuthenticationError, match=r"connected as rank 2 does not know.*\nHINT"):
        greeted({1: SESSION.shown_by(1, to=0), 2: wrong})


@pytest.mark.parametrize(("shows", "missing"), [((1, 2), r"\[3\]"), ((2,), r"\[1, 3\]"), ((1, 2, 3), r"\[1\]")])
def test_all_who_show_nothing_in_time_are_named(shows: tuple[int, ...], missing: str) -> None:
    """Also where the wait for another one is what ran out of time; one whose word came, but who took none, is too."""

    class Silent(Connections):
        def wait(self, timeout: Any) -> None:
            raise RuntimeError("Timed out waiting 1000ms for send operation to complete\nsomewhere in Gloo")

    shown = {peer: SESSION.shown_by(peer, to=0) for peer in shows}
    said = rf"proved to rank 0 in 1 s .*missing: {missing}: Timed out.*\nHINT.*stopped"
    with pytest.raises(AuthenticationError, match=said):
        greet(Silent(shown), World("test", 0, 4), SESSION, 7, 1.0)
