"""By default parameters are compared after the first step, then after the 10th, and not in between."""

from __future__ import annotations

from typing import Any

from hvdkit.errors import ParametersDifferError
from tests.on_ranks import on_ranks
from tests.told import warned
from tests.torch.optimizer_support import batch, expect, make_net, train_step
from tests.torch.test_optimizer import distributed_sgd

pytestmark = on_ranks((2, "torch"))


def test_other_weights_are_a_warning_of_the_first_step_and_an_error_of_the_tenth(hvd: Any) -> None:
    for use_adasum in (False, True):
        net = make_net(seed=hvd.rank())
        optimizer = distributed_sgd(hvd, net, **({"op": hvd.Adasum} if use_adasum else {}))
        with warned("hvd.broadcast_parameters"):
            for step in range(1, 10):
                train_step(optimizer, net, batch(hvd.rank(), step))
        with expect(ParametersDifferError, "after step 10:", "hvd.broadcast_parameters"):
            train_step(optimizer, net, batch(hvd.rank()))


def test_what_goes_wrong_after_it_is_one_of_the_tenth(hvd: Any) -> None:
    net = make_net()
    optimizer = distributed_sgd(hvd, net)
    for step in range(1, 10):
        train_step(optimizer, net, batch(hvd.rank(), step))
        net.out.bias.data += hvd.rank()
    with expect(ParametersDifferError, "after step 10:", "'out.bias' (of 8) differ", "HVDKIT_VERIFY=1"):
        train_step(optimizer, net, batch(hvd.rank()))
