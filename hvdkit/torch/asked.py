"""An operation on tensors as a user asked for it, under whatever name it is called."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hvdkit.api import checks
from hvdkit.engine.process_sets import ProcessSet
from hvdkit.engine.requests import Call
from hvdkit.torch.autograd import gradient_name


class Asked(NamedTuple):
    """What every operation is given, unchecked. ``waits``: the caller waits at once, and drives the engine itself."""

    function: str
    name: str | None
    process_set: ProcessSet
    waits: bool = False

    def call(self, tensor: Tensor) -> Call:
        """For the engine. Raises TypeError or ValueError for a name or a process set that there cannot be."""
        checks.check_name(self.function, self.name)
        process_set_id = checks.check_process_set(self.function, self.process_set)
        return Call(self.name, process_set_id, tensor.device.type, not self.waits)

    def of_gradient(self) -> Asked:
        """The same for the gradient."""
        return self._replace(name=gradient_name(self.name))
