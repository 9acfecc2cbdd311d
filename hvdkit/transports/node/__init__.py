"""Memory that the ranks of a node share, messages through it, and signs of life.

The lowest rank of a node makes an anonymous sparse file at init, and the other ranks map it (``memory``). Each lane and
each process set has a segment of its own, by numbers that all ranks know, so no rank allocates. No segment is used
again; a lane or process set without a segment goes by messages. If a rank cannot get the memory, its whole node goes
without, and says the reason once.

- Messages (``transport``, ``csrc/message_rings``) pass through two rings of bytes for each pair of ranks, one of them
  for control messages. If all ranks of the job are on one node, the transport below is never polled.
- Each rank has an event counter with a futex, which ranks and threads ring when they have moved something for it.
- Tensors anywhere (``csrc/staged``, ``collectives/staging``) pass in chunks through slots of the ranks.
- Gradients (``engine/steps/node_pass``, ``csrc/in_place``) are summed where they lie, out of all ranks' memory.
"""

SEGMENT_BYTES = 1 << 40
SEGMENTS = 1 << 22


def has_segment(number: int) -> bool:
    """True if the memory of a node has a segment of this number."""
    return number < SEGMENTS
