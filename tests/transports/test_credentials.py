"""What proves that bytes come from a rank of this job, and that nothing else does: also over a connection of Gloo's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hvdkit.errors import AuthenticationError
from hvdkit.transports.security.admission import pack_address, prove, unpack_address
from hvdkit.transports.security.credentials import (
    NONCE_BYTES,
    TAG_BYTES,
    Credentials,
    NotAuthenticError,
    initiate,
    new_nonce,
    respond,
)
from tests.told import told

CREDENTIALS = Credentials(b"a secret of this job", "job", 1)


def test_what_was_sealed_comes_back_as_it_was():
    assert "secret" not in repr(CREDENTIALS)
    for value in (b"", b"x", bytes(range(256)) * 100):
        sealed = CREDENTIALS.seal("label", value)
        assert len(sealed) == len(value) + TAG_BYTES
        assert CREDENTIALS.unseal("label", sealed) == value


@pytest.mark.parametrize(
    "other",
    [
        replace(CREDENTIALS, secret=b"another secret"),
        replace(CREDENTIALS, job="another job"),
        replace(CREDENTIALS, generation=2),
        CREDENTIALS.for_session([b"0", b"1"]),
    ],
    ids=["another secret", "another job", "another generation", "a session"],
)
def test_what_others_sealed_is_refused(other):
    with pytest.raises(NotAuthenticError):
        CREDENTIALS.unseal("label", other.seal("label", b"value"))


def test_what_was_sealed_with_another_label_is_refused():
    for label in ("here/1", "here"):  # nor can an end of the label be taken for the beginning of the value
        with pytest.raises(NotAuthenticError):
            CREDENTIALS.unseal(label, CREDENTIALS.seal("here/0", b"value"))


def test_every_changed_bit_and_every_missing_byte_is_seen():
    sealed = CREDENTIALS.seal("label", b"value")
    number = int.from_bytes(sealed, "big")
    changed = [(number ^ 1 << bit).to_bytes(len(sealed), "big") for bit in range(len(sealed) * 8)]
    for damaged in [*changed, *(sealed[:length] for length in range(len(sealed)))]:
        with pytest.raises(NotAuthenticError):
            CREDENTIALS.unseal("label", damaged)


def test_a_session_holds_between_those_who_told_its_nonces_in_their_order():
    first, second = new_nonce(), new_nonce()
    assert len(first) == NONCE_BYTES
    assert CREDENTIALS.for_session([first, second]) == CREDENTIALS.for_session([first, second])
    others = ([second, first], [first, new_nonce()], [first], [first + second])
    assert CREDENTIALS.for_session([first, second]) not in [CREDENTIALS.for_session(nonces) for nonces in others]


def test_what_a_rank_shows_is_for_one_connection_and_one_direction():
    shown = {(rank, to): CREDENTIALS.shown_by(rank, to) for rank in range(12) for to in range(12)}
    assert len(set(shown.values())) == len(shown)


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
    connection = Connection(CREDENTIALS.shown_by(2, to=0))
    prove(connection, 0, 2, CREDENTIALS, 7, lambda: None)
    assert connection.sent == CREDENTIALS.shown_by(0, to=2)


@pytest.mark.parametrize(
    "wrong",
    [
        Credentials(b"another secret", "job", 1).shown_by(2, to=0),
        CREDENTIALS.shown_by(1, to=0),  # what another rank showed
        CREDENTIALS.shown_by(0, to=2),  # what it was shown itself
        bytes(len(CREDENTIALS.shown_by(2, to=0))),
    ],
    ids=["another secret", "another rank's", "our own", "nothing"],
)
def test_who_does_not_know_the_secret_is_named(wrong):
    fact = "the peer connected as rank 2 does not know the job's secret."
    hint = (
        "HINT: give all ranks the same HVDKIT_SECRET_FILE, or none; if all have the same secret, somebody else is on "
        "this network, see SECURITY.md."
    )
    with told(AuthenticationError, f"{fact}\n{hint}"):
        prove(Connection(wrong), 0, 2, CREDENTIALS, 7, lambda: None)


def test_who_proves_nothing_over_a_connection_is_refused_by_both_ends():
    said: list[bytes] = []
    calling = initiate(CREDENTIALS, 2, 0, said.append)
    with told(NotAuthenticError, "a process that answers in its place does not know the session's secret"):
        calling.send(bytes(next(calling)))
    answering = respond(CREDENTIALS, 0, 3, said[0], said.append)
    with told(NotAuthenticError, "the process that connected as rank 2 does not belong to this session"):
        answering.send(bytes(next(answering)))


@pytest.mark.parametrize("place", [("10.1.2.3", 1), ("fe80:1234:5678:9abc:def0:1234:5678:9abc", 65535)])
def test_a_place_arrives_as_it_is(place):
    assert unpack_address(pack_address(place)) == place
    assert len(pack_address(place)) == len(pack_address(("", 0)))
