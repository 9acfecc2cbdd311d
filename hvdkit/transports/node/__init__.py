"""What ranks of one node share: memory, and signs of life.

- One anonymous file a node (memfd), made by the node's lowest rank at init and handed to the others over an abstract
  socket, to processes of the same user that show a secret which travelled over the transport. It has no name and no
  place in ``/dev/shm``: its 64 MB in a container do not matter, no other user can open it, and nothing is left when all
  ranks are killed. The file is sparse and nearly endless, so every lane and every process set has a segment of its own
  by its number (``engine/session/sharing.py``), and nobody allocates. No segment is used again; a lane or process set
  for which there is none left goes by messages.
- Who has it: ranks that the launcher or the host name puts on one node. If one of them cannot get it, none of that node
  uses it, which is said once with the reason, and all go by the transport. All ranks know which nodes share memory
  (``Transport.nodes``), since algorithms follow from it.
- Messages (``csrc/post``): two rings of bytes for each pair of ranks, one for control messages. ``NodeTransport`` takes
  them for ranks of the node and the transport below for others; with one node the transport below is never polled.
- Waiting: each rank has a wake-up, an event counter with a futex. Whoever moved something for a rank rings it; threads
  of the rank ring it too. A thread that waits for a result watches it for ``HVDKIT_SPIN_MICROSECONDS`` if the node has
  a core for each rank, then sleeps.
- Tensors anywhere (``csrc/staged``, ``collectives/staging.py``): chunk by chunk, each rank copies what others need into
  its slot, reduces its own share in rank order and copies the others' results out of their slots. On one node, small
  tensors are reduced whole by everyone: one exchange. Each operation of 256 KiB or more times how long a line that
  another rank has just written takes to read; where the cores share no cache (far dies, sockets, a hypervisor that
  moves its processors), chunks are written past the cache, into memory (``choose_handover``). Operations of a process
  set pass one at a time, in the coordinator's order.
- Gradients where they lie (``engine/steps/node_pass.py``, ``csrc/in_place``): a lane has a window with counters
  ("ready" and "done" for each operation), a table in which each rank writes where it has each gradient, a region of
  each rank for its small gradients (under 64 KiB; they are copied there and back), and slots for chunks. Once all are
  ready, each rank reduces its share out of all ranks' gradients into all of them, in one pass. What some rank has where
  others cannot reach it goes in chunks, in the order of the lane's operations, with the same bits. Offsets of peers are
  checked against what was mapped before they are used.
- A rank that dies loses its lock on one byte of the file; the others look five times a second while they wait.
"""

SEGMENT_BYTES = 1 << 40
SEGMENTS = 1 << 22


def has_segment(number: int) -> bool:
    """Return whether the memory of a node has a segment of this number."""
    return number < SEGMENTS
