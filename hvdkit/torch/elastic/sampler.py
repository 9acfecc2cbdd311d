"""A sampler that shares the rest of an epoch among the ranks that there are."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from hvdkit.engine.session import runtime


class ElasticSampler(torch.utils.data.Sampler[int]):
    """A sampler for an elastic job: its order is a permutation that depends on seed and epoch alone.

    Call ``record_batch`` after each batch and ``set_epoch`` at the end of each epoch, and make it an attribute of the
    TorchState. When ranks come or go, samples that no rank has processed are shared among the ranks anew. The last
    samples of a share may be repeated, so that all ranks have equally many, as in ``DistributedSampler``.

    With ``exact``, the place in the data goes on with each step of the TorchState's ``optimizer``, at the moment at
    which the step changes the parameters, so that no full batch is lost or repeated, wherever a rank fails.
    ``record_batch`` does nothing then.

    Args:
        dataset: has a length.
        shuffle: False for the order of the dataset.
        seed: the same on all ranks.
        exact: needs ``batch_size``.
        batch_size: the samples of each rank and backward pass.

    Raises:
        ValueError: ``exact`` without a ``batch_size``.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        exact: bool = False,
        batch_size: int | None = None,
    ) -> None:
        if exact and batch_size is None:
            raise ValueError("ElasticSampler: exact=True without batch_size\nHINT: pass the DataLoader's batch_size.")
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.exact, self.batch_size = exact, batch_size
        self.state: Any = None  # a weak reference to the TorchState whose optimizer's steps count
        self.epoch = self.processed_num = 0
        self.num_replicas, self.rank, self.num_samples, self.total_size = 1, 0, 0, 0
        self.remaining_indices: list[int] = []
        self._order: list[int] = []
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """The samples of this epoch that the ranks have processed together."""
        return set(self._order[: self.processed_num])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the one before: a part of an epoch that is done is not done again."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch. ``batch_idx`` is not used."""
        if not self.exact:
            self.processed_num += batch_size * self.num_replicas

    def advance(self, passes: int) -> None:
        """Note that a step has been applied, to which each rank has contributed so many backward passes."""
        assert self.batch_size is not None
        self.processed_num = min(len(self._order), self.processed_num + passes * self.batch_size * self.num_replicas)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to a place in the data, and share the rest among the ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share the samples that are left among the ranks that there are now."""
        topology = runtime.topology()
        self.num_replicas, self.rank = topology.size, topology.rank
        self._order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(self._order)  # noqa: S311 (not for secrets)
        self.remaining_indices = self._order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        indices = list(self.remaining_indices)
        while indices and len(indices) < self.total_size:
            indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
