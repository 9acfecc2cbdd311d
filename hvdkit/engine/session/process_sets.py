"""Process sets: some ranks of the job that run collective operations among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdkit.engine.session import runtime
from hvdkit.engine.session.communicators import resolve_ranks

EXPECTED = "ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object"


class ProcessSet:
    """Ranks that run collective operations together.

    Pass it to ``hvd.init()`` or ``hvd.add_process_set()``, which give it its ``process_set_id``.

    Args:
        ranks_or_comm: a list of ranks of the job, or an mpi4py communicator under MPI.

    Raises:
        ValueError: for anything else, and for a rank that is named twice.

    Examples:
        >>> evaluators = hvd.add_process_set(hvd.ProcessSet([1]))
        >>> evaluators.ranks, evaluators.size(), evaluators.included()  # on rank 1: ([1], 1, True)
        ([1], 1, False)
        >>> hvd.remove_process_set(evaluators)
        True
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None
    lost: str = ""  # why an elastic job has ended the set

    def __init__(self, ranks_or_comm: Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(f"{EXPECTED}, got {type(ranks_or_comm).__name__}")
        ranks = list(ranks_or_comm)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"{EXPECTED}, got {ranks_or_comm!r}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"ProcessSet: each rank can be named once, got {ranks}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks, or None before the set is initialized."""
        return None if self.process_set_id is None else len(_ranks_of(self))

    def rank(self) -> int | None:
        """Return this process's rank in the set, or None before the set is initialized.

        Raises:
            ValueError: on a rank that is not in the set, and for a set that was removed.
        """
        if self.process_set_id is None:
            return None
        ranks, rank = _ranks_of(self), runtime.topology().rank
        if rank not in ranks:
            raise ValueError(
                f"process_set.rank(): rank {rank} is not in process set {self.process_set_id}, which has the ranks "
                f"{ranks}.\nHINT: call it only where process_set.included() is true."
            )
        return ranks.index(rank)

    def included(self) -> bool | None:
        """Return True if this process is in the set, None before ``ranks`` is known."""
        if self.process_set_id == 0:
            return True
        return None if self.ranks is None else runtime.topology().rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalProcessSet(ProcessSet):
    """The set of all ranks: the same object before and after ``hvd.init()``, and in copies of its users."""

    process_set_id: int | None = 0

    def __init__(self) -> None:
        self.mpi_comm = None

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return _ranks_of(self) if runtime.is_initialized() else []

    def __reduce__(self) -> str:
        return "global_process_set"

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self


global_process_set: ProcessSet = _GlobalProcessSet()


def _ranks_of(process_set: ProcessSet) -> list[int]:
    assert process_set.process_set_id is not None
    ranks = runtime.process_sets().get(process_set.process_set_id)
    if ranks is None:
        raise ValueError(f"{process_set} is not part of this job: it was removed, or hvd.init() was called again.")
    return ranks


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set after ``hvd.init()``; every rank of the job calls this with the same ranks.

    Needs ``HOROVOD_DYNAMIC_PROCESS_SETS=1`` or ``hvd.init(process_sets="dynamic")``.

    Args:
        process_set: a ProcessSet of a list of ranks, or the list.

    Returns:
        The ProcessSet, which has its ``process_set_id`` now.

    Raises:
        ValueError: where a set of these ranks exists, for ranks that the job does not have, and where sets are not
            dynamic.
        NotImplementedError: for a set made from an MPI communicator.
        NotInitializedError: before init() or after shutdown().

    Examples:
        >>> evaluators = hvd.add_process_set([1])
        >>> if evaluators.included():
        ...     hvd.barrier(process_set=evaluators)
        >>> hvd.remove_process_set(evaluators)
        True
    """
    engine = runtime.engine()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _check_dynamic("adding")
    if process_set.ranks is None:
        raise NotImplementedError(
            "Dynamically adding process sets defined by an MPI communicator is not implemented. "
            "Please build the process set via a list of ranks."
        )
    number = engine.named.add_process_set(resolve_ranks(process_set, engine.topology.size))
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id, process_set.lost = number, ""
    runtime.registered_process_sets().append(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; every rank of the job calls this. Returns False for the global set, and if there is no such set.

    Raises:
        TypeError: if ``process_set`` is no ProcessSet.
        ValueError: where sets are not dynamic, as for add_process_set().
        NotInitializedError: before init() or after shutdown().

    Examples:
        >>> hvd.remove_process_set(hvd.global_process_set)
        False
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"remove_process_set: process_set must be a hvd.ProcessSet, got {process_set!r}")
    engine = runtime.engine()
    if process_set.process_set_id in (None, 0):
        return False
    _check_dynamic("removing")
    number, process_set.process_set_id = process_set.process_set_id, None
    registered = runtime.registered_process_sets()
    registered[:] = [each for each in registered if each is not process_set]
    assert number is not None
    return engine.named.remove_process_set(number)


def _check_dynamic(doing: str) -> None:
    if not runtime.dynamic_process_sets():
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {doing} process sets after Horovod initialization.\n"
            'HINT: call hvd.init(process_sets="dynamic"), or set the variable before the job starts.'
        )
