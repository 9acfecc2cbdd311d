"""Wrong splits of an alltoall are the error of one rank, which the others must hear of: they would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from hvdkit.engine.handle import Handle
from hvdkit.errors import HorovodInternalError

# Of an error's text, as others are told it: a list of splits may be long.
LONGEST_TEXT = 500


def refuse(problem: Exception, submit: Callable[[str], Handle]) -> NoReturn:
    """Raise ``problem``, once all other ranks are told of it, who get a HorovodInternalError.

    ``submit`` announces the alltoall with words in place of splits.
    """
    try:
        submit(str(problem)[:LONGEST_TEXT]).wait()
    except HorovodInternalError as told:
        raise problem from told
    raise AssertionError(f"an alltoall ran with wrong splits: {problem}")
