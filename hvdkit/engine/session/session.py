"""One rank's part in one job: what it makes when the ranks have met, and gives back when it leaves them.

A process may have several, of different jobs, or of different ranks of one. ``runtime`` has the one of ``hvd.init()``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hvdkit.config import Settings
from hvdkit.engine.loop.relay import Routes
from hvdkit.engine.session.core import Engine
from hvdkit.engine.session.ending import exit_status
from hvdkit.engine.session.goodbye import Farewell
from hvdkit.engine.session.introduction import Exchanges, introduce
from hvdkit.engine.session.measuring import measure_network
from hvdkit.engine.session.sharing import share_memory
from hvdkit.engine.steps.schedule import Network
from hvdkit.environments.base import World
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Transport
from hvdkit.transports.node.heartbeat import start_heartbeat

if TYPE_CHECKING:
    from hvdkit.kernels._native import Heartbeat

logger = logging.getLogger("hvdkit")

LEAVING = "it called hvd.shutdown() or ended"
SHUT_DOWN = "hvdkit was shut down on this rank while the operation was in flight."


class Session:
    """``engine`` communicates; ``process`` is the process that may do so, of which forks are only copies."""

    def __init__(
        self,
        transport: Transport,
        world: World,
        settings: Settings,
        process_sets: Sequence[list[int]] = (),
        dynamic: bool = False,
        going_on: Callable[[], None] | None = None,
    ) -> None:
        """Start with the other ranks of ``transport``, which is this object's from now on. Collective, and blocks.

        ``process_sets``: the ranks of each set that there is from the start; ``dynamic``: whether others may be added.
        ``going_on`` is called whenever an operation is submitted.
        Raises HorovodInternalError on every rank where versions or process sets differ, PeerLostError.
        """
        self._heartbeat: Heartbeat | None = None
        try:
            connected, exchanges = transport, Exchanges(settings.timeout_seconds)

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
            # From now on what ranks say goes over the memory of nodes, and from node to node.
            spoken_with = Routes(transport.rank, topology.nodes).neighbours()
            unspoken = set(range(transport.size)) - {transport.rank} - spoken_with
            transport.settle([], sorted(unspoken), lambda: exchange(b"here"))
            self.engine = Engine(
                transport, topology, settings, network, process_sets, exchanges.early, self._heartbeat, going_on
            )
        except BaseException:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            transport.close(graceful=False)
            raise
        self.process = os.getpid()
        self.dynamic = dynamic or settings.dynamic_process_sets

    def close(self, reason: str = LEAVING, code: int = 0, failed: bool = False) -> PeerLostError | None:
        """Tell the others ``reason`` and this process's exit code, wait a little for theirs, and give everything back.

        ``failed``: only until they have heard.

        Returns what became of a rank that neither says goodbye nor gives a sign of life.
        """
        engine = self.engine
        graceful, lost = False, None
        try:
            if not (failed or code or engine.error):
                self._end_steps()
            if engine.topology.size > 1:
                graceful, lost = self._say_goodbye(reason, code, failed)
        finally:
            engine.driver.stop()
            with engine.driver.halted(1.0) as halted:
                if not halted:
                    logger.warning(
                        "%s: a library that the engine called has not come back; it is left there", engine.mailbox.me()
                    )
                engine.fail(HorovodInternalError(SHUT_DOWN))
                engine.lanes.give_up_steps()
                engine.telemetry.stop()
                if self._heartbeat is not None:
                    self._heartbeat.stop()
                engine.transport.close(graceful and halted)
        return lost

    def _end_steps(self) -> None:
        try:
            self.engine.lanes.end_steps()
        except HorovodInternalError as error:  # whoever leaves wants to leave
            logger.error("%s leaves in the middle of a step: %s", self.engine.mailbox.me(), error)

    def _say_goodbye(self, reason: str, code: int, failed: bool) -> tuple[bool, PeerLostError | None]:
        """Whether all ranks shut down now, and who is lost after all."""
        engine = self.engine
        mailbox, watch = engine.mailbox, engine.watch
        if mailbox.departed:
            first, cause = next(iter(mailbox.departed.items()))
            reason += f", after rank {first} had left ({cause})"
        failed = failed or bool(code or engine.error)
        farewell = Farewell(mailbox, watch, reason, mailbox.failed_with or exit_status(code), failed)
        engine.driver.drive_until(farewell.over)
        # A connection that breaks now is no news: its rank may have left with its goodbye unsent, and if it was killed,
        # whoever started it knows.
        lost = None
        if farewell.losses:
            first_lost = farewell.losses[0]
            lost = PeerLostError(watch.loss_text(first_lost, " and did not say goodbye"), first_lost.rank)
        return not farewell.missing() and engine.error is None, lost
