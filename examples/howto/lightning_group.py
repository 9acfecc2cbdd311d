"""Train a LightningModule with Lightning's own strategies, DDP and FSDP, on a process group of hvdkit."""

import os

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from hvdkit.torch.lightning import HvdkitEnvironment

environment = HvdkitEnvironment()  # the ranks that hvdkitrun or torchrun has started
size = environment.world_size()
pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels[:1792], dtype=torch.float32) / 16, torch.tensor(digits[:1792]))


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # FSDP: each rank keeps a part of the parameters
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(name: str, strategy: DDPStrategy | ModelParallelStrategy) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, num_nodes=size // devices, strategy=strategy, plugins=[environment],
        max_epochs=5, enable_model_summary=False, **quiet,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(Classifier(), DataLoader(data, batch_size=256 // size))
    if trainer.is_global_zero:
        print(f"{name}: loss {trainer.callback_metrics['loss']:.6f}, on {size} rank(s)")


train("DDP", DDPStrategy(process_group_backend="hvdkit"))
train("FSDP", ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, process_group_backend="hvdkit"))
