"""A script for Horovod, after its documentation: it knows nothing of hvdkit."""

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

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
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(60 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)

average = float(hvd.allreduce(loss_value))
weights = hvd.allgather_object([variable.numpy().tobytes() for variable in model.variables])
same = all(other == weights[0] for other in weights)
if hvd.rank() == 0:
    print(f"done: {hvd.size()} workers, loss {average:.3f}, same weights: {same}")
