"""An algorithm in flight: its generator, and the transfers it waits for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from time import monotonic
from typing import Any

from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Transfer, Transport


class Operation:
    """The generator of a collective, in flight; ``advance`` never blocks."""

    __slots__ = (
        "_broken", "_on_done", "_pending", "_steps", "_transport", "_what", "broken_at", "fail", "members", "since",
    )  # fmt: skip

    def __init__(
        self,
        what: object,
        steps: Generator[list[Transfer], None, Any],
        transport: Transport,
        on_done: Callable[[Any], None],
        members: Sequence[int] = (),
        on_fail: Callable[[HorovodInternalError], None] = lambda error: None,
    ) -> None:
        self._what, self._steps, self._transport, self._on_done = what, steps, transport, on_done
        self.members = members
        self.fail = on_fail  # ends the waits for this operation
        self.since = monotonic()
        self._pending: list[Transfer] = []
        self._broken: PeerLostError | None = None
        self.broken_at = 0.0  # when a transfer first said that a peer is lost

    def advance(self) -> bool | None:
        """Go as far as possible. Return True if finished, False if it went on, None if nothing came in."""
        if self._broken is not None:
            raise self._broken
        moved: bool | None = None
        while True:
            try:
                while self._pending:
                    if not self._pending[-1].done():
                        return moved
                    self._pending.pop()
            except PeerLostError as error:
                self._breaks(error)
                raise
            moved = False
            try:
                self._pending = next(self._steps)
            except StopIteration as stop:
                self._on_done(stop.value)
                return True
            except PeerLostError as error:
                self._breaks(error)  # the generator has ended, and would seem to have finished in the next call
                raise
            if self._pending:
                self._transport.watch(list(self._pending))

    def close(self) -> None:
        """End the generator, so that the memory that it uses is free at once, not when garbage is collected."""
        self._pending = []
        if inspect.getgeneratorstate(self._steps) != inspect.GEN_RUNNING:  # else a library does not come back
            self._steps.close()

    @property
    def what(self) -> str:
        """The operation for messages."""
        return str(self._what)

    def awaited_peers(self) -> set[int]:
        """Return the ranks whose transfers are not done; all members if a device's collective names none."""
        peers: set[int] = set()
        for transfer in self._pending:
            try:
                if transfer.done():
                    continue
            except PeerLostError as error:
                # Kept for ``advance``, whose caller knows whether the peer has left. MPI reports it once, and reports
                # the request as done ever after.
                self._breaks(error)
            several = getattr(transfer, "awaited", None)
            peers.update([transfer.peer] if several is None else several())
        return peers.difference((-1,)).union(self.members) if -1 in peers else peers

    def _breaks(self, error: PeerLostError) -> None:
        if self._broken is None:
            self._broken, self.broken_at = error, monotonic()
