"""What a launcher tells a process about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Rendezvous:
    """Where the ``torch`` transport meets.

    kind: ``"tcp"``: rank 0 serves a store at host:port. ``"agent"``: a launcher already serves that TCPStore and
    every rank is a client. ``"fd"``: rank 0 serves on the listening socket whose descriptor it inherited, the others
    are clients. ``"http"``: a key-value server of ``horovodrun`` at which rank 0 publishes where its store is.
    """

    kind: str
    host: str
    port: int
    listen_fd: int | None = None


@dataclass(frozen=True)
class World:
    """One process's place in its job. Local and cross ranks are None where the launcher does not say."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    rendezvous: Rendezvous | None = None
    mpi: bool = False  # the launcher started an MPI job, so MPI_COMM_WORLD is this world
    job: str = "0"  # the same on all ranks of a job, another one in the next job
    members: tuple[int, ...] | None = None  # which ranks of the launcher's these are; None: all

    @property
    def launched(self) -> tuple[int, ...]:
        """The number that the launcher gave to each rank."""
        return tuple(range(self.size)) if self.members is None else self.members

    def part(self, members: Sequence[int]) -> World:
        """The smaller job of some of the ranks, this one among them; ranks are the indices in ``members``."""
        index, size = members.index(self.rank), len(members)
        here = self.local_size == self.size  # all on one host, and so is a part of them
        return replace(
            self,
            rank=index,
            size=size,
            local_rank=index if here else None,
            local_size=size if here else None,
            cross_rank=None,
            cross_size=None,
            job=f"{self.job}/{'-'.join(map(str, members))}",
            members=tuple(members),
        )


# One launcher: its World, None where it did not start this process; raises EnvironmentConflictError if it is half set.
Detect = Callable[[Mapping[str, str]], World | None]
