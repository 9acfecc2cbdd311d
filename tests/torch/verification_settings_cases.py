"""By default the first step is verified, then the 10th, and those in between are not."""

from __future__ import annotations

from typing import Any

from hvdkit.errors import ParametersDifferError
from tests.torch.optimizer_cases import distributed_sgd
from tests.torch.optimizer_support import batch, expect, make_net, train_step


def case_other_weights_are_an_error_of_the_first_step(hvd: Any) -> None:
    net = make_net(seed=hvd.rank())
    with expect(ParametersDifferError, "after step 1:", "hvd.broadcast_parameters"):
        train_step(distributed_sgd(hvd, net), net, batch(hvd.rank()))


def case_what_goes_wrong_after_it_is_one_of_the_tenth(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    for step in range(1, 10):
        train_step(optimizer, net, batch(hvd.rank(), step))
        net.out.bias.data += hvd.rank()
    with expect(ParametersDifferError, "after step 10:", "'out.bias' (of 8) differ", "HVDKIT_VERIFY=1"):
        train_step(optimizer, net, batch(hvd.rank()))
