"""What ranks show each other to prove that they belong to one job: HMACs over nonces, the job and the generation."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

NONCE_BYTES = 32
TAG_BYTES = 32


class NotAuthenticError(ValueError):
    """These bytes do not come from somebody who knows the secret, or not with this label in this job."""


@dataclass(frozen=True)
class Credentials:
    """A secret, and the job and the generation (how often it has called ``hvd.init()``) for which it is shown.

    What was recorded of another job, or of another generation, proves nothing, nor does what has another label: all of
    them are in every HMAC.
    """

    secret: bytes = field(repr=False)
    job: str
    generation: int

    def tag(self, label: str, *parts: bytes) -> bytes:
        """HMAC-SHA256 of these bytes with this label."""
        mac = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (b"hvdkit 1", self.job.encode(), str(self.generation).encode(), label.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big") + part)  # so that two parts cannot be taken for others
        return mac.digest()

    def seal(self, label: str, value: bytes) -> bytes:
        """The bytes and, behind them, what proves them."""
        return value + self.tag(label, value)

    def unseal(self, label: str, sealed: bytes) -> bytes:
        """What was sealed. Raises NotAuthenticError before anybody has looked at it."""
        value, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self.tag(label, value)):
            raise NotAuthenticError(label)
        return value

    def for_session(self, nonces: Sequence[bytes]) -> Credentials:
        """The same with a secret that holds only between those who have just told these nonces, in rank order."""
        return replace(self, secret=self.tag("session", *nonces))

    def shown_by(self, rank: int, to: int) -> bytes:
        """What ``rank`` sends first over its connection ``to`` another one."""
        return self.tag("connection", str(rank).encode(), str(to).encode())


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)
