"""A script for Horovod, after its documentation: it knows nothing of hvdkit."""

import sys

import tensorflow as tf
from sklearn.datasets import load_digits

if sys.argv[1:] == ["horovod.keras"]:
    import horovod.keras as hvd
else:
    import horovod.tensorflow.keras as hvd
    from horovod.tensorflow.keras.callbacks import MetricAverageCallback

    assert MetricAverageCallback is hvd.callbacks.MetricAverageCallback

hvd.init()
images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices((tf.cast(images / 16, tf.float32), tf.cast(labels, tf.int64)))
dataset = dataset.repeat().shuffle(2000, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((64,)),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
scaled_lr = 0.001 * hvd.size()
opt = hvd.DistributedOptimizer(
    tf.keras.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]
verbose = 2 if hvd.rank() == 0 else 0
history = model.fit(dataset, steps_per_epoch=30 // hvd.size(), callbacks=callbacks, epochs=3, verbose=verbose)

average = history.history["loss"][-1]
weights = hvd.allgather_object([variable.numpy().tobytes() for variable in model.variables])
same = all(other == weights[0] for other in weights)
if hvd.rank() == 0:
    print(f"done: {hvd.size()} workers, loss {average:.3f}, same weights: {same}")
