"""The program of the elastic jobs in test_elastic.py: it counts steps, and tells of each generation on a line.

    python elastic_program.py FILE [FAULT]

It goes on until there is a FILE. A FAULT such as ``generation 1 rank 1 step 3 raise`` makes a rank fail there; "*"
stands for any number. ``generation 1 rank 1 ticket exit`` makes it fail when it has its ticket, before it connects.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvdkit.torch as hvd
from hvdkit.engine.session import generations
from hvdkit.environments import elastic
from hvdkit.environments.ticket import Report, Ticket
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt

FAULTS = {
    "raise": lambda: 1 / 0,
    "exit": lambda: sys.exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def main(last: Path, fault: list[str]) -> None:
    torch.set_num_threads(1)
    hvd.init()
    launcher = elastic.launcher()
    assert launcher is not None
    names = "HOROVOD_ELASTIC", "HOROVOD_HOSTNAME", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"
    tell(offer=[hvd.rank(), hvd.size(), hvd.local_rank()], environment={name: os.environ[name] for name in names})
    next_ticket = launcher.next_ticket

    def fail_with_ticket(address: tuple[str, int], report: Report) -> Ticket:
        ticket = next_ticket(address, report)
        if fault[:5] == ["generation", str(ticket.generation), "rank", str(ticket.rank), "ticket"]:
            FAULTS[fault[-1]]()
        return ticket

    launcher.next_ticket = fail_with_ticket  # type: ignore[method-assign]
    steps, known_steps, failed = 0, None, False
    while True:
        try:
            ticket = generations.enter_next(launcher, failed, known_steps)
            if ticket.needs_sync:
                steps = int(hvd.broadcast_object(steps, 0))
            known_steps = steps
            tell(generation=ticket.generation, rank=hvd.rank(), size=hvd.size(), slot=hvd.local_rank(), steps=steps)
            is_last = False
            while not is_last:
                if fault and all(
                    wanted in ("*", str(number))
                    for wanted, number in zip(fault[1::2], (ticket.generation, hvd.rank(), steps), strict=False)
                ):
                    FAULTS[fault[-1]]()
                flags = torch.tensor([int(launcher.is_interrupted()), int(last.exists())])
                is_interrupted, is_last = hvd.allreduce(flags, op=hvd.Max, name="step").tolist()
                known_steps = steps = steps + 1
                if is_interrupted and not is_last:
                    raise HostsUpdatedInterrupt
                time.sleep(0.02)
            break
        except HorovodInternalError:
            failed = True
        except HostsUpdatedInterrupt:
            failed = False
    tell(end=steps, rank=hvd.rank(), size=hvd.size())


def tell(**facts: object) -> None:
    print(json.dumps({**facts, "pid": os.getpid()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split() if len(sys.argv) > 2 else [])
