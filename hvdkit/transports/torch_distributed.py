"""The transports of ranks that meet at a store, or have a ticket: Gloo for buffers, and NCCL for tensors on CUDA."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.environments.base import World
from hvdkit.environments.ticket import Launcher, Report, Ticket
from hvdkit.errors import AuthenticationError, TransportUnavailableError
from hvdkit.transports.base import SoloTransport, Transport
from hvdkit.transports.gloo import GlooTransport
from hvdkit.transports.gpu.device import DeviceCollectives
from hvdkit.transports.gpu.nccl import nccl_available, open_nccl
from hvdkit.transports.security.admission import STRANGERS, Admission, SealedStore, admit
from hvdkit.transports.security.credentials import Credentials
from hvdkit.transports.security.listening import addresses_for, listen
from hvdkit.transports.security.rendezvous import open_store, refused_ranks


class TicketTransport(GlooTransport):
    """The transport of ranks of an elastic job, which know each other's addresses.

    Tensors of GPUs travel through the memory of their hosts. Until all ranks have met, a rank that the launcher calls
    gone is lost too: it may have ended before it connected.
    """

    name = "torch"
    is_elastic = True

    def __init__(self, ticket: Ticket, addresses: Sequence[str], listener: socket.socket) -> None:
        session = Credentials(ticket.secret, ticket.job, ticket.generation)
        admission = Admission(None, session, [member.address for member in ticket.members])
        self._lost_ranks = ticket.lost_ranks
        super().__init__(ticket.rank, len(ticket.members), addresses, listener, admission)

    def lost_peers(self) -> dict[int, str]:
        return {**dict.fromkeys(self._lost_ranks(), "hvdkitrun says that the rank is gone"), **super().lost_peers()}

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        super().settle(carried, unspoken, agree)
        self._lost_ranks = tuple


def open_by_ticket(launcher: Launcher, report: Report) -> tuple[Ticket, Transport]:
    """Return the next ticket of this process and the transport between its members. Collective, and blocks."""
    addresses = launcher.addresses
    listener = listen(addresses[0])
    try:
        ticket = launcher.next_ticket(listener.getsockname()[:2], report)
        if len(ticket.members) == 1:
            listener.close()
            alone = SoloTransport()
            alone.is_elastic = True
            return ticket, alone
        return ticket, TicketTransport(ticket, addresses, listener)
    except BaseException:
        listener.close()
        raise


class TorchTransport(GlooTransport):
    """The transport of ranks that meet at a store. Construction is collective."""

    name = "torch"

    def __init__(self, world: World, generation: int, start_timeout_seconds: float) -> None:
        store, secret = open_store(world, generation, start_timeout_seconds)
        credentials = None if secret is None else Credentials(secret, world.job, generation)
        addresses = addresses_for(world)
        listener = listen(addresses[0])
        try:
            address = listener.getsockname()[:2]
            admission = admit(store, world, credentials, generation, address, start_timeout_seconds)
            super().__init__(world.rank, world.size, addresses, listener, admission)
        except BaseException as error:
            listener.close()
            refused = refused_ranks(world) if isinstance(error, TransportUnavailableError) else []
            if refused:
                problem = f"a peer claiming to be rank {refused[0]} does not know the job's secret.\n{STRANGERS}"
                raise AuthenticationError(problem) from error
            raise
        self._admission: Admission | None = admission
        self._address = addresses[0]
        self._device_stores: list[SealedStore] = []  # kept, with the plain stores that this rank serves
        self._start_timeout_seconds = start_timeout_seconds
        self.device_types = frozenset({"cuda"}) if world.size > 1 and nccl_available() else frozenset()

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        admission, members = self._admission, list(members)
        if admission is None or device.partition(":")[0] not in self.device_types:
            return None
        # The prefix has the members, since jobs of different ranks (init(comm=[...])) may share the store.
        prefix = f"device/{label}/{'-'.join(map(str, members))}"
        store = SealedStore(admission.store, prefix, admission.session)
        index, seconds = members.index(self.rank), self._start_timeout_seconds
        store.open_plain(self._address if index == 0 else None, seconds)
        self._device_stores.append(store)
        opened = self._open_device(store, index, len(members), device, seconds)
        if opened is not None:
            self._device_collectives.append(opened)
        return opened

    # Replaced in tests, which have no GPU.
    _open_device: Callable[[Any, int, int, str, float], DeviceCollectives | None] = staticmethod(open_nccl)

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        super().settle(carried, unspoken, agree)
        if self._group is None and not self.device_types:  # device collectives would meet at the store
            self._admission = None

    def close(self, graceful: bool) -> None:
        super().close(graceful)
        self._admission = None
        self._device_stores.clear()
