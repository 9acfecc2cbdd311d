"""A gradient that torch.distributed reduces is not reduced by a DistributedOptimizer too: an error says so."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.on_ranks import on_ranks
from tests.told import told
from tests.torch.optimizer_support import batch, distributed_sgd, loss_of, make_net, process_group, train_step

pytestmark = on_ranks(2)

IN_DDP = (
    "' belongs to a DistributedDataParallel too, which also averages its gradient over the ranks.\n"
    "HINT: keep the DistributedDataParallel and use the optimizer without hvd.DistributedOptimizer, or train the bare "
    "model. Accelerate and the Trainer of transformers wrap models themselves; hvd.ddp_hook(codec) compresses "
    "gradients there."
)
SHARDED = (
    "' is a DTensor: each rank may have another part of it; fully_shard and parallelize_module reduce gradients "
    "themselves.\n"
    "HINT: use the optimizer without hvd.DistributedOptimizer; where nothing averages over the data dimension of a "
    "mesh, average the local parts: hvd.grouped_allreduce_([p.grad.to_local() for p in model.parameters()], "
    "process_set=...)."
)


def of_conv(hvd: Any, text: str) -> tuple[str, ...]:
    """The parts of an error about the first parameter."""
    return "DistributedOptimizer '", f"' on rank {hvd.rank()}: its parameter 'conv.weight{text}"


def test_a_model_in_ddp_with_a_distributed_optimizer_is_an_error_of_all_ranks(hvd: Any) -> None:
    def make_the_mistake() -> None:
        net = make_net()
        del net.spare
        early = distributed_sgd(hvd, net)
        model = DistributedDataParallel(net)
        with told(ValueError, *of_conv(hvd, IN_DDP)):
            distributed_sgd(hvd, net)
        loss_of(model, batch(hvd.rank())).backward()
        with told(ValueError, *of_conv(hvd, IN_DDP)):
            early.step()

    for backend in ("gloo", "hvdkit"):
        with process_group(hvd, backend):
            make_the_mistake()


def test_a_model_that_left_ddp_and_parameters_that_ddp_ignores_are_reduced(hvd: Any) -> None:
    with process_group(hvd):
        net, other = make_net(), make_net()
        del net.spare, other.spare
        gone = DistributedDataParallel(net)
        gone.cycle = gone  # so that it goes only when the garbage is collected
        del gone
        train_step(distributed_sgd(hvd, net), net, batch(hvd.rank()))
        names = [name for name, _ in other.named_parameters() if name != "conv.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(other, names)
        model = DistributedDataParallel(other)
        distributed_sgd(hvd, other.hidden)
        del model  # before its group


def test_a_sharded_model_with_a_distributed_optimizer_is_an_error(hvd: Any) -> None:
    with process_group(hvd):
        net = fully_shard(make_net())
        with told(ValueError, *of_conv(hvd, SHARDED)):
            distributed_sgd(hvd, net)
