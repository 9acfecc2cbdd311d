"""The order of Keras's callbacks: callbacks that read metrics come after the one that averages them over all ranks."""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.keras as hvd

BATCH = 256  # of all ranks together

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
images = pixels.astype(np.float32) / 16
train, test = slice(hvd.rank(), 1280, hvd.size()), slice(1280 + hvd.rank(), 1792, hvd.size())

model = keras.Sequential([layers.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

folder = tempfile.TemporaryDirectory()
best = Path(folder.name) / "best.keras"
callbacks = [
    # First, before any callback looks at the weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Before all callbacks that read metrics. Until here, val_loss is that of this rank's images.
    hvd.callbacks.MetricAverageCallback(),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.02),
]
if hvd.rank() == 0:  # last, since only one rank has it; it must not call anything that waits for other ranks
    callbacks.append(keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True))

history = model.fit(
    images[train],
    digits[train],
    batch_size=BATCH // hvd.size(),
    shuffle=False,  # so that one process prints the same; in real training, shuffle
    epochs=12,
    validation_data=(images[test], digits[test]),
    callbacks=callbacks,
    verbose=0,
).history

if hvd.rank() == 0:
    rates = " ".join(f"{rate:g}" for rate in history["learning_rate"])
    kept = keras.models.load_model(best, compile=False)
    wrong = int(np.sum(np.argmax(kept.predict(images[1280:1792], verbose=0), axis=1) != digits[1280:1792]))
    print(f"rates {rates}")
    print(f"best val_loss {min(history['val_loss']):.6f}, {wrong} images wrong, on {hvd.size()} rank(s)")
folder.cleanup()
