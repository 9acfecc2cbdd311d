"""Time until the others train on after one of four ranks was killed: hvdkit, Horovod, torchrun and torchft, in turn.

    python benchmarks/elastic.py
    python benchmarks/elastic.py --rounds 1 --peers hvdkit torchrun        # a quick look

Each job is like a user's: hvdkitrun, horovodrun or torchrun starts 4 processes of this script, which train a
transformer of 20.5 M parameters; torchft has a lighthouse and 4 replicas. The script kills one process within a
step. The time ends when the last of the processes that train on begins its first step without the lost process
(torchrun: its first step after the restart of all processes). The time includes the rest of the step that was being
computed; the table also gives the usual length of a step. Horovod closes the whole host of a lost rank. So its four
ranks are on two hosts, of one rank and of three ranks (both are this machine), and the single rank dies. Horovod
commits in each step, as hvdkit does. torchrun saves no checkpoint and torchft no data: the figures flatter both. Peers
that are not installed are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from jobs import ROOT, Peer

RANKS, FATAL_STEP, DEADLINE_SECONDS = 4, 12, 120.0
PEERS = [Peer(name, name, "") for name in ("hvdkit", "Horovod", "torchrun", "torchft")]


class Record:
    """The file of a process's steps, with a line each: when it began, the rank, the number of ranks, the attempt."""

    def __init__(self, folder: str) -> None:
        self._file = open(Path(folder) / f"{os.getpid()}.steps", "w", buffering=1)  # noqa: SIM115 (until the end)

    def step(self, rank: int, size: int, attempt: int = 0, began: float | None = None) -> None:
        print(began or time.monotonic(), rank, size, attempt, file=self._file)


def workload() -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return a model, its optimizer, and a function that computes the loss of the model or of a wrapper of it."""
    import torch
    from models import VOCABULARY, WordTransformer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, words = WordTransformer(), torch.randint(0, VOCABULARY, (1, 16))

    def loss(module: Any) -> Any:
        return torch.nn.functional.cross_entropy(module(words).flatten(0, 1), words.flatten())

    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), loss


def train_horovod(record: Record, hvd: Any) -> None:
    """Train with hvdkit or with Horovod, whose scripts are the same."""
    hvd.init()
    model, inner, loss = workload()
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            record.step(hvd.rank(), hvd.size())
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer))


def train_torchrun(record: Record) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model, optimizer, loss = workload()
    wrapped = DistributedDataParallel(model)
    while True:
        record.step(dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()


def train_torchft(record: Record, number: int) -> None:
    from datetime import timedelta

    import torchft
    from torch.distributed import TCPStore
    from torchft.ddp import PureDistributedDataParallel

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, inner, loss = workload()
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2, replica_id=f"replica_{number}", rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    # torchft's other wrapper, a DistributedDataParallel, ends with an assertion when a replica is lost.
    wrapped, optimizer = PureDistributedDataParallel(manager, model), torchft.Optimizer(manager, inner)
    while True:
        began = time.monotonic()
        optimizer.zero_grad()
        loss(wrapped).backward()
        size = manager.num_participants()  # of the quorum, which is known now
        optimizer.step()
        record.step(number, size, began=began)


def run_worker(name: str, folder: str, number: int) -> None:
    record = Record(folder)
    if name == "hvdkit":
        import hvdkit.torch as hvd

        train_horovod(record, hvd)
    elif name == "Horovod":
        import horovod.torch as horovod

        train_horovod(record, horovod)
    elif name == "torchrun":
        train_torchrun(record)
    else:
        train_torchft(record, number)


def command_of(name: str, folder: Path) -> list[list[str]]:
    """Return the commands that start a job."""
    worker = [__file__, "--worker", name, "--folder", str(folder)]
    if name == "hvdkit":
        return [[sys.executable, "-m", "hvdkit.launch", "-np", "4", "--min-np", "2", sys.executable, *worker]]
    if name == "torchrun":
        flags = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "3"]
        return [[sys.executable, "-m", "torch.distributed.run", *flags, *worker]]
    if name == "Horovod":
        script = folder / "hosts.sh"
        script.write_text("#!/bin/sh\necho localhost:3\necho 127.0.0.1:1\n")
        script.chmod(0o755)
        flags = ["--gloo", "-np", "4", "--min-np", "2", "--host-discovery-script", str(script)]
        return [[sys.executable, "-m", "horovod.runner.launch", *flags, sys.executable, *worker]]
    bin_of_python = Path(sys.executable).parent
    lighthouse = [str(bin_of_python / "torchft_lighthouse"), "--bind", "127.0.0.1:29510", "--min_replicas", "2"]
    return [lighthouse, *([sys.executable, *worker, "--number", str(number)] for number in range(RANKS))]


def steps_in(folder: Path) -> dict[int, list[list[float]]]:
    """Return the steps of each process: the time when a step began, the rank, the number of ranks, and the attempt."""
    files = {int(path.stem): path.read_text().splitlines() for path in folder.glob("*.steps")}
    return {process: [[float(word) for word in line.split()] for line in lines] for process, lines in files.items()}


def victim_of(name: str, steps: dict[int, list[list[float]]]) -> int | None:
    """Return the process to kill, once all have trained for some steps: for Horovod the single process of a host."""
    if len(steps) < RANKS or any(len(of_one) < FATAL_STEP for of_one in steps.values()):
        return None
    last = 3 if name == "Horovod" else 1
    return next((process for process, of_one in steps.items() if of_one[-1][1] == last), None)


def wait_for(look: Callable[[], Any], folder: Path) -> Any:
    until = time.monotonic() + DEADLINE_SECONDS
    while (found := look()) is None:
        if time.monotonic() > until:
            raise RuntimeError(f"no progress: {(folder / 'output').read_text()[-2000:]}")
        time.sleep(0.01)
    return found


def time_of_a_kill(peer: Peer) -> dict[str, float]:
    """Run a job, kill one of its processes, and return the seconds until the others go on, and of a usual step."""
    folder = Path(tempfile.mkdtemp())
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
        "TORCHFT_LIGHTHOUSE": "http://127.0.0.1:29510",
        # Otherwise Gloo finds the addresses of the attempt before, and torchrun needs several restarts.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    with open(folder / "output", "wb") as output:
        jobs_of_peer = [
            subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            for command in command_of(peer.name, folder)
        ]
        try:
            victim = wait_for(lambda: victim_of(peer.name, steps_in(folder)), folder)
            before = steps_in(folder)
            pauses = [
                later[0] - step[0] for of_one in before.values() for step, later in itertools.pairwise(of_one[5:])
            ]
            os.kill(victim, signal.SIGKILL)
            killed_at = time.monotonic()

            def gone_on() -> float | None:
                firsts = [
                    next((step[0] for step in of_one if step[0] > killed_at and (step[2] == 3 or step[3] == 1)), None)
                    for process, of_one in steps_in(folder).items()
                    if process != victim and (peer.name != "torchrun" or process not in before)
                ]
                enough = len(firsts) == (RANKS if peer.name == "torchrun" else RANKS - 1)
                return max(firsts) if enough and None not in firsts else None

            return {"seconds": wait_for(gone_on, folder) - killed_at, "step": statistics.median(pauses)}
        finally:
            for job in reversed(jobs_of_peer):
                job.terminate()
            for job in jobs_of_peer:
                try:
                    job.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
            for process in steps_in(folder):
                if Path(f"/proc/{process}").exists():
                    os.kill(process, signal.SIGKILL)


def plot(figures: dict[str, dict[str, float]]) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.4))
    names = sorted(figures, key=lambda name: -figures[name]["median"])
    bars = axes.barh(names, [figures[name]["median"] for name in names], color=[common.colour(name) for name in names])
    axes.bar_label(bars, fmt="%.2f s", padding=4)
    axes.margins(x=0.12)
    axes.set_xlabel("from SIGKILL of one of 4 ranks to the others' next step, median")
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_flags(parser, rounds=5, ranks=False)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    args = common.parse(parser)
    if args.worker:
        run_worker(args.worker, args.folder, args.number)
    here = [
        peer for peer in PEERS if peer.name in ("hvdkit", "torchrun") or importlib.util.find_spec(peer.name.lower())
    ]
    rounds, errors = common.run_rounds(common.chosen(here, args.peers), args.rounds, time_of_a_kill)
    names = list(rounds[0])
    figures = {name: common.spread(one[name]["seconds"] for one in rounds) for name in names}
    steps = {name: statistics.median(one[name]["step"] for one in rounds) for name in names}
    rows = [
        [
            name,
            f"{figures[name]['median']:.3f}",
            f"{max(one[name]['seconds'] for one in rounds):.3f}",
            f"{steps[name]:.3f}",
        ]
        for name in names
    ]
    print(common.table(["", "median, s", "worst, s", "a usual step, s"], rows))
    common.save("elastic", args, {"unit": "s", "rounds": rounds, "figures": figures}, plot(figures))
    common.finish(errors)


if __name__ == "__main__":
    main()
