"""Keras's ``model.fit`` of a transformer on all ranks: alone, under hvdkit, Horovod and tf.distribute.

    python benchmarks/keras_fit.py
    python benchmarks/keras_fit.py --rounds 1 --steps 5         # a quick look

"alone" is the same fit on all ranks at once without communication. "one process" is the same fit on one rank, while the
other core is idle. Each peer runs in its own job, once a round. A job of hvdkit fails if its ranks do not hold the same
weights at the end. If a peer cannot run at all, the script prints the reason. On TensorFlow the script also times an
eager allreduce of 4 KB, and the cost of one more part of the gradients in a graph, besides the copy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
from typing import Any

import common
import jobs
import numpy as np
from jobs import Peer

sys.path.insert(0, str(jobs.ROOT / "examples"))

ALONE, ONE = "alone", "one process"
PARTS = 40  # of the graph whose parts are timed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="model.fit", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    common.add_common_flags(parser, rounds=3)
    parser.add_argument("--steps", type=int, default=12, help="timed steps per round")
    parser.add_argument("--warmup-steps", type=int, default=4, help="steps per round before the timed ones")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=6, help="blocks")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    parser.add_argument("--backend", choices=["tensorflow", "torch"], default="tensorflow", help=argparse.SUPPRESS)
    return common.parse(parser)


def reason(printed: str) -> str:
    """Return the last exception in the output of a job, else its last line, which may be the launcher's."""
    lines = printed.strip().splitlines()
    exceptions = [line for line in lines if re.search(r"^(\[\d+\]<stderr>: ?)?[\w.]+(Error|Exception)\b", line)]
    return (exceptions or lines)[-1]


def contestants() -> list[Peer]:
    """Return the peers. Ranks of hvdkit share memory, above MPI on TensorFlow and above Gloo on PyTorch."""
    torch = ("--backend", "torch")
    return [
        Peer(ONE, "alone", "mpi"),
        Peer(ALONE, "alone", "mpi"),
        Peer("hvdkit", "hvdkit", "mpi"),
        Peer(f"{ONE}, torch", "alone", "gloo", torch),
        Peer(f"{ALONE}, torch", "alone", "gloo", torch),
        Peer("hvdkit, torch", "hvdkit", "gloo", torch),
        Peer("Horovod", "horovod", "gloo"),
        Peer("tf.distribute", "tf.distribute", "plain"),
    ]


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs, then the table."""
    names = ("steps", "warmup_steps", "batch_size", "context", "layers", "width", "threads")
    flags = [word for name in names for word in (f"--{name.replace('_', '-')}", getattr(args, name))]

    def job(peer: Peer) -> dict[str, Any]:
        ranks = 1 if peer.name.startswith(ONE) else args.ranks
        reports = jobs.run_job(__file__, peer, flags, ranks, args.threads, args.timeout)
        if peer.worker == "hvdkit" and len({one["weights"] for one in reports}) != 1:
            raise RuntimeError(f"{peer.name}: ranks hold different weights")
        ms = 1e3 * np.array([one["seconds"] for one in reports]).max(axis=0)
        return {**reports[0], "ms": float(np.median(ms))}

    rounds, errors = common.run_rounds(common.chosen(contestants(), args.peers), args.rounds, job)
    times = [{name: one["ms"] for name, one in turn.items()} for turn in rounds]
    rows = []
    for name in times[0]:
        suffix = ", torch" if name.endswith(", torch") else ""
        ratios = [common.paired_ratio(times, other + suffix, name) for other in (ALONE, ONE)]
        micro = [turn[name].get("micro") for turn in rounds]
        rows.append(
            [
                name,
                f"{np.median([turn[name] for turn in times]):.0f}",
                *map(common.show_ratio, ratios),
                *(
                    f"{np.median([one[key] for one in micro if one]):.3f}" if any(micro) else "-"
                    for key in ("eager_4kb_ms", "graph_part_ms")
                ),
            ]
        )
    headers = ["fit", "ms a step", "alone / it", "one process / it", "eager 4 KB, ms", "part in a graph, ms"]
    print(common.table(headers, rows))
    reasons = {name: reason(error) for name, error in errors.items()}
    for name, line in reasons.items():
        print(f"{name}: does not run: {line}")
    common.save("keras_fit", args, {"rounds": rounds, "errors": reasons}, draw(times))
    common.finish(errors)


def draw(times: list[dict[str, float]]) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(7, 4))
    names = list(times[0])
    axes.barh(names, [np.median([one[name] for one in times]) for name in names], color=[*map(common.colour, names)])
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.set_title("Keras: model.fit of a transformer, 2 ranks")
    return figure


def work(args: argparse.Namespace) -> None:
    """Run the fit on a rank, and report the seconds of its steps and a fingerprint of the weights."""
    os.environ.update(KERAS_BACKEND=args.backend, TF_CPP_MIN_LOG_LEVEL="2")
    if args.worker == "tf.distribute":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        port = int(os.environ["MASTER_PORT"])
        workers = [f"127.0.0.1:{port + number}" for number in range(size)]
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    if args.backend == "torch":
        import torch

        torch.set_num_threads(args.threads)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(args.threads)
        tf.config.threading.set_inter_op_parallelism_threads(args.threads)  # 0 would take both cores
    import keras
    from keras_text import ByteTransformer

    strategy = None
    if args.worker == "tf.distribute":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()  # before any operation of TensorFlow
    keras.utils.set_random_seed(42)
    optimizer = keras.optimizers.AdamW(1e-4)
    callbacks: list[Any] = []
    hvd = None
    if strategy is None:
        hvd = importlib.import_module("horovod.keras" if args.worker == "horovod" else "hvdkit.keras")
        hvd.init()
        rank = hvd.rank()
        if args.worker != "alone":
            optimizer = hvd.DistributedOptimizer(optimizer)
            callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))

    class Clock(keras.callbacks.Callback):
        """The times at which the steps were over."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if args.worker == "alone" and len(self.times) == args.warmup_steps:
                hvd.allreduce(np.zeros(1), name="all ranks compute at the same time from here on")
            self.times.append(time.perf_counter())

    def fit() -> tuple[Any, Clock]:
        clock = Clock()
        model = ByteTransformer(args.context, args.layers, args.width)
        model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        numbers = np.random.default_rng(rank)
        steps = args.warmup_steps + args.steps + 1
        x = numbers.integers(0, 256, size=(args.batch_size * steps, args.context), dtype=np.int32)
        model.fit(x, np.roll(x, -1, 1), batch_size=args.batch_size, verbose=0, callbacks=[*callbacks, clock])
        return model, clock

    if strategy is None:
        model, clock = fit()
    else:
        with strategy.scope():
            model, clock = fit()
    weights = sum(float(np.sum(keras.ops.convert_to_numpy(one), dtype=np.float64)) for one in model.trainable_weights)
    report = {
        "seconds": np.diff(clock.times[args.warmup_steps :]).tolist(),
        "weights": weights,
        "parameters": model.count_params(),
    }
    if args.worker == "hvdkit" and args.backend == "tensorflow":
        report["micro"] = micro()
    jobs.report(args.report, rank, report)
    if hvd is not None:
        hvd.shutdown()


def micro() -> dict[str, float]:
    """Return the milliseconds of an eager allreduce of 4 KB, and of one more part of a graph's gradients."""
    import tensorflow as tf

    import hvdkit.tensorflow as hvd
    from hvdkit.tensorflow import gradient_planned

    def median_ms(step: Any, count: int = 200) -> float:
        for _ in range(10):
            step()
        times = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return 1e3 * float(np.median(times))

    tensor = tf.ones(1024)
    eager = median_ms(lambda: hvd.allreduce(tensor, name="small"))
    usual, took = gradient_planned.PART_BYTES, {}
    for nbytes in (usual, 1):
        gradient_planned.PART_BYTES = nbytes
        variables = [tf.Variable(tf.ones(256)) for _ in range(PARTS)]

        @tf.function
        def step(variables: Any = variables) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variable * variable) for variable in variables])
            return hvd.DistributedGradientTape(tape).gradient(loss, variables)

        took[nbytes] = median_ms(step)
    gradient_planned.PART_BYTES = usual
    return {"eager_4kb_ms": eager, "graph_part_ms": (took[1] - took[usual]) / (PARTS - 1), "graph_ms": took[usual]}


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
