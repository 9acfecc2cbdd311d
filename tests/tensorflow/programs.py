"""Programs of ranks: they fork children, or one of them leaves or is killed."""

from __future__ import annotations

import os
import sys

import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.errors import PeerLostError
from tests import measured
from tests.forking import status_of
from tests.told import told


def fork() -> None:
    """Fork children that end as Python ends, while the job goes on."""
    for code in (None, 0, 3):
        child = os.fork()
        if child == 0:
            if code is not None:
                sys.exit(code)
            return
        status = status_of(child)
        assert status == (code or 0), f"sys.exit({code}): {status}"
        assert hvd.allreduce(tf.ones(3), op=hvd.Sum)[0] == hvd.size()
    print(f"RANK {hvd.rank()} THROUGH", flush=True)
    hvd.shutdown()


def lose(how: str, way: str) -> None:
    """Rank 1 leaves or is killed, and others catch what users of TensorFlow catch, eagerly or in a graph."""

    def operation(tensor: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(tensor, op=hvd.Sum, name="work")

    run = tf.function(operation) if way == "graph" else operation
    run(tf.ones(3))
    if hvd.rank() == 1:
        if how == "killed":
            measured.killed()
        hvd.shutdown()
        return
    with told(tf.errors.UnknownError, "rank 1") as caught:
        while True:
            run(tf.ones(3))
    assert isinstance(caught.value, PeerLostError), caught.value
    if how == "killed":  # who notices it between two operations is told the same by the next one
        with told(tf.errors.UnknownError, "cannot communicate any more", "rank 1") as again:
            run(tf.ones(3))
        assert isinstance(again.value, PeerLostError), again.value
    print(f"RANK {hvd.rank()} CAUGHT {caught.typename}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    hvd.init()
    hvd.allreduce(tf.ones(3))
    {"fork": fork, "lose": lose}[sys.argv[1]](*sys.argv[2:])
