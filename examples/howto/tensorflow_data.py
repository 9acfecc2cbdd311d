"""tf.data: each rank reads its own part of each epoch, and all take equally many steps."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import hvdkit.keras as hvd

BATCH, EPOCHS = 128, 3  # images of all ranks together

hvd.init()
# One seed for all ranks: shuffle() mixes it with its own seed, so different seeds would make the parts overlap.
keras.utils.set_random_seed(0)

pixels, digits = load_digits(return_X_y=True)
images = pixels.astype(np.float32) / 16
# 1797 images are 14 whole batches and 5 more images, which could give one rank a batch more than the others.
steps = len(images) // BATCH

dataset = tf.data.Dataset.from_tensor_slices((images, digits))
# Shuffled before shard(): all ranks have the same order, a new one in each epoch, and take every size()-th image.
dataset = dataset.shuffle(len(images), seed=1).shard(hvd.size(), hvd.rank())
dataset = dataset.batch(BATCH // hvd.size(), drop_remainder=True).take(steps)
dataset = dataset.repeat()  # after take(), so that the next epoch is shuffled anew
dataset = dataset.prefetch(tf.data.AUTOTUNE)

model = keras.Sequential([layers.Input((64,)), layers.Dense(32, activation="relu"), layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(
    dataset,
    shuffle=False,  # tf.data has shuffled already
    steps_per_epoch=steps,  # this ends the epoch, not the end of a rank's data
    epochs=EPOCHS,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    verbose=0,
).history

if hvd.rank() == 0:
    losses = " ".join(f"{loss:.6f}" for loss in history["loss"])
    print(f"{steps} steps an epoch, losses {losses}, on {hvd.size()} rank(s)")
