"""Some ranks of a transport as a transport of their own, for ``hvd.init(comm=[...])``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.transports.base import Bytes, DeviceCollectives, Transfer, Transport


class SubsetTransport(Transport):
    """Translates ranks: peer p here is ``members[p]`` there. Transfers name the peer by its rank here."""

    def __init__(self, transport: Transport, members: Sequence[int]) -> None:
        self._inner = transport
        self._members = list(members)
        self.name = transport.name
        self.rank = self._members.index(transport.rank)
        self.size = len(self._members)
        self.polling = transport.polling
        self.device_types = transport.device_types

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return self._renamed(self._inner.isend(buffer, self._members[peer], tag), peer)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return self._renamed(self._inner.irecv(buffer, self._members[peer], tag), peer)

    def _renamed(self, transfer: Transfer, peer: int) -> Transfer:
        transfer.peer = peer
        return transfer

    def lost_peers(self) -> dict[int, str]:
        lost = self._inner.lost_peers()
        return {peer: lost[rank] for peer, rank in enumerate(self._members) if rank in lost}

    def watch(self, transfers: Sequence[Transfer]) -> None:
        self._inner.watch(transfers)

    def send_control(self, peer: int, payload: bytes) -> None:
        self._inner.send_control(self._members[peer], payload)

    def poll_control(self) -> list[tuple[int, bytes]]:
        return [(self._members.index(rank), payload) for rank, payload in self._inner.poll_control()]

    def allocate(self, nbytes: int) -> Bytes:
        return self._inner.allocate(nbytes)

    def collectives_for(self, place: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        return self._inner.collectives_for(place, [self._members[member] for member in members], label)

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._inner.set_waker(waker)

    def close(self, graceful: bool) -> None:
        self._inner.close(graceful=False)  # the ranks outside the subset do not close with us

    def abort(self, code: int) -> None:
        self._inner.abort(code)
