"""Allreduce and training step of two hosts with a wire of a known rate between them, next to the bounds of that wire.

    sudo python benchmarks/two_hosts.py
    sudo python benchmarks/two_hosts.py --gigabits 1 --rounds 1 --steps 3         # a quick look
    sudo python benchmarks/two_hosts.py --gigabits 1 --parts step --batch-size 1 --steps 20 --codecs onebit

The hosts are Linux namespaces on this machine (see namespaces.py), made anew for each job, with one rank each. "wire"
is the rate of a plain TCP connection in both directions at once. At high rates that connection alone takes a good part
of the cores, which the ranks share with it. An allreduce of n bytes sends at least 2 n (H-1) / H bytes out of each of H
hosts and as many in. The bound is the time of these bytes on the wire. For a step the bound is forward + max(backward,
wire) + optimizer, with the phases of the step alone. The allreduces are in place. "2 links" is mpi4py with two TCP
connections, for which hvdkit always asks Open MPI.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import threading
import time
from pathlib import Path
from typing import Any

import allreduce
import common
import jobs
import namespaces
import numpy as np
import training
from jobs import Peer

FOLDER = Path(__file__).resolve().parent
WIRE = Peer("wire", "wire", "plain")
HOSTS = 2
PIECE_BYTES = 4 << 20
TURNS = 4
TURN_SECONDS = 0.5
STEP_BOUNDS = ("bound", "bound fp16")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Two hosts and a wire", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=3, ranks=False)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1, 10], help="rates of the wire, in Gb/s")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host")
    parser.add_argument("--parts", nargs="+", choices=["allreduce", "step"], default=["allreduce", "step"])
    parser.add_argument(
        "--megabytes", type=float, default=100, help="fp32 numbers summed by an allreduce, in 10^6 bytes"
    )
    parser.add_argument("--calls", type=int, default=5, help="timed allreduces per round")
    parser.add_argument(
        "--codecs", nargs="*", choices=sorted(set(training.CODECS) - {"none", "fp16"}),
        default=["int8", "topk", "powersgd"], help="the step with these codecs as well as with fp16",
    )  # fmt: skip
    parser.add_argument("--model", choices=list(training.MODELS), default="transformer", help="model to train")
    parser.add_argument("--mpi-args", default="", help="more words for mpirun, e.g. '--mca btl_tcp_links 2'")
    training.add_flags(parser, steps=6)
    return common.parse(parser)


def work(args: argparse.Namespace) -> None:
    """Measure the wire on a host, while both hosts send and receive at once. Report the fastest turn and its CPU."""
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    connection = _meet(rank, address)
    turn_bytes = int(args.gigabits[0] * 1e9 / 8 * TURN_SECONDS)
    incoming, rates = memoryview(bytearray(PIECE_BYTES)), []
    for turn in range(1 + TURNS):
        connection.sendall(b"x")
        connection.recv(1)
        began, used = time.perf_counter(), time.process_time()
        sender = threading.Thread(target=_send, args=(connection, turn_bytes))
        sender.start()
        left = turn_bytes
        while left:
            left -= connection.recv_into(incoming, min(left, PIECE_BYTES))
        sender.join()
        wall = time.perf_counter() - began
        if turn:  # the first turn finds the speed
            rates.append([turn_bytes / wall, (time.process_time() - used) / wall])
    bytes_per_second, cores = max(rates)
    jobs.report(args.report, rank, {"bytes_per_second": bytes_per_second, "cores": cores})


def _meet(rank: int, address: tuple[str, int]) -> socket.socket:
    if rank == 0:
        with socket.create_server(address) as listener:
            return listener.accept()[0]
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _send(connection: socket.socket, count: int) -> None:
    outgoing = memoryview(bytes(PIECE_BYTES))
    while count:
        count -= connection.send(outgoing[: min(count, PIECE_BYTES)])


class Link:
    """Jobs on two hosts, at one rate of the wire."""

    def __init__(self, args: argparse.Namespace, gigabits: float) -> None:
        self.args = args
        self.gigabits = gigabits

    def run(self, script: str, peer: Peer, flags: list[Any]) -> list[Any]:
        """Run a job of a peer or of the wire, and return the reports of its ranks."""
        args = self.args
        ranks_per_host = 1 if peer is WIRE else args.ranks_per_host
        with namespaces.two_hosts(self.gigabits) as hosts:
            start = namespaces.starter(hosts, ranks_per_host, shlex.split(args.mpi_args))
            ranks = HOSTS * ranks_per_host
            return jobs.run_job(FOLDER / script, peer, flags, ranks, args.threads, args.timeout, start)

    def wire(self) -> dict[str, float]:
        """Return the bytes per second in the slower direction, and the cores that the wire takes of a host."""
        reports = self.run("two_hosts.py", WIRE, ["--gigabits", self.gigabits])
        slower = min(one["bytes_per_second"] for one in reports)
        return {"bytes_per_second": slower, "cores": max(one["cores"] for one in reports)}


def wire_milliseconds(count: float, wire: dict[str, float]) -> float:
    """Return the bound for an allreduce of ``count`` bytes."""
    return 1e3 * count * 2 * (HOSTS - 1) / HOSTS / wire["bytes_per_second"]


def contestants(parts: list[str], names: list[str] | None, codecs: list[str]) -> dict[str, list[Peer]]:
    """Return the peers of each part that has any: those in ``names``, or all. ``codecs`` adds peers to the step."""
    names_of_mpi = ("mpi4py", allreduce.TWO_LINKS) if jobs.has_mpi() else ()
    mpi4py = [Peer(name, name, "mpi", ("--inplace",)) for name in names_of_mpi]
    step = [peer for peer in training.contestants(codecs) if not {"--staged", "--barrier"} & set(peer.flags)]
    found = {
        "allreduce": [*jobs.horovods("", "--inplace"), Peer("Gloo", "gloo", "plain"), *mpi4py],
        "step": step,
    }
    common.chosen([peer for part in parts for peer in found[part]], names)  # exits if a name is unknown
    for peer in found["allreduce"]:
        if peer.launcher == "horovod":
            print(f"left out: {peer.name}, whose launcher reaches other hosts by ssh only")
    able = {part: [peer for peer in found[part] if peer.launcher != "horovod"] for part in parts}
    picked = {part: [peer for peer in able[part] if names is None or peer.name in names] for part in parts}
    return {part: peers for part, peers in picked.items() if peers}


def measure_allreduce(args: argparse.Namespace, link: Link, peers: list[Peer]) -> dict[str, Any]:
    """Return the milliseconds of an allreduce per peer, and its share of the wire's rate."""
    size = round(args.megabytes * 1e6) // 4 * 4
    flags = ["--threads", args.threads, "--calls", args.calls, "--smallest", size, "--largest", size]

    def job(peer: Peer) -> Any:
        if peer is WIRE:
            return link.wire()
        slowest = allreduce.slowest(link.run("allreduce.py", peer, flags))
        return [1e3 * seconds for seconds in slowest[str(size)]]

    rounds, errors = common.run_rounds([WIRE, *peers], args.rounds, job)
    _need_wire(errors)
    bounds = [wire_milliseconds(size, one[WIRE.name]) for one in rounds]
    by_round = [
        {"bound": bound} | {name: float(np.median(one[name])) for name in one if name != WIRE.name}
        for bound, one in zip(bounds, rounds, strict=True)
    ]
    summary = [
        {
            "peer": peer.name,
            "milliseconds": common.spread(value for one in rounds for value in one[peer.name]),
            "share_of_wire": common.paired_ratio(by_round, "bound", peer.name),
        }
        for peer in peers
        if peer.name not in errors
    ]
    payload = {"bound_ms": float(np.median(bounds)), "wire": [one[WIRE.name] for one in rounds]}
    return {**payload, "summary": summary, "rounds": rounds, "errors": errors}


def measure_step(args: argparse.Namespace, link: Link, peers: list[Peer]) -> dict[str, Any]:
    """Return the milliseconds of a training step per peer, and its time as a multiple of the bound for its bytes."""
    flags = training.worker_flags(args, args.model)

    def job(peer: Peer) -> Any:
        if peer is WIRE:
            return link.wire()
        return training.digest(peer, link.run("step.py", peer, flags))

    rounds, errors = common.run_rounds([WIRE, *peers], args.rounds, job)
    _need_wire(errors)
    wires = [one.pop(WIRE.name) for one in rounds]
    by_round = training.medians(rounds)
    for medians, wire, one in zip(by_round, wires, rounds, strict=True):
        if training.ALONE in one:
            medians.update(step_bounds(one[training.ALONE], wire))
    summary = training.summarise(rounds, [peer.name for peer in peers if peer.name not in errors])
    for entry in summary:
        entry["time_ratio_to_bound"] = common.paired_ratio(by_round, entry["peer"], bound_of(entry["peer"]))
    bounds = {key: float(np.median([one[key] for one in by_round])) for key in STEP_BOUNDS if key in by_round[0]}
    return {"bounds_ms": bounds, "wire": wires, "summary": summary, "rounds": rounds, "errors": errors}


def bound_of(peer: str) -> str:
    """Return the name of a peer's bound: compute alone for codecs whose bytes are too few to count."""
    if peer.endswith((" fp16", " bf16")):
        return "bound fp16"
    dense = peer in {
        training.DDP,
        training.DDP_ON_HVDKIT,
        *(horovod.name for horovod in jobs.horovods()),
    } or peer.endswith(" none")
    return "bound" if dense else training.ALONE


def step_bounds(alone: dict[str, Any], wire: dict[str, float]) -> dict[str, float]:
    """Return the least milliseconds of a step whose gradients travel in fp32 and in fp16."""
    forward, backward, optimizer = (alone["phases"][name] for name in training.PHASES)
    wires = [wire_milliseconds(alone["parameters"] * width, wire) for width in (4, 2)]
    return dict(zip(STEP_BOUNDS, [forward + max(backward, seconds) + optimizer for seconds in wires], strict=True))


def _need_wire(errors: dict[str, str]) -> None:
    if WIRE.name in errors:
        raise SystemExit(f"the wire could not be measured: {errors[WIRE.name]}")


def show(args: argparse.Namespace, gigabits: float, result: dict[str, Any]) -> None:
    """Print the tables of one rate."""
    ratios = f"ratios: median [smallest, largest] of {args.rounds} rounds"
    for part, measured in result.items():
        wire = {key: np.median([one[key] for one in measured["wire"]]) for key in measured["wire"][0]}
        carried = f"{wire['bytes_per_second'] * 8e-9:.2f} Gb/s measured with {wire['cores']:.2f} cores of each host"
        print(f"\n{part} over a wire of {gigabits:g} Gb/s, {carried}; {ratios}")
        if part == "allreduce":
            rows = [
                [
                    one["peer"],
                    f"{one['milliseconds']['median']:.0f}",
                    f"{one['milliseconds']['q1']:.0f} to {one['milliseconds']['q3']:.0f}",
                    common.show_ratio(one["share_of_wire"]),
                ]
                for one in measured["summary"]
            ]
            rows.append(["bound", f"{measured['bound_ms']:.0f}", "", "1"])
            print(common.table([f"{args.megabytes:g} MB", "ms", "quartiles", "share of the wire"], rows))
        else:
            rows = [[*training.row(one), common.show_ratio(one["time_ratio_to_bound"])] for one in measured["summary"]]
            empty = [""] * (len(training.HEADERS) - 1)
            rows += [[name, f"{value:.0f}", *empty] for name, value in measured["bounds_ms"].items()]
            print(common.table([*training.HEADERS, "time / bound"], rows))


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: for each rate, rounds of allreduces and of steps, then the tables."""
    if reason := namespaces.missing():
        raise SystemExit(f"cannot make two hosts: {reason}")
    measures = {"allreduce": measure_allreduce, "step": measure_step}
    peers = contestants(args.parts, args.peers, args.codecs)
    results, errors = {}, {}
    for gigabits in args.gigabits:
        link = Link(args, gigabits)
        results[gigabits] = {part: measures[part](args, link, some) for part, some in peers.items()}
        show(args, gigabits, results[gigabits])
        for part, measured in results[gigabits].items():
            errors.update({f"{name}, {part}, {gigabits:g} Gb/s": error for name, error in measured["errors"].items()})
    rates = [{"gigabits": gigabits, **result} for gigabits, result in results.items()]
    common.save("two_hosts", args, {"rates": rates}, draw(args, results))
    common.finish(errors)


def draw(args: argparse.Namespace, results: dict[float, Any]) -> Any:
    """Draw a column per rate and a row per part, with dashed lines at the bounds."""
    plt = common.pyplot()
    shape = len(next(iter(results.values()))), len(results)
    figure, panels = plt.subplots(*shape, figsize=(6.5 * shape[1], 4 * shape[0]), squeeze=False)
    for column, (gigabits, result) in enumerate(results.items()):
        for axes, (part, measured) in zip(panels[:, column], result.items(), strict=True):
            what = f"Allreduce of {args.megabytes:g} MB" if part == "allreduce" else f"Step of {args.model}"
            bounds = measured["bounds_ms"] if part == "step" else {"bound": measured["bound_ms"]}
            training.draw(axes, measured["summary"], f"{what}, wire of {gigabits:g} Gb/s", part)
            for (name, value), style in zip(bounds.items(), ("--", ":"), strict=False):
                axes.axvline(value, color="black", linestyle=style, label=f"{name}: {value:.0f} ms")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
