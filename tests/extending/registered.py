"""Ranks whose launcher and transport stand outside of hvdkit: ``python -m tests.extending.registered``, or a runner."""

from __future__ import annotations

import hvdkit.torch as hvd
from hvdkit import environments
from hvdkit.engine.session import runtime
from tests import ranks
from tests.extending import line_up, unix_sockets  # noqa: F401 (they register themselves)

if __name__ == "__main__":
    import sys

    if sys.argv[1:]:
        ranks.main(*sys.argv[1:])
    hvd.init()
    place = f"{environments.detect().launcher} {hvd.local_rank()} of {hvd.local_size()}"
    print(f"{place}: {runtime.engine().transport.name} {hvd.allgather_object(hvd.rank())}", flush=True)
    hvd.shutdown()
