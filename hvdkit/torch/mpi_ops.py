"""Horovod's module of this name, for scripts that import it: all of ``hvdkit.torch``, and the names below.

``HorovodBroadcast`` is the only autograd function here, because it has Horovod's arguments; ``allreduce()`` and so on
are differentiable. Names that serve Horovod's C++ library (``mpi_lib``, ``_handle_map`` ...) are missing.
"""

from __future__ import annotations

from hvdkit.api.checks import handle_average_backwards_compatibility, num_rank_is_power_2
from hvdkit.torch import *  # noqa: F403 (the same names)
from hvdkit.torch import __all__ as _torch_names
from hvdkit.torch.ops.broadcast import BroadcastFunction as HorovodBroadcast

__all__ = [*_torch_names, "HorovodBroadcast", "handle_average_backwards_compatibility", "num_rank_is_power_2"]
