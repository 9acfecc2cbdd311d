"""A process group whose ranks are threads, and the transport of ranks that have their tensors on a device, the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdkit.transports.gpu.device import DeviceCollectives
from tests.network import MemoryTransport, Wires
from tests.transports.pretend_device import ThreadStream


class Together:
    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier, self._offered = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def of(self, rank: int) -> Member:
        return Member(self, rank)

    def swap(self, rank: int, mine: torch.Tensor) -> list[torch.Tensor]:
        self._offered[rank] = mine.clone()
        self._barrier.wait()
        everyones = list(self._offered)
        self._barrier.wait()
        return everyones


class Done:
    """A collective that blocked."""

    def wait(self) -> None:
        pass


@dataclass
class Member:
    """One rank's end of it, with the methods that are called of a process group of torch's."""

    group: Together
    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.group.size

    def _allgather_base(self, everyones: torch.Tensor, own: torch.Tensor) -> Done:
        everyones.copy_(torch.cat(self.group.swap(self.number, own)))
        return Done()

    def alltoall_base(self, incoming: torch.Tensor, payloads: torch.Tensor, *_: object) -> Done:
        rows = [one.view(self.group.size, -1)[self.number] for one in self.group.swap(self.number, payloads)]
        incoming.copy_(torch.stack(rows).view(incoming.shape))
        return Done()

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Done:
        tensors[0].copy_(torch.stack(self.group.swap(self.number, tensors[0])).sum(dim=0))
        return Done()


class DeviceThreadTransport(MemoryTransport):
    """For lanes of all ranks."""

    device_types = frozenset({"cpu"})

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        super().__init__(rank, size, wires)
        with wires.lock:
            self._groups: dict[str, Together] = vars(wires).setdefault("groups", {})

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives:
        with self.wires.lock:
            group = self._groups.setdefault(label, Together(len(members)))
        return DeviceCollectives(group.of(members.index(self.rank)), torch.device("cpu"), ThreadStream())
