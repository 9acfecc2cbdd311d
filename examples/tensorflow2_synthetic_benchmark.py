"""How many images per second does a model of keras.applications train on? The data are random, so nothing but speed is
measured.

    python examples/tensorflow2_synthetic_benchmark.py
    hvdkitrun -np 2 python examples/tensorflow2_synthetic_benchmark.py --model ResNet50
    hvdkitrun -np 2 python examples/tensorflow2_synthetic_benchmark.py --fp16-allreduce

Options and report are those of Horovod's script of the same name, so its figures can be compared line by line; the
model is by default a smaller one, which a CPU has figures of soon. Uses the GPU of the local rank where there is one.
Needs: pip install '.[tensorflow,examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import statistics
import time

import tensorflow as tf
from tqdm import tqdm

import hvdkit.tensorflow as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    model = "model to train: any of keras.applications, such as ResNet50"
    parser.add_argument("--model", default="MobileNetV3Small", help=model)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of an image in pixels")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches that are not timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches per measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--eager", action="store_true", help="run operation by operation, not as a graph")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients with 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients with Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--threads", type=int, default=0, help="compute threads per process; 0: as TensorFlow chooses")
    args = parser.parse_args()
    if not callable(getattr(tf.keras.applications, args.model, None)):
        models = [name for name in dir(tf.keras.applications) if callable(getattr(tf.keras.applications, name))]
        parser.error(f"argument --model: {args.model!r} is none of {', '.join(models)}")
    return args


def take_resources(args: argparse.Namespace) -> str:
    """Set the number of compute threads and take the GPU of this process. Returns what it computes on."""
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    gpus = [] if args.no_cuda else tf.config.list_physical_devices("GPU")
    mine = gpus[hvd.local_rank() : hvd.local_rank() + 1]
    tf.config.set_visible_devices(mine, "GPU")
    for gpu in mine:
        tf.config.experimental.set_memory_growth(gpu, True)
    return "GPU" if gpus else "CPU"


def main() -> None:
    args = parse_arguments()
    hvd.init()
    first = hvd.rank() == 0
    kind = take_resources(args)
    tf.keras.utils.set_random_seed(42 + hvd.rank())

    shape = (args.image_size, args.image_size, 3)
    model = getattr(tf.keras.applications, args.model)(weights=None, input_shape=shape)
    # Adasum scales by itself; an average asks for a learning rate that grows with the number of ranks.
    optimizer = tf.keras.optimizers.SGD(0.01 * (1 if args.use_adasum else hvd.size()))
    optimizer.build(model.trainable_variables)
    cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy()
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    data = tf.random.uniform((args.batch_size, *shape))
    target = tf.random.uniform((args.batch_size,), maxval=1000, dtype=tf.int64)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = cross_entropy(target, model(data, training=True))
        tape = hvd.DistributedGradientTape(
            tape,
            compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
            op=hvd.Adasum if args.use_adasum else hvd.Average,
        )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if not args.eager:
        step = tf.function(step)

    def train_batches(count: int) -> float:
        """Train ``count`` batches. Returns images per second of this rank."""
        began = time.perf_counter()
        for _ in range(count):
            step()
            bar.update()
        optimizer.iterations.numpy()  # waits for a GPU
        return args.batch_size * count / (time.perf_counter() - began)

    batches = args.num_warmup_batches + args.num_iters * args.num_batches_per_iter
    with tqdm(total=batches, unit="batch", disable=not first) as bar:

        def log(line: str) -> None:
            if first:
                bar.write(line)

        log(f"Model: {args.model}")
        log(f"Batch size: {args.batch_size}")
        log(f"Number of {kind}s: {hvd.size()}")
        log("Running warmup...")
        train_batches(args.num_warmup_batches)
        log("Running benchmark...")
        speeds = []
        for iteration in range(args.num_iters):
            speeds.append(train_batches(args.num_batches_per_iter))
            log(f"Iter #{iteration}: {speeds[-1]:.1f} img/sec per {kind}")
        mean, margin = statistics.fmean(speeds), 1.96 * statistics.pstdev(speeds)
        log(f"Img/sec per {kind}: {mean:.1f} +-{margin:.1f}")
        log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * margin:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
