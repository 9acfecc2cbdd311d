"""What scripts import from Horovod's module of this name: all of ``hvdkit.torch``, and the names below.

Of Horovod's autograd functions only the one is here that takes and gives what Horovod's does. Not here: the others
(``HorovodAllreduce`` and so on; ``allreduce()`` and so on are differentiable), and what only serves Horovod's C++
library (``mpi_lib``, ``_handle_map``, ``gpu_available`` ...).
"""

from __future__ import annotations

from hvdkit.api.checks import handle_average_backwards_compatibility, num_rank_is_power_2
from hvdkit.torch import *  # noqa: F403 (the same names)
from hvdkit.torch import __all__ as _torch_names
from hvdkit.torch.ops.broadcast import BroadcastFunction as HorovodBroadcast

__all__ = [*_torch_names, "HorovodBroadcast", "handle_average_backwards_compatibility", "num_rank_is_power_2"]
