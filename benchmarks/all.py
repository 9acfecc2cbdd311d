"""Measure all figures of the documentation anew, then write its tables and its chart.

    sudo .venv/bin/python benchmarks/all.py                         # two hours on 2 cores
    sudo .venv/bin/python benchmarks/all.py beside two_hosts        # only these parts
    .venv/bin/python benchmarks/all.py --list                       # the parts, and the commands that measure them

Each part is one script of this folder, which runs hvdkit and its peers in alternating rounds. Parts that need two hosts
need root. Horovod and torchft take part where they are installed. A part that fails keeps its former results; the other
parts run all the same, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jobs

FOLDER = Path(__file__).resolve().parent
WORDS = ("--model", "words", "--layers", "8", "--width", "384", "--context", "64")  # 20.5 M parameters, SGD


def parts() -> dict[str, list[str]]:
    """Return the script and the flags of each part, in the order in which the parts run."""
    horovod = [f"Horovod {engine}" for engine in jobs.horovod_engines()]
    on_horovod = [peer.name for peer in jobs.on_horovod()]
    own = (["hvdkit mpi"] if jobs.has_mpi() else []) + ["hvdkit torch"]
    gradients = ["alone", "DDP", "DDP fp16", "hvdkit under DDP", *own, *(f"{name} fp16" for name in own)]
    codecs = [f"{own[0]} {codec}" for codec in ("int8", "topk", "powersgd")]
    horovod_by_mpi = [name for name in horovod if name.endswith(" mpi")]  # its other launcher reaches hosts by ssh only
    raw = ["Gloo", *(["mpi4py", "mpi4py 2 links"] if jobs.has_mpi() else [])]
    losses = ["DDP", "DDP fp16", "DDP PowerSGD", *(f"hvdkit {name}" for name in ("fp16", "int8", "topk", "powersgd"))]
    return {
        "beside": ["beside.py", "--rounds", "1", "--blocks", "10", "--peers", *own],
        "step": [
            *("step.py", "--rounds", "3", "--models", "transformer", "convolution"),
            *("--peers", "alone", "DDP", *own, *horovod, *on_horovod),
        ],
        "two_hosts": [
            *("two_hosts.py", "--rounds", "2", *WORDS, "--warmup-steps", "11", "--steps", "8"),
            *("--peers", *gradients, *codecs, f"{own[-1]} topk", *horovod_by_mpi, *raw),
        ],
        "allreduce": ["allreduce.py", "--rounds", "3"],
        "compression": ["compression.py", "--rounds", "9", "--settle", "30", "--kinds", "normal"],
        "keras_fit": ["keras_fit.py", "--rounds", "2"],
        "distributed": ["distributed.py", "--rounds", "24"],
        "idle": ["idle.py", "--rounds", "2", "--seconds", "5"],
        "memory": ["memory.py", "--rounds", "1"],
        "overhead": ["overhead.py", "--seconds", "40"],
        "many_ranks": ["many_ranks.py", "--rounds", "1"],
        "coordinator": ["coordinator.py"],
        "elastic": ["elastic.py", "--rounds", "7"],
        "generations": ["generations.py"],
        "accuracy": ["accuracy.py", "--rounds", "3"],
        "time_to_loss": [
            *("time_to_loss.py", "--steps", "60", "--evaluate-every", "4", "--batch-size", "1"),
            *("--held-out", "16", "--warmup-steps", "10", "--peers", *losses),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    known = parts()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(known)}; by default all")
    parser.add_argument("--list", action="store_true", help="print the commands and measure nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; the parts are {', '.join(known)}")
    chosen = arguments.parts or list(known)
    failed, began = [], time.monotonic()
    for number, name in enumerate(chosen, 1):
        command = [sys.executable, str(FOLDER / known[name][0]), *known[name][1:]]
        if arguments.list:
            print(shlex.join(["python", f"benchmarks/{known[name][0]}", *known[name][1:]]))
            continue
        minutes = (time.monotonic() - began) / 60
        print(f"\nall.py: part {number} of {len(chosen)}: {name}, after {minutes:.0f} min", flush=True)
        if subprocess.run(command, cwd=jobs.ROOT, check=False).returncode:
            failed.append(name)
    if not arguments.list:
        for command in ([sys.executable, "-m", "docs.hooks.figures"], [sys.executable, "docs/pictures/step.py"]):
            subprocess.run(command, cwd=jobs.ROOT, check=True)
        print(f"all.py: wrote the pages, after {(time.monotonic() - began) / 60:.0f} min")
    if failed:
        raise SystemExit(f"all.py: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
