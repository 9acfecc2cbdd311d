from collections.abc import Sequence
from typing import Any, overload

from hvdkit.kernels.dtypes import Array
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.kernels.scale import Scale

def reduce_into(
    destination: Array | list[Array] | tuple[Array, ...],
    sources: list[Array] | tuple[Array, ...],
    op: ReduceOp,
    scale: float | Scale = 1.0,
) -> None: ...
def scale_into(destination: Array, source: Array, factor: float | Scale) -> None: ...
def convert_into(destination: Array, source: Array) -> None: ...
def quantise_into(
    codes: Array,
    scales: Array,
    values: Array,
    residual: Array | None,
    bits: int,
    block: int,
    seed: int | None = None,
) -> None: ...
def dequantise_into(
    out: Array, codes: Array, scales: Array, bits: int, block: int, scale: float = 1.0, accumulate: bool = False
) -> None: ...
def sign_into(packed: Array, scales: Array, values: Array, residual: Array | None, block: int) -> None: ...
def unsign_into(
    out: Array, packed: Array, scales: Array, block: int, scale: float = 1.0, accumulate: bool = False
) -> None: ...
def select_into(
    indices: Array, picked: Array, values: Array | None, residual: Array | None, threshold: float
) -> tuple[int, int]: ...
def scatter_add_into(out: Array, indices: Array, values: Array, scale: float = 1.0) -> None: ...
def abs_sample_into(sample: Array, values: Array | None, residual: Array | None, stride: int, seed: int) -> None: ...
def checksum(array: Array) -> int: ...
def project_into(left: Array, matrix: Array, right: Array, rows: int, cols: int) -> None: ...
def project_back_into(right: Array, matrix: Array, left: Array, rows: int, cols: int) -> None: ...
def orthonormalise(vectors: Array, length: int) -> None: ...
def reconstruct_into(
    out: Array | None, matrix: Array | None, left: Array, right: Array, rows: int, cols: int, scale: float = 1.0
) -> None: ...
def momentum_into(velocity: Array, accumulated: Array, gradient: Array, momentum: float) -> bool: ...

class DefaultFloats:
    """See hvdkit.kernels.numpy_floats.DefaultFloats."""

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

class Window:
    """A part of a memory file, mapped into this process; a buffer of bytes."""

    nbytes: int
    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None: ...
    def populate(self, begin: int, nbytes: int) -> bool: ...
    def give_back(self, begin: int, nbytes: int) -> None: ...
    def keep_from_forks(self) -> None: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class Cells:
    """Counters in a window, each on a cache line and written by one rank."""

    def __init__(self, window: Window, offset: int, count: int) -> None: ...
    def get(self, index: int) -> int: ...
    def set(self, index: int, number: int) -> None: ...

class Bell:
    """See hvdkit.engine.loop.wakeup.Bell; in a window, where other processes ring it, or in this process's memory."""

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, window: Window, offset: int) -> None: ...
    def count(self) -> int: ...
    def ring(self) -> None: ...
    def sleep(self, seen: int, seconds: float, spin_seconds: float = 0.0) -> None: ...

class Message:
    """A send or a receive between ranks of a node."""

    peer: int
    def done(self) -> bool: ...

class Post:
    """Tagged messages between the ranks of a node."""

    @staticmethod
    def bytes_needed(ranks: int, data_capacity: int, control_capacity: int) -> int: ...
    def __init__(
        self,
        window: Window,
        offset: int,
        ranks: int,
        me: int,
        data_capacity: int,
        control_capacity: int,
        bells: list[Bell],
    ) -> None: ...
    def send(self, peer: int, tag: int, buffer: Array) -> Message: ...
    def receive(self, peer: int, tag: int, buffer: Array) -> Message: ...
    def send_control(self, peer: int, payload: bytes) -> None: ...
    def progress(self) -> bool: ...
    def take_control(self) -> list[tuple[int, bytes]]: ...

class Area:
    """Slots of shared memory in which the ranks of a group stage chunks of tensors."""

    slot_bytes: int
    @staticmethod
    def bytes_needed(ranks: int, depth: int, slot_bytes: int) -> int: ...
    def __init__(
        self, window: Window, offset: int, ranks: int, me: int, depth: int, slot_bytes: int, bells: list[Bell]
    ) -> None: ...
    def own_slots(self) -> tuple[int, int]: ...
    def left_by_others(self) -> bool: ...
    def line_seconds(self) -> list[float]: ...

class Staged:
    """One collective in place on a flat array, through an area; see csrc/staged.h."""

    def __init__(
        self,
        area: Area,
        mode: int,
        array: Array,
        op: ReduceOp,
        scale: float | Scale,
        shares: list[tuple[int, int]],
        source: Array | None = None,
        past_cache: list[bool] = ...,
        measure: bool = ...,
    ) -> None: ...
    def advance(self, spin_seconds: float) -> bool: ...
    def awaited(self) -> list[int]: ...

class InPlace:
    """Gradients of a node's ranks, reduced where they lie; see csrc/in_place.h."""

    @staticmethod
    def table_bytes(ranks: int, slots: int) -> int: ...
    def __init__(
        self,
        window: Window,
        table_offset: int,
        me: int,
        slots: list[tuple[int, int, int | None]],
        regions: list[int],
        region_bytes: int,
        arenas: list[Window | None],
    ) -> None: ...
    def offer(self, slot: int, where: int, offset: int = 0) -> None: ...
    def staged(self, members: Sequence[int], absent: list[bool]) -> list[int]: ...
    def run(
        self,
        direction: int,
        members: Sequence[int],
        offsets: Sequence[int],
        begin: int,
        end: int,
        op: ReduceOp,
        scale: float | Scale,
        absent: list[bool],
        flat: Array | None = None,
    ) -> None: ...

class LastResort:
    """Ends the process with these words unless it is cancelled in time; see csrc/last_resort.h."""

    def __init__(self, seconds: float, words: str) -> None: ...
    def cancel(self) -> None: ...

class Heartbeat:
    """Signs of life from a thread that needs no Python: counted in a window, sent over sockets; see csrc/heartbeat.h.

    ``connections``: descriptors of connected sockets, which it closes, and the rank behind each.
    """

    def __init__(
        self,
        window: Window | None,
        offset: int,
        ranks: int,
        me: int,
        connections: list[tuple[int, int]],
        seconds: float,
    ) -> None: ...
    def count(self, rank: int) -> int: ...
    def stop(self) -> None: ...

# A submodule of functions; see csrc/module.cpp of hvdkit.arena, and hvdkit.arena, which is what others use.
arena: Any
