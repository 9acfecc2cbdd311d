"""Lightning on hvdkit: ``Trainer(strategy="hvdkit")``, and the ranks of a job for Lightning's own strategies.

Importing this module registers the strategy with ``lightning.pytorch``, or with ``pytorch_lightning`` where the program
has imported that package, or has no other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import hvdkit.torch as hvd
from hvdkit import environments
from hvdkit.torch.gradients.compression_state import KEY
from hvdkit.torch.optimizers.step import reduce_loss

_IS_OLD_NAME = "lightning" not in sys.modules and ("pytorch_lightning" in sys.modules or find_spec("lightning") is None)
PACKAGE = "pytorch_lightning" if _IS_OLD_NAME else "lightning.pytorch"
_strategies: Any = import_module(f"{PACKAGE}.strategies")
_environments: Any = import_module(f"{PACKAGE}.plugins.environments")
_rank_zero: Any = import_module(f"{PACKAGE}.utilities.rank_zero")
_metrics: Any = import_module("torchmetrics")

_OPERATIONS = {
    "mean": hvd.Average,
    "avg": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}
NO_LAYER_SYNC = (
    'Trainer(strategy="hvdkit", sync_batchnorm=True): hvdkit does not convert layers.\n'
    "HINT: use hvd.SyncBatchNorm in the model."
)
NOT_STARTED = (
    'Trainer(strategy="hvdkit", devices={devices}): hvd.size() is 1.\n'
    "HINT: start the ranks with hvdkitrun -np {devices} python script.py, or train on one device with devices=1."
)


class HvdkitEnvironment(_environments.TorchElasticEnvironment):  # type: ignore[misc]  # Lightning may be missing
    """The place of this process in its job, for strategies of Lightning: ``Trainer(plugins=[HvdkitEnvironment()])``.

    hvdkitrun, torchrun, mpirun or srun started the process; MASTER_ADDR and MASTER_PORT say where its ranks meet.

    Examples:
        >>> from hvdkit.torch.lightning import HvdkitEnvironment
        >>> HvdkitEnvironment().world_size()
        2
    """

    def __init__(self) -> None:
        super().__init__()
        self._world = environments.detect()

    @staticmethod
    def detect() -> bool:
        """True if a launcher that hvdkit knows started this process."""
        return environments.detect().launcher != "none"

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def global_rank(self) -> int:
        """Return this process's rank among all."""
        return self._world.rank

    def local_rank(self) -> int:
        """Return this process's rank among those of its host."""
        return self._world.local_rank or 0


class HvdkitStrategy(_strategies.ParallelStrategy):  # type: ignore[misc]  # Lightning may be missing
    """Data-parallel training by ``hvd.DistributedOptimizer``: ``Trainer(strategy="hvdkit")``, as "horovod" once was.

    Optimizers of ``configure_optimizers()`` are wrapped, unless they are distributed already. Parameters, buffers and
    the state of optimizers are those of rank 0 at the start. The learning rate is not multiplied by the number of
    ranks. Gradients are reduced before ``on_before_optimizer_step`` is called and before they are clipped.

    Args:
        options: arguments of ``hvd.DistributedOptimizer`` such as ``compression``, and of Lightning's ParallelStrategy.

    Examples:
        >>> from hvdkit.torch.lightning import HvdkitStrategy
        >>> HvdkitStrategy(compression=hvd.Compression.fp16).world_size
        2
    """

    strategy_name = "hvdkit"
    is_distributed = True
    num_nodes = 1
    optimizers: Any  # Lightning's property

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        environment = cluster_environment or HvdkitEnvironment()
        super().__init__(accelerator, parallel_devices, environment, checkpoint_io, precision_plugin)
        self._options = options
        hvd.init()

    @property
    def global_rank(self) -> int:
        """Return the rank among all."""
        return int(hvd.rank())

    @property
    def local_rank(self) -> int:
        """Return the rank among those of this host."""
        return int(hvd.local_rank())

    @property
    def node_rank(self) -> int:
        """Return the number of this host."""
        return int(hvd.cross_rank())

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return int(hvd.size())

    @property
    def root_device(self) -> torch.device:
        """Return this rank's device: by its local rank one of the trainer's, or else of the host's."""
        devices: list[torch.device] = self.parallel_devices
        if devices[0].type == "cpu" or len(devices) > self.local_rank:
            return devices[min(self.local_rank, len(devices) - 1)]
        return torch.device(devices[0].type, self.local_rank)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the arguments of this rank's DistributedSampler."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Let Lightning know rank 0. Raises ValueError if the trainer has several devices and the job one rank."""
        _rank_zero.rank_zero_only.rank = self.global_rank
        devices = len(self.parallel_devices or ())
        if self.world_size == 1 and devices > 1:
            raise ValueError(NOT_STARTED.format(devices=devices))

    def setup(self, trainer: Any) -> None:
        """Give all ranks the model of rank 0, and prepare its metrics; to train, wrap its optimizers."""
        if self._layer_sync is not None:
            raise ValueError(NO_LAYER_SYNC)
        super().setup(trainer)
        for metric in self.lightning_module.modules():
            if isinstance(metric, _metrics.Metric):
                metric.dist_sync_fn, metric.distributed_available_fn = _gather, hvd.is_initialized

    def _setup_model(self, model: Any) -> Any:
        """Return the model, with parameters and buffers of rank 0; Lightning calls this before it makes optimizers."""
        hvd.broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=0)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers, distributed, with the state of rank 0."""
        super().setup_optimizers(trainer)
        self.optimizers = [self._distributed(optimizer) for optimizer in self.optimizers]
        self._broadcast_optimizers()

    def _distributed(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if hasattr(optimizer, "_synchronizer"):
            return optimizer
        members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = [pair for pair in self.lightning_module.named_parameters() if id(pair[1]) in members]
        has_names = len(named) == len(members)
        return hvd.DistributedOptimizer(optimizer, named if has_names else None, **self._options)

    def _broadcast_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if not isinstance(optimizer, torch.optim.LBFGS):  # whose state cannot be broadcast
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        self.model.to(self.root_device)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Expect as many backward passes before a step as the trainer accumulates now."""
        module = self.lightning_module
        if module.automatic_optimization:
            for optimizer in self.optimizers:
                optimizer.set_backward_passes_per_step(module.trainer.accumulate_grad_batches)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the closure, reduce the gradients, let Lightning's hooks and clipping have them, and step."""

        def closure_and_synchronize() -> Any:
            loss = closure()
            optimizer.synchronize()
            return reduce_loss(optimizer._synchronizer, loss)

        # With Adasum gradients stay their rank's, and the step cannot be without a reduction.
        with nullcontext() if optimizer.op == hvd.Adasum else optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, closure_and_synchronize, model, **kwargs)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer for a checkpoint, with what codecs keep on all ranks. Collective."""
        state: dict[str, Any] = super().optimizer_state(optimizer)
        if KEY not in state:
            return state
        return {**state, **hvd.merge_state_dicts(hvd.allgather_object({KEY: state[KEY]}))}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Set the state of the optimizers back, to that of rank 0."""
        super().load_optimizer_state_dict(checkpoint)
        self._broadcast_optimizers()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all ranks, or those of the process set ``group``; other values as they are."""
        if not isinstance(tensor, Tensor):
            return tensor
        op = _OPERATIONS[str(reduce_op).rpartition(".")[2].lower()]
        return hvd.allreduce(tensor, op=op, process_set=group or hvd.global_process_set)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the ranks' tensors, of one shape, with a first dimension of ranks."""
        process_set = group or hvd.global_process_set
        gathered = hvd.allgather((tensor if sync_grads else tensor.detach()).unsqueeze(0), process_set=process_set)
        if gathered.requires_grad:  # hvd's gradient is the mean over ranks, Lightning's the sum
            gathered.register_hook(lambda gradient: gradient * process_set.size())  # type: ignore[no-untyped-call]
        return gathered

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        return hvd.broadcast_object(obj, src)


def _gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the ranks' tensors, also of several shapes, for torchmetrics."""
    process_set = group or hvd.global_process_set
    shapes = hvd.allgather_object(tuple(tensor.shape), process_set=process_set)
    flat = hvd.allgather(tensor.detach().reshape(-1), process_set=process_set)
    parts = torch.split(flat, [torch.Size(shape).numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


_strategies.StrategyRegistry.register("hvdkit", HvdkitStrategy, description="Data-parallel training by hvdkit")
