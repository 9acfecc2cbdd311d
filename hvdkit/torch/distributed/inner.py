"""Groups of torch's own among the ranks of a group, for calls that hvdkit does not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from hvdkit.environments.base import World
from hvdkit.torch.distributed.reductions import REDUCTIONS, TorchReduction
from hvdkit.torch.distributed.session import LAUNCHER
from hvdkit.transports.security.listening import addresses_for

# How often hvdkit ran each operation, by torch's name, and how often a group of Gloo or NCCL did: Gloo runs bitwise
# reductions and sparse tensors, NCCL all that is on GPUs.
COUNTS: Counter[tuple[str, str]] = Counter()


class InnerGroups:
    """A group of Gloo and one of NCCL, each made when it is first needed. ``seconds`` returns their timeout."""

    def __init__(self, store: Any, rank: int, size: int, seconds: Callable[[], float]) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._groups: dict[str, Any] = {}

    def for_call(self, function: str, tensors: Sequence[Tensor], op: Any = None) -> Any:
        """Return the group that runs a call, None if hvdkit does."""
        is_bitwise = op is not None and TorchReduction(op).number not in REDUCTIONS
        if tensors[0].device.type == "cuda":
            COUNTS[function, "nccl"] += 1
            return self.nccl()
        if is_bitwise or any(tensor.is_sparse for tensor in tensors):
            COUNTS[function, "gloo"] += 1
            return self.gloo()
        COUNTS[function, "hvdkit"] += 1
        return None

    def gloo(self) -> Any:
        """Return the group of Gloo. The first call is collective."""
        if "gloo" not in self._groups:
            gloo: Any = dist.ProcessGroupGloo  # the stubs lack its options
            options = gloo._Options()
            address = addresses_for(World(LAUNCHER, self._rank, self._size))[0]
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout, options._threads = timedelta(seconds=self._seconds()), 2
            made = gloo(c10d.PrefixStore("inner/gloo", self._store), self._rank, self._size, options)
            made._set_sequence_number_for_group()
            self._groups["gloo"] = made
        return self._groups["gloo"]

    def nccl(self) -> Any:
        """Return the group of NCCL, for tensors on GPUs. The first call is collective."""
        if "nccl" not in self._groups:
            if not dist.is_nccl_available():
                raise RuntimeError("hvdkit: this PyTorch has no NCCL for tensors on GPUs\nHINT: give tensor.cpu().")
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timedelta(seconds=self._seconds())
            store = c10d.PrefixStore("inner/nccl", self._store)
            self._groups["nccl"] = nccl(store, self._rank, self._size, options)
        return self._groups["nccl"]

    def shutdown(self) -> None:
        """End the groups."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()
