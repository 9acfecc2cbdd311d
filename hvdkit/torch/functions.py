"""The functions that bring ranks to the same state, under the module name that Horovod gave them."""

from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.torch.optimizers.state import broadcast_optimizer_state
from hvdkit.torch.parameters import broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
