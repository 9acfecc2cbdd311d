"""Train a small convolutional network on handwritten digits with TensorFlow and a training loop of one's own.

    python examples/tensorflow2_digits.py                      # alone
    hvdkitrun -np 2 python examples/tensorflow2_digits.py      # on two processes
    hvdkitrun -np 2 python examples/tensorflow2_digits.py --resume --epochs 30    # go on from the checkpoint

The 1797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. What makes the script distributed is
marked with "hvd:". Needs: pip install '.[tensorflow,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import hvdkit.tensorflow as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Handwritten digits on several processes", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of one process; scaled by their number")
    parser.add_argument("--warmup-epochs", type=float, default=3, help="epochs until the rate is at its full size")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the order of the images")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="where the checkpoint is kept")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint instead of starting afresh")
    return parser.parse_args()


def take_resources(threads: int) -> None:
    """Set the number of compute threads and, where there are GPUs, take the one of this process."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # hvd: one GPU for each process of a host


def digits_net() -> tf.keras.Model:
    """8 x 8 grey images to ten classes: two convolutions and two dense layers, 151 thousand parameters."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The same split into 1437 training and 360 test images for everyone, always."""
    pixels, labels = load_digits(return_X_y=True)
    images = pixels.astype(np.float32).reshape(-1, 8, 8, 1) / 16
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    return (images[train], labels[train]), (images[test], labels[test])


def share_of(images: np.ndarray, labels: np.ndarray, args: argparse.Namespace) -> tf.data.Dataset:
    """Batches of this rank: another share in each epoch, and as many batches as every other rank has."""
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    # hvd: all ranks shuffle alike, since they have one seed, and then each takes its own share. Whoever took one step
    # more would wait for the others for ever, so the last images are left out where the ranks do not divide them.
    dataset = dataset.shuffle(len(labels), seed=args.seed).take(len(labels) // hvd.size() * hvd.size())
    return dataset.shard(hvd.size(), hvd.rank()).batch(args.batch_size)


def learning_rate(epoch: float, args: argparse.Namespace) -> float:
    """From the rate of one process up to ``hvd.size()`` times that (Goyal et al. 2017), then a cosine down to zero."""
    if epoch < args.warmup_epochs:
        return args.lr * (1 + (hvd.size() - 1) * epoch / args.warmup_epochs)
    progress = (epoch - args.warmup_epochs) / max(args.epochs - args.warmup_epochs, 1e-9)
    return args.lr * hvd.size() * (1 + math.cos(math.pi * progress)) / 2


def make_step(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, batch: object) -> Callable:
    """A graph that trains on one batch, whose types and shapes are ``batch``, and returns its loss."""
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(input_signature=batch)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
        # hvd: average the gradients of all ranks before each step.
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def evaluate(model: tf.keras.Model, test: tuple[np.ndarray, np.ndarray]) -> tuple[float, int]:
    """Each rank looks at its share of the test images. Returns the accuracy over all of them, and how many they are."""
    images, labels = (array[hvd.rank() :: hvd.size()] for array in test)
    correct = np.sum(np.argmax(model(images, training=False), axis=1) == labels)
    # hvd: sum both counts, since shares differ by one image where the ranks do not divide them.
    right, seen = hvd.allreduce(tf.constant([correct, len(labels)]), name="accuracy", op=hvd.Sum).numpy().tolist()
    return right / seen, seen


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvd: find the other ranks
    first = hvd.rank() == 0
    take_resources(args.threads)
    tf.keras.utils.set_random_seed(args.seed)  # hvd: the same one on all ranks, which tf.data shuffles by

    train, test = load_data()
    batches = share_of(*train, args)
    model = digits_net()
    optimizer = tf.keras.optimizers.SGD(args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    optimizer.build(model.trainable_variables)  # so that its variables can be restored and broadcast
    step = make_step(model, optimizer, batches.element_spec)

    epochs_done = tf.Variable(0, trainable=False)
    checkpoint = tf.train.Checkpoint(epochs=epochs_done, model=model, optimizer=optimizer)
    manager = tf.train.CheckpointManager(checkpoint, args.checkpoint_dir, max_to_keep=1, checkpoint_name="digits")
    path = manager.latest_checkpoint if args.resume and first else None
    if path is not None:
        checkpoint.restore(path).assert_existing_objects_matched()
    # hvd: everyone starts where rank 0 starts: after its checkpoint, or from its random weights.
    hvd.broadcast_variables([epochs_done], root_rank=0)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    begin = int(epochs_done)
    if first and args.resume:
        print(f"resumed from {path} after epoch {begin}" if path else f"no checkpoint in {args.checkpoint_dir}")
        if begin >= args.epochs:
            print(f"nothing left to train: {begin} epochs are done and --epochs is {args.epochs}")

    started = time.perf_counter()
    # hvd: one progress bar, one checkpoint and one report: rank 0's.
    steps = {"initial": begin * len(batches), "total": max(begin, args.epochs) * len(batches)}
    with tqdm(**steps, desc="training", unit="step", disable=not first) as bar:
        for epoch in range(begin, args.epochs):
            losses = []
            for batch, (images, labels) in enumerate(batches):
                optimizer.learning_rate = learning_rate(epoch + batch / len(batches), args)
                losses.append(step(images, labels))
                bar.update()
            # hvd: every rank saw other images; this is the mean over all of them.
            loss = float(hvd.allreduce(tf.reduce_mean(losses), name="train_loss"))
            accuracy, _ = evaluate(model, test)
            bar.set_postfix(epoch=f"{epoch + 1}/{args.epochs}", loss=f"{loss:.4f}", accuracy=f"{accuracy:.1%}")
            epochs_done.assign_add(1)
            if first:
                manager.save(checkpoint_number=epoch + 1)

    accuracy, images = evaluate(model, test)
    if first:
        seconds = time.perf_counter() - started
        print(f"test accuracy {accuracy:.1%} ({images} images, {hvd.size()} process(es), {seconds:.1f} s)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
