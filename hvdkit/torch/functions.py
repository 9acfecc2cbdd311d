"""Horovod's module of this name: the functions that bring ranks to the same state."""

from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.torch.optimizers.state import broadcast_optimizer_state
from hvdkit.torch.parameters import broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
