"""Trainings of Lightning with the strategy "hvdkit" on all ranks of a job: each rank prints its results as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd
from hvdkit.torch.lightning import HvdkitStrategy

hvd.init()
generator = torch.Generator().manual_seed(5)
DATA = TensorDataset(
    torch.randn(192, 64, generator=generator, dtype=torch.float64), torch.randint(0, 10, (192,), generator=generator)
)


class Net(pl.LightningModule):
    """A classifier that notes the norms of gradients before they are clipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(hvd.rank())
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.norms: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]).item())

    def validation_step(self, batch: Any, index: int) -> None:
        self.accuracy(self.layers(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Manual(Net):
    """Two optimizers, stepped by hand, of which the second accumulates two passes."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[i].parameters(), lr=0.1) for i in (0, 2)]

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        second.set_backward_passes_per_step(2)
        for optimizer in (first, second):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for _ in range(optimizer.backward_passes_per_step):
                self.manual_backward(nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def loader() -> Any:
    return DataLoader(DATA, batch_size=32 // hvd.size())


def train(
    net: Net, folder: Path, epochs: int, path: Path | None = None, strategy: Any = "hvdkit", **options: Any
) -> Any:
    """Train up to an epoch, from a checkpoint if there is one. Return the results."""
    saving = pl.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=epochs, logger=False, callbacks=[saving],
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(net, loader(), loader(), ckpt_path=path, weights_only=False)
    return {
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "norms": net.norms,
        "weights": sum(parameter.sum().item() for parameter in net.parameters()),
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "ranks": [trainer.global_rank, trainer.local_rank, trainer.world_size, trainer.is_global_zero],
        "gathered": trainer.strategy.all_gather(torch.tensor(trainer.global_rank)).tolist(),
    }


def shared_folder(name: str) -> Path:
    return Path(hvd.broadcast_object(tempfile.mkdtemp(name)))


def written_by(folder: Path) -> list[str]:
    hvd.barrier()
    return sorted(path.name for path in folder.iterdir())


results: dict[str, Any] = {}
for passes in (1, 4):  # of 6 batches, so that the second step of an epoch has 2
    options = {"accumulate_grad_batches": passes, "gradient_clip_val": 0.3}
    whole, parts = shared_folder("whole"), shared_folder("parts")
    results[f"{passes} at once"] = train(Net(), whole, 2, **options)
    train(Net(), parts, 1, **options)
    results[f"{passes} in two"] = train(Net(), parts, 2, parts / "last.ckpt", **options)
    results[f"{passes} files"] = written_by(whole)
results["by hand"] = train(Manual(), shared_folder("manual"), 1)
results["summed"] = train(Net(), shared_folder("sum"), 1, strategy=HvdkitStrategy(op=hvd.Sum))

own = torch.tensor([1.0 + hvd.rank()], requires_grad=True)
strategy = HvdkitStrategy()
strategy.all_gather(own, sync_grads=True).sum().backward()
results["gradient of all_gather"] = own.grad.item() / hvd.size()
results["reduced"] = [
    strategy.reduce(torch.tensor([2.0 * hvd.rank()]), reduce_op=op).item()
    for op in ("mean", "sum", "max", torch.distributed.ReduceOp.MIN)
]
for name, options in {"several devices": {"devices": 2}, "layers": {"sync_batchnorm": True}}.items():
    try:
        train(Net(), shared_folder("error"), 1, **options)
    except ValueError as error:
        results[name] = str(error)
sys.stdout.write(json.dumps(results) + "\n")
