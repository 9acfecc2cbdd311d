"""The jobs that cases run on. Few, since the start of ranks takes most of the time, and two jobs show most defects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# By number of ranks: all transports that tests of the PyTorch adapter run on.
PYTORCHS = {1: ["mpi"], 2: ["mpi", "torch"], 3: ["torch"], 4: ["mpi"]}
# What `make test` runs; two ranks of one node, and a number that is no power of two.
ESSENTIAL = {(2, "mpi"), (3, "torch")}
OF_EVERY_SIZE = {(1, "mpi"), (4, "mpi")}  # with ``every_size``


def is_ever_run(path: Sequence[str], ranks: int | None, transport: str | None) -> bool:
    """True if ``make test-all`` runs tests of this path on this job."""
    is_pytorchs = transport is not None and "torch" in path
    return not is_pytorchs or ranks is None or transport in PYTORCHS.get(ranks, [transport])


def is_essential(ranks: int | None, transport: str | None, *, every_size: bool = False) -> bool:
    """True if a case runs on this job also in ``make test``."""
    job = (ranks, transport)
    return None in job or job in ESSENTIAL or (every_size and job in OF_EVERY_SIZE)


def has(parameters: Mapping[str, object], values: Mapping[str, object]) -> bool:
    """True if each of a test's parameters that ``values`` names has that value, or one of that tuple."""
    return all(
        parameters[name] in value if isinstance(value, tuple) else parameters[name] == value
        for name, value in values.items()
    )
