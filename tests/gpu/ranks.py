"""The program of a rank of tests/gpu: ``python -m tests.gpu.ranks MODULES FOLDER``, as in tests.ranks.

All ranks have one GPU. NCCL takes each for one of another host, since its NCCL_HOSTID says so, and sends over sockets.
"""

from __future__ import annotations

import faulthandler
import os
import sys

OVER_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0"}


def set_up() -> None:
    """Let this rank go the way that is tried, before anything asks NCCL."""
    from tests.gpu import card

    if not card.IS_GPU:
        from tests.transports import pretend_device

        pretend_device.SHARED[:] = [True] if card.WAY == "host" else []
        pretend_device.pretend()
    elif card.WAY == "nccl":
        os.environ.update(OVER_SOCKETS, NCCL_HOSTID=f"rank-{os.environ['RANK']}")


if __name__ == "__main__":
    from tests import ranks

    faulthandler.dump_traceback_later(45, repeat=True)  # of a case that hangs
    set_up()
    ranks.main(sys.argv[1], sys.argv[2])
