"""Train a net of which every rank has some layers, or a slice of each layer, with TensorFlow.

    hvdkitrun -np 4 python examples/tensorflow2_layers_parallel.py      # on 2 or 4 ranks

hvdkit's operations have gradients, which are operations among the ranks too. The rule of this script: the loss of a
batch is the sum of what the ranks return as theirs. By that rule the gradients of allreduce(op=Sum) and alltoall are
right; as in Horovod those of allgather are divided by the number of ranks, and those of reducescatter(op=Sum) are
multiplied by it, which scale_gradient() undoes. Needs: pip install '.[tensorflow,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdkit.tensorflow as hvd

WIDTH, CLASSES, LAYERS = 64, 10, 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Layers on several ranks, and slices of layers",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, help="batches to train on")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, a multiple of the ranks")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate")
    return parser.parse_args()


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, batch_size: int) -> tf.Tensor:
    """Return what these rows add to the loss of the batch."""
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)) / batch_size


def activation(tensor: tf.Tensor, layer: int) -> tf.Tensor:
    return tf.nn.relu(tensor) if layer < LAYERS - 1 else tensor


@tf.custom_gradient
def scale_gradient(tensor: tf.Tensor, factor: float) -> tuple[tf.Tensor, Callable]:
    return tf.identity(tensor), lambda gradient: (gradient * factor, None)


def whole_net(images: tf.Tensor, labels: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    """One process: all layers, the whole batch."""
    for layer, weight in enumerate(weights):
        images = activation(images @ weight, layer)
    return cross_entropy(images, labels, len(labels))


def layers_on_ranks(images: tf.Tensor, labels: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    """Each rank has some layers. It sends all rows to the next rank, and the gradient sends theirs back."""
    rows = images if hvd.rank() == 0 else images[:0]  # the other ranks start with no rows
    for stage in range(hvd.size()):
        if hvd.rank() == stage:
            for number, weight in enumerate(weights):
                rows = activation(rows @ weight, stage * len(weights) + number)
        if stage < hvd.size() - 1:
            splits = [len(rows) if receiver == stage + 1 else 0 for receiver in range(hvd.size())]
            rows, _ = hvd.alltoall(rows, splits, name=f"to rank {stage + 1}")
            rows = tf.ensure_shape(rows, [len(labels) if hvd.rank() == stage + 1 else 0, WIDTH])
    return cross_entropy(rows, labels[: len(rows)], len(labels))  # 0 but on the last rank


def slices_of_layers(images: tf.Tensor, labels: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    """Each rank has columns of one layer and the same rows of the next: the sum over the ranks is the output."""
    for layer in range(0, LAYERS, 2):
        part = activation(images @ weights[layer], layer) @ weights[layer + 1]
        images = activation(hvd.allreduce(part, op=hvd.Sum, name=f"layer {layer + 1}"), layer + 1)
    return cross_entropy(images, labels, len(labels)) / hvd.size()  # all ranks have the same: each adds its share


def slices_and_shares(images: tf.Tensor, labels: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    """As slices_of_layers(), but between pairs of layers a rank keeps only its share of the batch."""
    share = slice(hvd.rank() * len(labels) // hvd.size(), (hvd.rank() + 1) * len(labels) // hvd.size())
    rows = images[share]
    for layer in range(0, LAYERS, 2):
        batch = scale_gradient(hvd.allgather(rows, name=f"layer {layer}"), float(hvd.size()))
        part = activation(batch @ weights[layer], layer) @ weights[layer + 1]
        sums = hvd.reducescatter(part, op=hvd.Sum, name=f"layer {layer + 1}")
        rows = activation(scale_gradient(sums, 1 / hvd.size()), layer + 1)
    return cross_entropy(rows, labels[share], len(labels))


def train(net: Callable, weights: list[np.ndarray], batches: list[tuple], lr: float, ranks: bool = True) -> np.ndarray:
    """Train on all batches. Returns the loss of each."""
    variables = [tf.Variable(weight) for weight in weights]

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            # Every operation depends on the images, so all ranks take part in all gradients.
            tape.watch(images)
            loss = net(images, labels, variables)
        _, *gradients = tape.gradient(loss, [images, *variables])
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(lr * gradient)
        return hvd.allreduce(loss, op=hvd.Sum, name="loss") if ranks else loss

    return np.array([step(tf.constant(images), tf.constant(labels)).numpy() for images, labels in batches])


def main() -> None:
    args = parse_arguments()
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if LAYERS % size:
        raise ValueError(f"{LAYERS} layers cannot be shared by {size} ranks\nHINT: start 1, 2 or 4.")
    tf.config.threading.set_intra_op_parallelism_threads(1)

    random = np.random.default_rng(0)  # the same on all ranks: weights and batches
    widths = [*[WIDTH] * LAYERS, CLASSES]
    weights = [random.normal(0, (2 / m) ** 0.5, (m, n)).astype(np.float32) for m, n in pairwise(widths)]
    pixels, targets = load_digits(return_X_y=True)
    chosen = random.integers(len(targets), size=(args.steps, args.batch_size))
    batches = [(pixels[batch].astype(np.float32) / 16, targets[batch]) for batch in chosen]
    alone = train(whole_net, weights, batches, args.lr, ranks=False)

    layers = weights[rank * LAYERS // size : (rank + 1) * LAYERS // size]
    slices = [np.split(weight, size, axis=1 - layer % 2)[rank] for layer, weight in enumerate(weights)]
    for name, net, mine in (
        ("layers on ranks", layers_on_ranks, layers),
        ("slices of layers", slices_of_layers, slices),
        ("slices of layers and shares of the batch", slices_and_shares, slices),
    ):
        losses = train(net, mine, batches, args.lr)
        if rank == 0:
            print(f"{name}, {size} ranks: loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
            print(f"largest difference of losses: {np.abs(losses - alone).max():.1e}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
