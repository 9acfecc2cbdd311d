"""Train a small convolutional network on handwritten digits with Keras, on its TensorFlow or its PyTorch backend.

    python examples/keras_digits.py                      # alone
    hvdkitrun -np 2 python examples/keras_digits.py      # on two processes
    KERAS_BACKEND=torch hvdkitrun -np 2 python examples/keras_digits.py           # with PyTorch below Keras
    hvdkitrun -np 2 python examples/keras_digits.py --resume --epochs 30          # go on from the checkpoint

The 1797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. What makes the script distributed is
marked with "hvd:". Needs: pip install '.[tensorflow,examples]' in a checkout, or '.[torch,examples]' and keras.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Handwritten digits on several processes", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--lr", type=float, default=0.002, help="learning rate of one process; scaled by their number")
    parser.add_argument("--warmup-epochs", type=int, default=3, help="epochs until the rate is at its full size")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the order of the images")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="where checkpoints are kept")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, not afresh")
    return parser.parse_args()


def take_resources(threads: int) -> None:
    """Set the number of compute threads and, where there are GPUs, take the one of this process.

    Keras leaves both to its backend.
    """
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(threads)
        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank())  # hvd: one GPU for each process of a host
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        if gpus := tf.config.list_physical_devices("GPU"):
            tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")  # hvd: one GPU for each process of a host


def digits_net() -> keras.Model:
    """8 x 8 grey images to ten classes: two convolutions and two dense layers, 151 thousand parameters."""
    return keras.Sequential(
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


def new_model(args: argparse.Namespace) -> keras.Model:
    """A network with random weights, ready for fit()."""
    model = digits_net()
    # hvd: average the gradients of all ranks before each step; more images in each step allow for longer steps.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.lr * hvd.size()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def newest_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """The checkpoint that was written last, if there is one, and how many epochs were done then."""
    paths = sorted(folder.glob("digits-*.keras"), key=lambda path: path.stat().st_mtime_ns)
    return (paths[-1], int(paths[-1].stem.removeprefix("digits-"))) if paths else (None, 0)


def make_callbacks(args: argparse.Namespace) -> list[keras.callbacks.Callback]:
    """What happens between the steps."""

    def cosine(epoch: float) -> float:
        return (1 + math.cos(math.pi * (epoch - args.warmup_epochs) / (args.epochs - args.warmup_epochs))) / 2

    full = args.lr * hvd.size()
    callbacks = [
        # hvd: everyone starts where rank 0 starts: after its checkpoint, or from its random weights.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # hvd: every rank saw other images; what is reported is the mean over all ranks.
        hvd.callbacks.MetricAverageCallback(),
        # hvd: from the rate of one process up to hvd.size() times that (Goyal et al. 2017), then a cosine down to zero.
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=full, warmup_epochs=args.warmup_epochs),
        hvd.callbacks.LearningRateScheduleCallback(
            initial_lr=full, multiplier=cosine, start_epoch=args.warmup_epochs, staircase=False
        ),
    ]
    if hvd.rank() == 0:  # hvd: one checkpoint: rank 0's
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_dir / "digits-{epoch:03d}.keras"))
    return callbacks


def evaluate(model: keras.Model, test: tuple[np.ndarray, np.ndarray]) -> tuple[float, int]:
    """Each rank looks at its share of the test images. Returns the accuracy over all of them, and how many they are."""
    images, labels = (array[hvd.rank() :: hvd.size()] for array in test)
    correct = np.sum(np.argmax(model.predict(images, verbose=0), axis=1) == labels)
    # hvd: sum both counts, since shares differ by one image where the ranks do not divide them.
    counts = hvd.allreduce(np.array([correct, len(labels)]), name="accuracy", op=hvd.Sum)
    right, seen = keras.ops.convert_to_numpy(counts).tolist()
    return right / seen, seen


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvd: find the other ranks
    first = hvd.rank() == 0
    take_resources(args.threads)
    keras.utils.set_random_seed(args.seed + hvd.rank())  # another order on each rank; the weights are broadcast below

    train, test = load_data()
    # hvd: every rank has its own share of the images. Whoever took a step more than the others would wait for them for
    # ever, so the last images are left out where the ranks do not divide them.
    whole = len(train[0]) // hvd.size() * hvd.size()
    images, labels = (array[hvd.rank() : whole : hvd.size()] for array in train)

    # hvd: rank 0 alone reads the checkpoint; the others get its weights, its optimizer's state and its epoch.
    path, epochs_done = newest_checkpoint(args.checkpoint_dir) if args.resume and first else (None, 0)
    model = new_model(args) if path is None else hvd.load_model(path)
    epochs_done = int(hvd.broadcast(epochs_done, root_rank=0, name="epochs_done"))
    if first and args.resume:
        print(f"resumed from {path} after epoch {epochs_done}" if path else f"no checkpoint in {args.checkpoint_dir}")
        if epochs_done >= args.epochs:
            print(f"nothing left to train: {epochs_done} epochs are done and --epochs is {args.epochs}")

    started = time.perf_counter()
    model.fit(
        images,
        labels,
        batch_size=args.batch_size,
        initial_epoch=epochs_done,
        epochs=args.epochs,
        validation_data=tuple(array[hvd.rank() :: hvd.size()] for array in test),
        callbacks=make_callbacks(args),
        verbose=2 if first else 0,  # hvd: one report: rank 0's
    )

    accuracy, seen = evaluate(model, test)
    if first:
        seconds = time.perf_counter() - started
        print(f"test accuracy {accuracy:.1%} ({seen} images, {hvd.size()} process(es), {seconds:.1f} s)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
