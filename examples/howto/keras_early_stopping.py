"""Keras's EarlyStopping after MetricAverageCallback: all ranks stop after the same epoch."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.keras as hvd

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
images = pixels.astype(np.float32) / 16
# Equal shares of training and of validation images: MetricAverageCallback takes the mean of the ranks' means.
train, test = slice(hvd.rank(), 256, hvd.size()), slice(256 + hvd.rank(), 1792, hvd.size())

model = keras.Sequential([layers.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.02))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

history = model.fit(
    images[train],
    digits[train],
    batch_size=256 // hvd.size(),
    shuffle=False,  # so that one process prints the same; in real training, shuffle
    epochs=200,
    validation_data=(images[test], digits[test]),
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        # After MetricAverageCallback, and on every rank: before it, a rank would stop by its own val_loss while the
        # others wait for it.
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
    ],
    verbose=0,
).history

epochs = hvd.allgather_object(len(history["val_loss"]))
if hvd.rank() == 0:
    assert len(set(epochs)) == 1, epochs
    print(f"stopped after epoch {epochs[0]}, best val_loss {min(history['val_loss']):.6f}, on {hvd.size()} rank(s)")
