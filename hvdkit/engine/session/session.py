"""A rank's part in a job, from meeting the other ranks to leaving them. A process may have several sessions."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING

from hvdkit.config import Settings
from hvdkit.engine.loop.messages import Bye, Ping
from hvdkit.engine.loop.negotiation import SETTLING_SECONDS
from hvdkit.engine.loop.relay import Routes
from hvdkit.engine.session.core import Engine
from hvdkit.engine.session.ending import exit_status
from hvdkit.engine.session.introduction import InitExchanges, introduce, measure_network
from hvdkit.engine.session.sharing import share_memory
from hvdkit.engine.steps.schedule import Network
from hvdkit.engine.telemetry.liveness import Loss
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Transport
from hvdkit.transports.node.heartbeat import start_heartbeat

if TYPE_CHECKING:
    from hvdkit.kernels._native import Heartbeat

logger = logging.getLogger("hvdkit")

LEAVING = "it called hvd.shutdown() or ended"
SHUT_DOWN = "hvdkit was shut down on this rank while the operation was in flight."

# How long shutdown waits for the goodbyes of the others. A rank that failed waits only until they have its goodbye.
GOODBYE_SECONDS, FAILED_GOODBYE_SECONDS = 5.0, 0.3
PING_SECONDS = 0.5  # between two questions for a sign of life to a rank that has not said goodbye


class GoodbyeWait:
    """The last wait of a rank: for the others' goodbyes, or until it is clear that they live, or are lost.

    A late rank answers, and is not waited for. A rank that does not answer in time is among the ``losses``.
    """

    def __init__(self, engine: Engine, reason: str, code: int, failed: bool) -> None:
        self._mailbox, self._watch, self._failed = engine.mailbox, engine.watch, failed
        self._began = monotonic()
        self._announced = False
        self._pinged_at: float | None = None
        self.losses: list[Loss] = []

        def tell() -> None:
            self._mailbox.tell_everyone(Bye(reason, code))
            self._announced = True

        engine.driver.defer(tell)

    def missing(self) -> list[int]:
        """Return the ranks that have not said goodbye."""
        topology = self._mailbox.topology
        return sorted(set(range(topology.size)) - {topology.rank, *self._mailbox.departed})

    def over(self) -> bool:
        """True if this rank may leave, also where it cannot send messages any more."""
        missing, now = self.missing(), monotonic()
        waited = now - self._began
        if self._announced and not missing:
            return not self._mailbox.relay.held
        if self._failed or self._mailbox.error is not None or not self._announced:
            limit = FAILED_GOODBYE_SECONDS if self._failed else GOODBYE_SECONDS
            return waited > limit and (not self._mailbox.relay.held or waited > limit + SETTLING_SECONDS)
        if self._pinged_at is None:
            if waited > PING_SECONDS:
                self._ping(missing, now)
            return False
        heard_since = self._mailbox.liveness.heard_since
        if unheard := [rank for rank in missing if not heard_since(rank, self._pinged_at)]:
            self.losses = self._watch.lost_since(unheard, self._pinged_at, now)
            return bool(self.losses)
        # Only an answer to the last ping shows that a rank lives at the end.
        if self._pinged_at > self._began + GOODBYE_SECONDS:
            return True
        if waited > GOODBYE_SECONDS or now > self._pinged_at + PING_SECONDS:
            self._ping(missing, now)
        return False

    def _ping(self, ranks: list[int], now: float) -> None:
        self._pinged_at = now
        self._mailbox.tell_later(ranks, Ping())


class Session:
    """A rank's engine, and the ``process`` that may use it; forks of the process may not."""

    def __init__(
        self, transport: Transport, world: World, settings: Settings, process_sets: Sequence[list[int]] = ()
    ) -> None:
        """Meet the other ranks of ``transport``, which this object owns from now on. Collective, and blocks.

        ``process_sets``: the ranks of each initial set.
        Raises HorovodInternalError on every rank if versions or process sets differ, PeerLostError if a rank does not
        come.
        """
        self._heartbeat: Heartbeat | None = None
        try:
            connected, exchanges = transport, InitExchanges(settings.timeout_seconds)

            def exchange(blob: bytes) -> list[bytes]:
                return exchanges.exchange(connected, blob)

            topology, settings = introduce(transport.rank, world, settings, process_sets, exchange)
            # Others wait for the outcome with a deadline.
            start_seconds = min(settings.start_timeout_seconds, settings.timeout_seconds / 2)
            transport = connected.start(exchange, start_seconds, settings.timeout_seconds)
            connected = transport = share_memory(transport, topology, settings, exchange)
            network = Network(0.0, 0.0)
            if transport.size > 1 and transport.beats:
                self._heartbeat = start_heartbeat(transport, world, exchange, settings.timeout_seconds, start_seconds)
            if transport.size > 1:
                network = measure_network(transport, topology.nodes, settings.timeout_seconds, exchange)
            # From now on control messages go over the memory of nodes, and from node to node.
            neighbours = Routes(transport.rank, topology.nodes).neighbours()
            unspoken = set(range(transport.size)) - {transport.rank} - neighbours
            transport.settle([], sorted(unspoken), lambda: exchange(b"here"))
            leftover = exchanges.leftover
            self.engine = Engine(transport, topology, settings, network, process_sets, leftover, self._heartbeat)
        except BaseException:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            transport.close(graceful=False)
            raise
        self.process = os.getpid()

    def close(self, reason: str = LEAVING, code: int = 0, failed: bool = False) -> PeerLostError | None:
        """Say goodbye with ``reason`` and this process's exit code, wait for the others' goodbyes, and free everything.

        Returns the error of a rank that neither says goodbye nor gives a sign of life. ``failed``: wait only until the
        others have this goodbye.
        """
        graceful, lost = False, None
        try:
            if self.engine.topology.size > 1:
                graceful, lost = self.say_goodbye(reason, code, failed)
        finally:
            self.free(graceful)
        return lost

    def free(self, graceful: bool = False) -> bool:
        """Free everything without a goodbye. Returns False if a library still runs that the engine has called.

        ``graceful``: all ranks do it now, and nothing is in flight.
        """
        engine = self.engine
        engine.driver.stop()
        with engine.driver.halted(1.0) as halted:
            if not halted:
                me = engine.mailbox.me()
                logger.warning("%s: a library that the engine called has not returned; its thread is left behind", me)
            engine.rounds.fail(HorovodInternalError(SHUT_DOWN))
            engine.telemetry.stop()
            if self._heartbeat is not None:
                self._heartbeat.stop()
            engine.transport.close(graceful and halted)
        return halted

    def say_goodbye(self, reason: str, code: int = 0, failed: bool = False) -> tuple[bool, PeerLostError | None]:
        """Say goodbye as in ``close``, which frees everything then.

        Returns whether all ranks shut down now, and the error of a lost rank.
        """
        engine, mailbox = self.engine, self.engine.mailbox
        if mailbox.departed:
            first, cause = next(iter(mailbox.departed.items()))
            reason += f", after rank {first} had left ({cause})"
        failed = failed or bool(code or mailbox.error)
        goodbye = GoodbyeWait(engine, reason, mailbox.failed_with or exit_status(code), failed)
        # In an elastic job, a rank that fails meanwhile says no goodbye.
        gives_up = engine.transport.is_elastic and not failed
        engine.driver.drive_until(lambda: goodbye.over() or (gives_up and mailbox.error is not None))
        # A connection that breaks now is no loss: its rank may have left with its goodbye unsent, and if it was killed,
        # its launcher knows.
        lost = None
        for loss in goodbye.losses[:1]:
            lost = PeerLostError(engine.watch.loss_text(loss, " and did not announce its exit"), loss.rank)
        return not goodbye.missing() and mailbox.error is None, lost
