"""Memory for gradients: blocks of one memory file of the process, which the other ranks of the node map.

A gradient in the arena is reduced in place, in one pass. File, mapping and hooks stay to the end of the process, since
any tensor may live there as long. If anything is in doubt there is no arena, and gradients go through chunks in memory
that the ranks share; one line says why.

- Allocations (``csrc/hook``): ``posix_memalign`` and ``free`` are replaced in the import table of PyTorch's libc10, and
  nowhere else. The arena serves allocations of registered parameters' sizes, from 64 KiB on, by a thread that is in a
  backward pass. Another allocator, a sanitizer, a profiler, an unknown processor or another libc leaves no arena; nor
  do the aarch64 wheels of PyTorch (read for 2.13), which have mimalloc inside libc10.
- Blocks (``csrc/arena``): whole pages, the best fit among those that the system has given already, else new ones that
  are populated at once, since touching memory that is not there would be fatal. A block that no step has needed for 64
  steps goes back to the system, and all free blocks when a lane is closed. glibc learns from the first large blocks
  that are freed how much to keep for others of their size. It does not see gradients any more, so it is shown one block
  of each size, or activations would be faulted in page by page in each step (5 ms of 340).
- Pins: a block that was handed over stays until all ranks are through with it, whatever becomes of the tensor
  (``share_memory_()`` and ``set_()`` swap a storage's pointer).
- Hand-over (``torch/gradients/planned``): during the backward pass, as each gradient is complete; where the ranks'
  threads have every core of their one host, when the step is completed (``Lane.takes_turns``: 2.4 ms in place of 3.7
  for 99 gradients), as for a gradient outside the arena, whose memory is not ours to keep.
- Copies (``torch/gradients/layout``): a gradient whose storage another tensor holds too may still be read by the
  backward pass, or be another parameter's gradient as well. It is copied, and gets its result when backward is over.
- A failed step: each rank first takes back that it was ready (``NodePass.withdraw``), so that a rank which read its
  gradients since notices that before it passes its sums on. Then pinned blocks are moved out of the file under the
  living tensors, to the same addresses: a rank that was stopped in the middle of a pass and continues later writes into
  pages that nobody has any more. In an elastic job they stay, pinned until the next generation (``begin_generation``).
- Forks: a child has the blocks as they were when it was forked, and none of the file; it serves no allocations. The
  parent copies the blocks that tensors hold before it forks; for the next fork in the same step, as for the next worker
  of a DataLoader, it copies only what differs, and the children share the rest. 100 MB take 10 ms more of a processor's
  time, 6 ms for the next fork. Where there is no memory for the copy, a child that reads there ends with SIGSEGV.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger("hvdkit")

NOT_SERVED = (
    "the gradients of %s are allocated in memory that the ranks of this host do not share, and are summed in chunks, "
    "which is slower: %s. To accept this without a warning, set HVDKIT_ARENA=0"
)

# Smaller gradients are copied into one block of the lane, which costs less than reducing each where it lies.
SMALLEST_BYTES = 64 * 1024

PROBE_BYTES = SMALLEST_BYTES + 64  # the size of no parameter's gradient, so the probe leaves sizes as they were


class Arena:
    """The arena of this process, or the reason why there is none."""

    def __init__(self) -> None:
        self._native: Any = None  # once opened, to the end of the process: what was pinned must be unpinned
        self.is_open = False  # if blocks can be made
        self._hooks_reason: str | None = None  # why PyTorch's allocations are not served; empty: they are
        self._complained = False
        self.reason = "not opened yet"
        self._kept: list[int] = []  # offsets of failed steps of an elastic job, pinned until the next generation
        self._kept_lock = threading.Lock()

    def open(self, wanted: bool) -> int:
        """Make the memory file, if ``wanted``. Returns its descriptor, which stays the arena's; -1 if there is none."""
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
        """Serve PyTorch's allocations in backward passes. Returns why that cannot be, or an empty string."""
        if not self.is_open:
            return self.reason
        if self._hooks_reason is None:
            self._hooks_reason = str(self._native.install_hooks()) or self._probe()
        return self._hooks_reason

    def _probe(self) -> str:
        import torch

        self._native.add_size(PROBE_BYTES)
        with self.serving():
            address = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cpu").data_ptr()
        self._native.remove_size(PROBE_BYTES)
        return "" if self._native.contains(address) else "PyTorch uses another CPU allocator"

    def complain(self, topology: Any) -> None:
        """Log once on each host why gradients are not allocated in memory that ranks share, if they are not."""
        reason = self._hooks_reason if self.is_open else ""  # init has logged why there is no arena
        if reason and not self._complained and topology.is_first_of_node and topology.local_size > 1:
            logger.warning(NOT_SERVED, "this host's ranks", reason)
        self._complained = True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve this thread's allocations in this context outside of backward passes too."""
        if not self.is_open:
            yield
            return
        before = self._native.serve_this_thread(True)
        try:
            yield
        finally:
            self._native.serve_this_thread(before)

    def serve_thread(self) -> None:
        """Serve the calling thread's allocations outside of backward passes too, from now on."""
        if self.is_open:
            self._native.serve_this_thread(True)

    def add_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Serve allocations of these sizes in bytes until each is removed as often. Returns the sizes to be removed."""
        if not self.is_open:
            return []
        for nbytes in sizes:
            self._native.add_size(nbytes)
        return list(sizes)

    def remove_sizes(self, sizes: Iterable[int]) -> None:
        """Undo ``add_sizes``; blocks in use stay in the arena."""
        for nbytes in sizes:
            self._native.remove_size(nbytes)

    def contains(self, address: int) -> bool:
        """True if an address lies in the arena."""
        return self._native is not None and bool(self._native.contains(address))

    def pin(self, address: int, nbytes: int) -> int:
        """Keep the block of these bytes, whoever frees it. Returns its offset, or -1 if peers cannot reach it."""
        return int(self._native.pin(address, nbytes)) if self.is_open else -1

    def unpin(self, offsets: Sequence[int]) -> None:
        """Undo ``pin``."""
        if offsets:
            self._native.unpin(offsets)

    def make_private(self, offsets: Sequence[int]) -> None:
        """Move pinned blocks out of the file, at their addresses, so that a late peer cannot write into them."""
        if offsets:
            self._native.make_private(offsets)

    def unpin_failed(self, offsets: Sequence[int], is_elastic: bool) -> None:
        """Undo ``pin`` for blocks of a failed operation, into which late peers may still write.

        In an elastic job this waits for ``begin_generation``, and the blocks stay populated. Raises OSError where they
        cannot be moved out of the file, and stay pinned.
        """
        if is_elastic:
            with self._kept_lock:
                self._kept += offsets
        else:
            self.make_private(offsets)
            self.unpin(offsets)

    def begin_generation(self) -> None:
        """Unpin the blocks of failed steps, since this rank has a ticket of the next generation of its elastic job.

        By then no engine of the generation before runs on this host: the members have ended theirs before they asked
        for tickets, and the launcher has ended the other processes.
        """
        with self._kept_lock:
            kept, self._kept = self._kept, []
        self.unpin(kept)

    def end_step(self) -> None:
        """End a step: give blocks that no step has needed for a while back to the system."""
        if self._native is not None:
            self._native.end_step()

    def trim(self) -> None:
        """Give all free blocks back to the system, since gradients have gone for good."""
        if self._native is not None:
            self._native.trim()


ARENA = Arena()
