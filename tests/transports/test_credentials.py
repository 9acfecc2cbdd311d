"""What proves that bytes come from a rank of this job, and that nothing else does."""

from dataclasses import replace

import pytest

from hvdkit.transports.security.credentials import NONCE_BYTES, TAG_BYTES, Credentials, NotAuthenticError, new_nonce

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
