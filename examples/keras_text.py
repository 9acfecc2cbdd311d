"""Train a byte-level transformer language model with Keras on the source code of Python's own standard library.

    python examples/keras_text.py --steps 50                       # alone
    hvdkitrun -np 2 python examples/keras_text.py                  # on two processes
    KERAS_BACKEND=torch hvdkitrun -np 2 python examples/keras_text.py       # with PyTorch below Keras
    hvdkitrun -np 2 python examples/keras_text.py --compression int8    # a quarter of the bytes between hosts

Nothing is downloaded: every Python has its standard library. At the defaults the model has 20.7 million parameters.
Every few steps rank 0 reports the throughput of all ranks, the loss, the bytes that a rank sent and how long it waited
for communication. What makes the script distributed is marked with "hvd:". Needs: pip install '.[tensorflow]' in
a checkout, or '.[torch]' and keras.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from tqdm import tqdm

import hvdkit.keras as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Byte-level language model on Python's standard library",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per process and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=512, help="width of the model; a multiple of --heads")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate, reached after the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=20, help="steps over which the learning rate grows")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the averaged gradient")
    codecs = ["none", "fp16", "bf16", "int8", "onebit", "topk", "powersgd"]
    parser.add_argument("--compression", choices=codecs, default="none", help="gradients on the wire, between hosts")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="read no more source code than this")
    parser.add_argument("--report-every", type=int, default=10, help="steps between two reports")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the choice of sequences")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process")
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


def normal() -> keras.initializers.Initializer:
    """Each layer needs one of its own: the same one would give all layers the same weights."""
    return keras.initializers.RandomNormal(stddev=0.02)


class Block(layers.Layer):
    """Causal self-attention and a gated dense layer (SwiGLU, Shazeer 2020), each normalised first and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = layers.LayerNormalization(center=False)
        self.attention = layers.MultiHeadAttention(heads, width // heads, use_bias=False, kernel_initializer=normal())
        self.dense_norm = layers.LayerNormalization(center=False)
        self.up = layers.Dense(6 * width, use_bias=False, kernel_initializer=normal())
        self.down = layers.Dense(width, use_bias=False, kernel_initializer=normal())

    def call(self, x: Any) -> Any:
        normalised = self.attention_norm(x)
        x = x + self.attention(normalised, normalised, use_causal_mask=True)
        gate, value = ops.split(self.up(self.dense_norm(x)), 2, axis=-1)
        return x + self.down(ops.silu(gate) * value)


class ByteTransformer(keras.Model):
    """Predicts the next byte: [batch, context] bytes in, [batch, context, 256] logits out."""

    def __init__(self, context: int = 128, depth: int = 6, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.embedding = layers.Embedding(256, width, embeddings_initializer=normal())
        self.position = self.add_weight(shape=(context, width), initializer="zeros", name="position")
        self.blocks = [Block(width, heads) for _ in range(depth)]
        self.norm = layers.LayerNormalization(center=False)

    def call(self, tokens: Any) -> Any:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return ops.matmul(self.norm(x), ops.transpose(self.embedding.embeddings))


def load_sources(max_bytes: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The standard library as two flat arrays of at least ``least`` bytes: a tenth of the files is for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "dist-packages"} & set(path.parts)]
    train, validation = bytearray(), bytearray()
    for number, path in enumerate(files):
        (validation if number % 10 == 1 else train).extend(path.read_bytes())
        if len(train) + len(validation) >= max_bytes:
            break
    if min(len(train), len(validation)) < least:
        raise SystemExit(f"--max-bytes {max_bytes} is too little text")
    return np.frombuffer(train, dtype=np.uint8), np.frombuffer(validation, dtype=np.uint8)


def draw(data: np.ndarray, batch: int, context: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[batch, context] bytes from random places, and for each of them the next one."""
    starts = generator.integers(len(data) - context, size=(batch, 1))
    sequences = data[starts + np.arange(context + 1)].astype(np.int32)
    return sequences[:, :-1], sequences[:, 1:]


def draw_forever(data: np.ndarray, args: argparse.Namespace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches to train on, other ones on each rank."""
    generator = np.random.default_rng(args.seed + hvd.rank())
    while True:
        yield draw(data, args.batch_size, args.context, generator)


def make_optimizer(args: argparse.Namespace) -> keras.optimizers.Optimizer:
    """AdamW with a linear warm-up, then a cosine down to a tenth."""
    rate = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=args.lr / max(args.warmup_steps, 1),
        warmup_target=args.lr,
        warmup_steps=args.warmup_steps,
        decay_steps=max(args.steps - args.warmup_steps, 1),
        alpha=0.1,
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, beta_1=0.9, beta_2=0.95, global_clipnorm=args.clip)
    # hvd: average the gradients of all ranks, before they are clipped.
    return hvd.DistributedOptimizer(optimizer, compression=getattr(hvd.Compression, args.compression))


class Report(keras.callbacks.Callback):
    """What rank 0 says about the steps since the last report; all ranks have one, since it averages over them."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.steps, self.every = args.steps, args.report_every
        self.tokens_per_step = args.batch_size * args.context * hvd.size()

    def start(self) -> None:
        self.reported = self.step
        self.before = hvd.communication_stats()
        self.began = time.perf_counter()
        self.model.reset_metrics()  # Keras' loss is the mean over the steps since this

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self.bar = tqdm(total=self.steps, desc="training", unit="step", disable=hvd.rank() != 0)
        self.step = 0
        self.start()

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        self.step += 1
        self.bar.update()
        if self.step % self.every == 0 or self.step == self.steps:
            line = self.line(logs["loss"])
            if hvd.rank() == 0:
                self.bar.write(line)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.bar.close()

    def line(self, loss: float) -> str:
        seconds = time.perf_counter() - self.began
        now, steps = hvd.communication_stats(), self.step - self.reported
        sent, waited = now.bytes_sent - self.before.bytes_sent, now.seconds - self.before.seconds
        # hvd: the mean over the ranks of the loss, of the bytes that one of them sent and of the time that it waited.
        mean = hvd.allreduce(np.array([loss, sent, waited, seconds], dtype=np.float64), name="report")
        loss, sent, waited, seconds = ops.convert_to_numpy(mean).tolist()
        self.start()
        return (
            f"step {self.step}: loss {loss:.3f}, {steps * self.tokens_per_step / seconds:,.0f} tokens/s, "
            f"{sent / steps / 1e6:.1f} MB sent per rank and step, "
            f"{waited / steps * 1e3:.0f} of {seconds / steps * 1e3:.0f} ms per step waiting for communication"
        )


def validate(model: keras.Model, data: np.ndarray, args: argparse.Namespace) -> float:
    """Loss on files that were not trained on, each rank on other sequences, averaged over them."""
    generator = np.random.default_rng(args.seed + hvd.rank())
    loss = model.evaluate(*draw(data, 4 * args.batch_size, args.context, generator), args.batch_size, verbose=0)
    return float(hvd.allreduce(loss, name="validation_loss"))


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvd: find the other ranks
    first = hvd.rank() == 0
    take_resources(args.threads)
    keras.utils.set_random_seed(args.seed)

    train, validation = load_sources(args.max_bytes, least=2 * args.context * hvd.size())
    # hvd: every rank trains on its own part of the text.
    share = train[len(train) * hvd.rank() // hvd.size() : len(train) * (hvd.rank() + 1) // hvd.size()]

    model = ByteTransformer(args.context, args.layers, args.width, args.heads)
    model(np.zeros((1, args.context), dtype=np.int32))  # makes the weights
    model.compile(make_optimizer(args), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if first:
        millions = model.count_params() / 1e6
        print(f"{millions:.1f} M parameters, {len(train) / 1e6:.1f} MB of source code, {hvd.size()} process(es)")

    # hvd: everyone starts from rank 0's weights.
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Report(args)]
    model.fit(draw_forever(share, args), steps_per_epoch=args.steps, callbacks=callbacks, verbose=0, shuffle=False)

    loss = validate(model, validation, args)
    if first:
        print(f"validation loss {loss:.3f} nats per byte ({loss / math.log(2):.2f} bits)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
