"""Proofs by which ranks show that they belong to one job: HMACs over nonces, the job and the generation.

Two ranks that have connected prove it by a handshake. The initiator says its rank and a fresh nonce. The responder
answers with a nonce of its own and an HMAC of both. Another HMAC of both admits the initiator. So a recorded handshake
is of no use.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

NONCE_BYTES = 32
TAG_BYTES = 32
_HELLO = struct.Struct(f"<I{NONCE_BYTES}s")  # the initiator's rank and nonce
_ANSWER = struct.Struct(f"<{NONCE_BYTES}s{TAG_BYTES}s")  # the responder's nonce and proof
HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES = _HELLO.size, _ANSWER.size, TAG_BYTES


class NotAuthenticError(ValueError):
    """The bytes were not made with the secret, or not with this label in this job."""


@dataclass(frozen=True)
class Credentials:
    """A secret, and the job and the generation (how often it has called ``hvd.init()``) for which it is shown.

    All of these are in every HMAC, so bytes recorded of another job, generation or label prove nothing.
    """

    secret: bytes = field(repr=False)
    job: str
    generation: int

    def tag(self, label: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of these bytes with this label."""
        mac = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (b"hvdkit 1", self.job.encode(), str(self.generation).encode(), label.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big") + part)  # so that two parts cannot be taken for others
        return mac.digest()

    def seal(self, label: str, value: bytes) -> bytes:
        """Return the bytes and, behind them, their tag."""
        return value + self.tag(label, value)

    def unseal(self, label: str, sealed: bytes) -> bytes:
        """Return the bytes that were sealed. Raises NotAuthenticError before anything reads them."""
        value, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self.tag(label, value)):
            raise NotAuthenticError(label)
        return value

    def for_session(self, nonces: Sequence[bytes]) -> Credentials:
        """Return credentials with a secret that holds only between the ranks with these nonces, in rank order."""
        return replace(self, secret=self.tag("session", *nonces))

    def shown_by(self, rank: int, to: int) -> bytes:
        """Return the bytes that ``rank`` sends first over its connection ``to`` another rank."""
        return self.tag("connection", str(rank).encode(), str(to).encode())


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _proof(session: Credentials, label: str, initiator: int, responder: int, *nonces: bytes) -> bytes:
    return session.tag(f"control {label}", str(initiator).encode(), str(responder).encode(), *nonces)


def initiate(session: Credentials, me: int, peer: int, send: Callable[[bytes], object]) -> Generator[int, bytes, None]:
    """Prove to ``peer`` to be rank ``me``; yields the bytes to be received next. Raises NotAuthenticError."""
    nonce = new_nonce()
    send(_HELLO.pack(me, nonce))
    peers_nonce, proof = _ANSWER.unpack((yield ANSWER_BYTES))
    if not hmac.compare_digest(proof, _proof(session, "connected to", me, peer, nonce, peers_nonce)):
        raise NotAuthenticError("a process that answers in its place does not know the session's secret")
    send(_proof(session, "connects", me, peer, nonce, peers_nonce))


def respond(
    session: Credentials, me: int, size: int, hello: bytes, send: Callable[[bytes], object]
) -> Generator[int, bytes, int]:
    """Answer the ``hello`` of a process as rank ``me`` of ``size``, and return the rank that it proves to be.

    Yields the bytes to be received next. Raises NotAuthenticError.
    """
    nonce = new_nonce()
    rank, peers_nonce = _HELLO.unpack(hello)
    send(_ANSWER.pack(nonce, _proof(session, "connected to", rank, me, peers_nonce, nonce)))
    proof = yield PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(session, "connects", rank, me, peers_nonce, nonce)) or rank >= size:
        raise NotAuthenticError(f"the process that connected as rank {rank} does not belong to this session")
    return int(rank)
