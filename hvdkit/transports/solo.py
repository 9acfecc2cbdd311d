"""The transport of a job of one rank, which starts neither MPI nor a process group."""

from __future__ import annotations

from hvdkit.transports.base import Bytes, Transfer, Transport


class SoloTransport(Transport):
    """The transport of a rank alone. Algorithms never send to themselves, so a transfer is a broken invariant."""

    name = "solo"
    rank = 0
    size = 1
    polling = False

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        raise AssertionError("a rank alone has nobody to send to")

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        raise AssertionError("a rank alone has nobody to receive from")

    def send_control(self, peer: int, payload: bytes) -> None:
        raise AssertionError("a rank alone has nobody to send to")

    def poll_control(self) -> list[tuple[int, bytes]]:
        return []

    def close(self, graceful: bool) -> None:
        """Do nothing."""

    def abort(self, code: int) -> None:
        """Do nothing: the caller's own exit is enough."""
