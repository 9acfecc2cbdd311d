"""On which jobs cases run: starting ranks is most of what tests take, and most of what differs shows on two jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By the number of ranks, the transports that PyTorch's jobs are run on at all.
PYTORCHS = {1: ["mpi"], 2: ["mpi", "torch"], 3: ["torch"], 4: ["mpi"]}
# What `make test` runs; two ranks of one node, and a number that is no power of two.
ESSENTIAL = {(2, "mpi"), (3, "torch")}
OF_EVERY_SIZE = {(1, "mpi"), (4, "mpi")}  # with ``every_size``


def is_ever_run(path: Sequence[str], ranks: int | None, transport: str | None) -> bool:
    """Whether all tests have this job of PyTorch."""
    is_pytorchs = transport is not None and "torch" in path
    return not is_pytorchs or ranks is None or transport in PYTORCHS.get(ranks, [transport])


def is_essential(ranks: int | None, transport: str | None, *, every_size: bool = False) -> bool:
    """Whether a case runs on this job in ``make test``, too."""
    job = (ranks, transport)
    return None in job or job in ESSENTIAL or (every_size and job in OF_EVERY_SIZE)


def has(parameters: Mapping[str, object], values: Mapping[str, object]) -> bool:
    """Whether each of a test's parameters that is named in ``values`` has that value, or one of that tuple."""
    return all(
        parameters[name] in value if isinstance(value, tuple) else parameters[name] == value
        for name, value in values.items()
    )
