"""A rank of the cluster's tests in TensorFlow: one step with a tape, then a line of JSON that says who it is."""

import json
import socket
import sys

import tensorflow as tf

import hvdkit.tensorflow as hvd


def main() -> None:
    hvd.init()
    weight = tf.Variable(tf.zeros(300))
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(weight * (hvd.rank() + 1.0))
    weight.assign_sub(tape.gradient(loss, weight))
    from hvdkit.engine.session import runtime

    about = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "host": socket.gethostname(),
        "weight": sorted(set(weight.numpy().tolist())),
        "transport": str(runtime.engine().transport.name),
    }
    sys.stdout.write(json.dumps(about) + "\n")
    sys.stdout.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
