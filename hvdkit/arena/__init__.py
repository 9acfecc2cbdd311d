"""Where gradients are born: blocks of a memory file that the other ranks of the node map.

A gradient that lies there is reduced in place, in one pass, wherever PyTorch's autograd put it. Which allocations are
served: those of the sizes of registered parameters, from ``SMALLEST_BYTES`` on, that a backward pass makes. File,
mapping and hooks belong to the process and stay to its end; any tensor may live there for as long.

Where anything is in doubt there is no arena: gradients then go through chunks in memory that the ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("hvdkit")

NOT_SERVED = (
    "the gradients of %s are allocated where the ranks of this host do not share memory, and summed there in chunks, "
    "which is slower: %s. HVDKIT_ARENA=0 says that this is wanted"
)

# Smaller gradients are copied into a block that the lane has for all of them: one by one they cost more than that.
SMALLEST_BYTES = 64 * 1024

PROBE_BYTES = SMALLEST_BYTES + 64  # of no parameter's gradient, so that the probe leaves sizes as they were


class Arena:
    """The arena of this process, with the reason why there is none."""

    def __init__(self) -> None:
        self._native: Any = None  # once opened, to the end of the process: what was pinned must be unpinned
        self._is_open = False
        self._hooks_reason: str | None = None  # why PyTorch's allocations are not served; empty: they are
        self._complained = False
        self.reason = "not opened yet"

    def open(self, wanted: bool) -> int:
        """Have the memory file, and return its descriptor, which stays the arena's; -1 where there is none."""
        self.reason = self._open() if wanted else "HVDKIT_ARENA is 0"
        self._is_open = not self.reason
        return int(self._native.descriptor()) if self._is_open else -1

    def _open(self) -> str:
        try:
            from hvdkit.kernels._native import arena
        except ImportError:
            return "the native kernels were not built"
        reason = str(arena.open())
        if not reason:
            self._native = arena
        return reason

    @property
    def is_open(self) -> bool:
        """Whether blocks can be made."""
        return self._is_open

    @property
    def nbytes(self) -> int:
        """Of addresses, not of memory; the same on all ranks of a host."""
        return 0 if self._native is None else int(self._native.nbytes())

    def serve_torch(self) -> str:
        """Have PyTorch's allocations in backward passes served. Returns why that cannot be, or nothing."""
        if not self.is_open:
            return self.reason
        if self._hooks_reason is None:
            self._hooks_reason = str(self._native.install_hooks()) or self._probe()
        return self._hooks_reason

    def _probe(self) -> str:
        import torch

        self._native.add_size(PROBE_BYTES)
        try:
            with self.serving():
                address = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cpu").data_ptr()
        finally:
            self._native.remove_size(PROBE_BYTES)
        return "" if self._native.contains(address) else "PyTorch's CPU allocator is another one"

    def complain(self, topology: Any) -> None:
        """Say once on each host why gradients are not born in memory that ranks share, if they are not."""
        reason = self._hooks_reason if self.is_open else ""  # where there is none, that was said at init
        if reason and not self._complained and topology.local_rank == 0 and topology.local_size > 1:
            logger.warning(NOT_SERVED, "this host's ranks", reason)
        self._complained = True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """In this context this thread's allocations are served outside of backward passes too."""
        if not self.is_open:
            yield
            return
        self._native.serve_this_thread(True)
        try:
            yield
        finally:
            self._native.serve_this_thread(False)

    def add_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Allocations of these many bytes are served from now on, until each was removed as often as it was added.

        Returns what is to be removed: nothing where there is no arena.
        """
        if not self.is_open:
            return []
        for nbytes in sizes:
            self._native.add_size(nbytes)
        return list(sizes)

    def remove_sizes(self, sizes: Iterable[int]) -> None:
        """Undo ``add_sizes``; what lies in the arena stays there."""
        if self._native is not None:
            for nbytes in sizes:
                self._native.remove_size(nbytes)

    def contains(self, address: int) -> bool:
        """Whether what lies at an address lies in the arena."""
        return self._native is not None and bool(self._native.contains(address))

    def pin(self, address: int, nbytes: int) -> int:
        """Keep the block that holds these bytes, whoever frees it; its offset, or -1 if peers cannot reach it."""
        return int(self._native.pin(address, nbytes)) if self.is_open else -1

    def unpin(self, offsets: Sequence[int]) -> None:
        """Undo ``pin``."""
        if offsets:
            self._native.unpin(offsets)

    def make_private(self, offsets: Sequence[int]) -> None:
        """Move pinned blocks out of the file, where they lie: a peer that comes late cannot write into them."""
        if offsets:
            self._native.make_private(offsets)

    def end_step(self) -> None:
        """A step is over: what no step has needed for a while goes back to the system."""
        if self._native is not None:
            self._native.end_step()

    def trim(self) -> None:
        """Gradients have gone for good: what nothing uses goes back to the system."""
        if self._native is not None:
            self._native.trim()

    def counts(self) -> dict[str, int]:
        """How many allocations were served and refused, and the bytes that are used and populated."""
        counts = (0, 0, 0, 0) if self._native is None else self._native.counts()
        return dict(zip(("served", "refused", "used", "populated"), counts, strict=True))


ARENA = Arena()
