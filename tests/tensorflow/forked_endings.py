"""What a rank runs that forks children which end as Python ends, while the job goes on."""

from __future__ import annotations

import os
import sys

import tensorflow as tf

import hvdkit.tensorflow as hvd
from tests.forking import status_of


def main() -> None:
    hvd.init()
    hvd.allreduce(tf.ones(3))
    for code in (None, 0, 3):
        child = os.fork()
        if child == 0:
            if code is not None:
                sys.exit(code)
            return
        found = status_of(child)
        assert found == (code or 0), f"sys.exit({code}): {found}"
        assert hvd.allreduce(tf.ones(3), op=hvd.Sum)[0] == hvd.size()
    print(f"RANK {hvd.rank()} THROUGH", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
