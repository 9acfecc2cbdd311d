"""A learning rate that grows with the number of ranks, reached by LearningRateWarmupCallback."""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.keras as hvd

RATE, WARMUP_EPOCHS = 0.05, 2  # of one process

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # different weights on each rank, until rank 0's are broadcast

pixels, digits = load_digits(return_X_y=True)
mine = slice(hvd.rank(), 1792, hvd.size())
images, labels = pixels[mine].astype(np.float32) / 16, digits[mine]

full = RATE * hvd.size()  # a step uses size() times as many images, so the rate is size() times as high
model = keras.Sequential([layers.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(full, momentum=0.9))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))

history = model.fit(
    images,
    labels,
    batch_size=64,
    epochs=6,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        # The warm-up begins at initial_lr / size() and ends at initial_lr. The rate rises with each batch: if the data
        # are a generator, pass steps_per_epoch to this callback.
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=full, warmup_epochs=WARMUP_EPOCHS),
    ],
    verbose=0,
).history

if hvd.rank() == 0:
    rates = ", ".join(f"{rate:.3f}" for rate in history["lr"])  # at the end of each epoch
    print(f"rates {rates}; loss {history['loss'][-1]:.2f}, on {hvd.size()} rank(s)")
