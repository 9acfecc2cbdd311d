"""Train a small network on handwritten digits with Keras 3, while processes come and go.

    KERAS_BACKEND=torch hvdkitrun -np 2 --min-np 1 --max-np 3 python examples/keras_digits_elastic.py

Kill one of its processes: the others go on. What makes the script elastic is marked with "hvd:". Runs on TensorFlow
and on PyTorch. Needs: pip install '.[examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import os
import signal

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvdkit.keras as hvd


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the training images")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--kill-at-epoch", type=int, help="the last of the first ranks kills itself in this epoch")
    args = parser.parse_args()
    hvd.init()  # hvd: in an elastic job this connects nothing yet
    first_size = hvd.size()
    keras.utils.set_random_seed(42)
    pixels, labels = load_digits(return_X_y=True)
    images, test, targets, test_targets = train_test_split(
        pixels.reshape(-1, 8, 8, 1).astype("float32") / 16, labels, test_size=0.2, random_state=0, stratify=labels
    )
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(32, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10),
    ])  # fmt: skip
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])

    class Kill(keras.callbacks.Callback):
        """Kills this process in the middle of an epoch, to show that the others go on."""

        def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
            if state.epoch == args.kill_at_epoch and batch == 3 and hvd.rank() == first_size - 1 and is_first:
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run  # hvd: connects the ranks, and calls the function again when some have come or gone
    def train(state: hvd.elastic.KerasState) -> None:
        mine = slice(hvd.rank(), None, hvd.size())
        callbacks = [
            Kill(),
            # hvd: keep the place in the training, commit it, and have fit continue there; in this order.
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
        ]
        size = len(images) // hvd.size() * hvd.size()  # as many batches on all ranks
        options = {"batch_size": args.batch_size, "verbose": 2 if hvd.rank() == 0 else 0, "callbacks": callbacks}
        options |= {"initial_epoch": state.epoch, "epochs": args.epochs}
        # hvd: in the same order each time, so that fit continues behind the batches that are committed
        model.fit(images[:size][mine], targets[:size][mine], shuffle=False, **options)

    is_first = True

    def note_reset() -> None:
        nonlocal is_first
        is_first = False

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    state.register_reset_callbacks([note_reset])
    train(state)
    if hvd.rank() == 0:
        _, accuracy = model.evaluate(test, test_targets, verbose=0)
        print(f"test accuracy {accuracy:.1%}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
