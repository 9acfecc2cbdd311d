"""How two ranks that have connected prove to each other that they belong to one session.

Who connects says which rank it is, and a fresh nonce. Who is connected to answers with a nonce of its own and an HMAC
of both; with another HMAC of both the first one is admitted. So what somebody recorded is of no use to him.
"""

from __future__ import annotations

import hmac
import struct

from hvdkit.transports.security.credentials import NONCE_BYTES, TAG_BYTES, Credentials, NotAuthenticError, new_nonce

_HELLO = struct.Struct(f"<I{NONCE_BYTES}s")  # the rank that connects, its nonce
_ANSWER = struct.Struct(f"<{NONCE_BYTES}s{TAG_BYTES}s")  # the nonce of the rank that is connected to, its proof
HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES = _HELLO.size, _ANSWER.size, TAG_BYTES


def _proof(session: Credentials, label: str, connects: int, connected: int, *nonces: bytes) -> bytes:
    return session.tag(f"control {label}", str(connects).encode(), str(connected).encode(), *nonces)


class Connecting:
    """Rank ``me``, which connects to ``peer``, and begins with ``hello``."""

    def __init__(self, session: Credentials, me: int, peer: int) -> None:
        self._session, self._me, self._peer = session, me, peer
        self._nonce = new_nonce()
        self.hello = _HELLO.pack(me, self._nonce)

    def proof(self, answer: bytes) -> bytes:
        """What admits this rank. Raises NotAuthenticError where it is not ``peer`` that answers."""
        theirs, proof = _ANSWER.unpack(answer)
        nonces = self._nonce, theirs
        if not hmac.compare_digest(proof, _proof(self._session, "connected to", self._me, self._peer, *nonces)):
            raise NotAuthenticError("who answers in its place does not know the session's secret")
        return _proof(self._session, "connects", self._me, self._peer, *nonces)


class Connected:
    """Rank ``me`` of ``size``, to which somebody has connected and said ``hello``; it says ``answer``."""

    def __init__(self, session: Credentials, me: int, size: int, hello: bytes) -> None:
        self._rank: int
        self._rank, theirs = _HELLO.unpack(hello)
        self._size = size
        nonces = theirs, new_nonce()
        self.answer = _ANSWER.pack(nonces[1], _proof(session, "connected to", self._rank, me, *nonces))
        self._expected = _proof(session, "connects", self._rank, me, *nonces)

    def admitted(self, proof: bytes) -> int:
        """The rank that has connected. Raises NotAuthenticError where it is none of the session."""
        if not hmac.compare_digest(proof, self._expected) or self._rank >= self._size:
            raise NotAuthenticError(f"who connected as rank {self._rank} is none of this session")
        return self._rank
