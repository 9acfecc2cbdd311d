"""Gloo's process group, and the addresses at which its ranks connect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.base import Exchange

# Gloo waits this long for the peer of a new connection, whose Python may be busy.
CONNECTING_SECONDS = 600.0


class AddressBook(Store):
    """The store of a group of Gloo: its ranks write their addresses here, and read them when they connect.

    ``exchange`` brings those of the other ranks, over connections whose ends have proved to be ranks of the job.
    """

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Write an address of this rank."""
        self._addresses[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._addresses[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._addresses for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Do nothing if the keys are there. Raises RuntimeError otherwise: they come by ``exchange`` alone."""
        if not self.check(keys):
            raise RuntimeError(f"the addresses {keys} were not exchanged")

    def exchange(self, exchange: Exchange) -> None:
        """Give this rank's addresses to the others, and take theirs. Collective."""
        own = {key: address.hex() for key, address in self._addresses.items()}
        for rank, blob in enumerate(exchange(json.dumps(own).encode())):
            received = {key: address for key, address in json.loads(blob).items() if key.endswith(f"/{rank}")}
            self._addresses |= {key: bytes.fromhex(address) for key, address in received.items()}


def open_gloo(rank: int, size: int, addresses: Sequence[str]) -> tuple[Any, AddressBook]:
    """Return a ProcessGroupGloo that connects two ranks when both use it, after the exchange of its address book.

    It listens at ``addresses``. Raises TransportUnavailableError.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs lack its point-to-point calls
    options = gloo._Options()
    options._timeout = timedelta(seconds=CONNECTING_SECONDS)
    # By default, Gloo looks up the host's name, which may lead out of the machine or nowhere.
    options._devices = [gloo.create_device(hostname=address, lazy_init=True) for address in addresses]
    options._threads = 2 * len(options._devices)
    book = AddressBook()
    try:
        return gloo(book, rank, size, options), book
    except RuntimeError as error:
        raise TransportUnavailableError(
            f"rank {rank} could not open Gloo: {str(error).splitlines()[0]}\n"
            "HINT: check the addresses of this host, or choose its network interface with GLOO_SOCKET_IFNAME."
        ) from error
