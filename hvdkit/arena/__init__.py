"""Where gradients are born: blocks of a memory file that the other ranks of the node map.

A gradient that lies there is reduced in place, in one pass, wherever PyTorch's autograd put it. Which allocations are
served: those of the sizes of registered parameters, from ``SMALLEST_BYTES`` on, that a backward pass makes. File,
mapping and hooks belong to the process and stay to its end; any tensor may live there for as long.

Where anything is in doubt there is no arena: gradients then go through chunks in memory that the ranks share.

``hvdkit/arena`` is one memory file of the process, with addresses reserved once; the ranks of a node hand each other
its descriptor at init and map it. File, mapping and hooks stay to the end of the process, since any tensor may live
there as long.

- Which allocations (``csrc/hook``): ``posix_memalign`` and ``free`` are replaced in the import table of PyTorch's
  libc10, and nowhere else. Served are allocations of registered parameters' sizes, from 64 KiB on, by a thread that is
  in a backward pass, as PyTorch itself tells. Another allocator, a sanitizer or a profiler in the way, an unknown
  processor, another libc: there is no arena, one line says why, and gradients go in chunks. So it is on ARM: the
  aarch64 wheels of PyTorch (read for 2.13) have mimalloc inside libc10, which imports no ``posix_memalign``; a PyTorch
  built there without mimalloc has the same table as on x86-64. ``HVDKIT_ARENA=0`` switches it off.
- Blocks (``csrc/arena``): whole pages; best fit among what the system has given already, else it is asked for more,
  populated at once, since to touch memory that is not there would be fatal. All lists are in this process's own memory.
  What no step has needed for 64 steps goes back to the system, and all that is free when a lane is closed. glibc learns
  from the first large blocks that are freed how much to keep for others of their size; since it does not see gradients
  any more, it is shown one of each size, or activations would be faulted in page by page in each step (5 ms of 340).
- Pins: a block that was handed over stays until all ranks are through with it, whatever becomes of the tensor
  (``share_memory_()`` and ``set_()`` swap a storage's pointer).
- When (``torch/gradients/planned``): during the backward pass, as each is complete. Where the ranks' threads have every
  core of their one host, nothing is summed before the step is completed (``Lane.takes_turns``), and all are handed over
  then: a hook between two products of matrices finds nothing of ours in the caches, and 99 gradients took 3.7 ms that
  way and take 2.4. Until then a step counts as begun, and changes are seen all the same.
- In place, or not (``torch/gradients/planned``, what is asked of a tensor in ``torch/gradients/layout``): a gradient
  whose storage somebody else holds too may still be read by the backward pass, or be another parameter's gradient as
  well; it is copied, and gets its result when backward is over. One that lies outside the arena is handed over only
  when the step is completed, since its memory is not ours to keep.
- The guard (``changed_since``): what changed a gradient between backward() and synchronize() is found by its version,
  address and identity, from the first step on. Views of one buffer count versions together. ``GradScaler.unscale_()``
  leaves versions as they are, so it asks the optimizer first (``torch/gradients/scaler_guard``); ``.data`` is seen by
  ``HVDKIT_VERIFY`` only.
- A failed step: each rank first takes back that it was ready (``NodePass.withdraw``), so that who read its gradients
  since finds that out before it passes on what it made of them (``withdrawn``). Then pinned blocks are moved out of the
  file under the living tensors, to the same addresses, before anything goes on: a rank that was stopped in the middle
  of a pass and continues later writes into pages that nobody has any more. Gradients that may be half summed are marked
  (``torch/gradients/half_summed``), and no optimizer steps on them until they were cleared.
- Forks: a child has the blocks as they were when it was forked, and none of the file. The parent copies those that
  tensors hold before it forks, whoever forks; for the next fork before the step is over, as for the next worker of a
  DataLoader, only what differs, and the children share the rest. 100 MB take 10 ms more of a processor's time, 6 ms for
  the next fork. Where there is no memory for the copy, a child that reads there ends with SIGSEGV. A child serves no
  allocations, other ranks' arenas are not mapped in it, and its backward passes are nobody's step
  (``torch/gradients/hooks``).
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
        self.is_open = False  # whether blocks can be made
        self._hooks_reason: str | None = None  # why PyTorch's allocations are not served; empty: they are
        self._complained = False
        self.reason = "not opened yet"

    def open(self, wanted: bool) -> int:
        """Have the memory file, and return its descriptor, which stays the arena's; -1 where there is none."""
        self.reason = self._open() if wanted else "HVDKIT_ARENA is 0"
        self.is_open = not self.reason
        return int(self._native.descriptor()) if self.is_open else -1

    def _open(self) -> str:
        try:
            from hvdkit.kernels._native import arena
        except ImportError:
            return "the native kernels were not built"
        reason = str(arena.open())
        if not reason:
            self._native = arena
        return reason

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


ARENA = Arena()
