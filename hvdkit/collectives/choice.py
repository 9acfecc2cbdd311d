"""What the choice of an allreduce algorithm depends on, besides the tensor: what was asked for, and the network."""

from __future__ import annotations

from typing import NamedTuple

# A fast Ethernet of 10 Gbit/s, for where nobody has measured.
LATENCY_SECONDS = 50e-6
SECONDS_PER_BYTE = 1 / 1.25e9
# What a core takes to add one byte of one rank to a sum: about that of reading memory.
REDUCE_SECONDS_PER_BYTE = 1e-10


class Choice(NamedTuple):
    """All ranks of a group must hold the same one (the numbers that rank 0 measured), or they choose differently."""

    asked: str = "auto"  # or the name of an algorithm: the same one for every tensor
    latency_seconds: float = LATENCY_SECONDS  # of one exchange between two ranks, whatever its size
    seconds_per_byte: float = SECONDS_PER_BYTE  # of what one rank sends


AUTO = Choice()
