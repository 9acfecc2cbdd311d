"""The memory that a rank holds with the wrapped optimizer beyond a plain optimizer, in multiples of its gradients.

    python benchmarks/memory.py
    python benchmarks/memory.py --rounds 1 --width 256     # a quick look

"plain" trains without any communication. "+ init" has joined the job but wraps nothing: it separates the memory of
the library and its engine from the memory that the wrapper adds. Resident memory is read after a step, while the
gradients exist. RSS counts pages shared with other processes in full, PSS in proportion, USS not at all. The peak is
that of the whole run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
from typing import Any

import common
import jobs
import numpy as np
import psutil
from jobs import Peer

sys.path.insert(0, str(jobs.ROOT / "examples"))

PLAIN = "plain"
MEASURES = ("rss", "pss", "uss", "peak")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Memory of the wrapped optimizer", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    common.add_common_flags(parser, rounds=3)
    parser.add_argument("--steps", type=int, default=5, help="steps before memory is read")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=512, help="width of the model")
    return common.parse(parser)


def read_memory() -> dict[str, int]:
    """Return the bytes of this process, by kind of memory."""
    full = psutil.Process().memory_full_info()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rss": full.rss, "pss": getattr(full, "pss", full.uss), "uss": full.uss, "peak": peak}


def work(args: argparse.Namespace) -> None:
    """Train on a rank, and report its bytes by kind of memory, and the bytes of its gradients."""
    import torch
    from pytorch_text import ByteTransformer, next_byte_loss

    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    library, _, wrapped = args.worker.partition("+")
    model = ByteTransformer(128, args.layers, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trained: torch.nn.Module = model
    rank, close = int(os.environ.get("RANK", 0)), None
    if library == "ddp":
        torch.distributed.init_process_group("gloo")
        rank, close = torch.distributed.get_rank(), torch.distributed.destroy_process_group
        trained = torch.nn.parallel.DistributedDataParallel(model)
    elif library != PLAIN:
        hvd = importlib.import_module(f"{library}.torch")
        hvd.init()
        rank, close = hvd.rank(), hvd.shutdown
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        optimizer.zero_grad()
        next_byte_loss(trained, torch.randint(256, (4, 129), generator=data)).backward()
        optimizer.step()
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    jobs.report(args.report, rank, {"gradients": gradients, **read_memory()})
    del trained  # DDP must let go of its process group before that is destroyed, or the exit may hang
    if close is not None:
        close()


def contestants() -> list[Peer]:
    peers = [Peer(PLAIN, PLAIN, "plain"), Peer("DDP", "ddp", "plain")]
    for peer in jobs.horovods():
        peers.append(Peer(f"{peer.name} + init", peer.worker, peer.launcher))
        peers.append(Peer(f"{peer.name} wrapped", f"{peer.worker}+wrapped", peer.launcher))
    return peers


def compare(args: argparse.Namespace) -> None:
    """Run the script itself: rounds of jobs, then the table."""
    peers = common.chosen(contestants(), args.peers)
    flags = ["--threads", args.threads, "--steps", args.steps, "--layers", args.layers, "--width", args.width]

    def job(peer: Peer) -> dict[str, float]:
        """Run a job, and return its bytes by kind, averaged over the ranks."""
        reports = jobs.run_job(__file__, peer, flags, args.ranks, args.threads, args.timeout)
        return {key: float(np.mean([one[key] for one in reports])) for key in reports[0]}

    rounds, errors = common.run_rounds(peers, args.rounds, job)
    if PLAIN not in rounds[0]:
        raise SystemExit(f"nothing to compare with: {errors.get(PLAIN, '--peers must name plain')}")
    gradients = rounds[0][PLAIN]["gradients"]
    rows, summary = [], []
    for name in [peer.name for peer in peers if peer.name not in errors]:
        held = {key: common.spread(one[name][key] for one in rounds) for key in MEASURES}
        extra = {
            key: common.spread((one[name][key] - one[PLAIN][key]) / gradients for one in rounds) for key in MEASURES
        }
        summary.append({"peer": name, "bytes": held, "extra_in_gradients": extra})
        more = [f"{extra[key]['median']:.2f} [{extra[key]['q1']:.2f}, {extra[key]['q3']:.2f}]" for key in MEASURES]
        rows.append(
            [name, *(f"{held[key]['median'] / 1e6:.0f}" for key in MEASURES), *(["-"] * 4 if name == PLAIN else more)]
        )
    headers = ["peer", *(f"{key.upper()} MB" for key in MEASURES), *(f"{key.upper()} +" for key in MEASURES)]
    print(
        f"\nmemory of a rank, {args.ranks} ranks, gradients of {gradients / 1e6:.0f} MB; "
        "+: more than plain, in gradients, median [quartiles]"
    )
    print(common.table(headers, rows))
    payload = {"gradient_bytes": gradients, "summary": summary, "rounds": rounds, "errors": errors}
    common.save("memory", args, payload, draw(summary))
    common.finish(errors)


def draw(summary: list[dict[str, Any]]) -> Any:
    plt = common.pyplot()
    figure, axes = plt.subplots(figsize=(9, 4.5))
    others = [one for one in summary if one["peer"] != PLAIN]
    positions = np.arange(len(others))
    for number, key in enumerate(MEASURES):
        middle = [one["extra_in_gradients"][key]["median"] for one in others]
        axes.bar(positions + 0.2 * number - 0.3, middle, width=0.2, label=key.upper())
    axes.set_xticks(positions, [one["peer"].replace(" + ", "\n+ ").replace(" wrapped", "\nwrapped") for one in others])
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(ylabel="more than plain, in gradients' bytes", title="Memory of a rank")
    axes.legend()
    return figure


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.worker:
        work(arguments)
    else:
        compare(arguments)
