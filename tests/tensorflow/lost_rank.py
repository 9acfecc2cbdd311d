"""A rank leaves, or is killed, and the others catch what users of TensorFlow catch, eagerly or in a graph."""

from __future__ import annotations

import sys

import tensorflow as tf

import hvdkit.tensorflow as hvd
from hvdkit.errors import PeerLostError
from tests import measured
from tests.told import told


def main(how: str, way: str) -> None:
    hvd.init()

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
    main(*sys.argv[1:])
