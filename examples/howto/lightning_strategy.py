"""Train a LightningModule with the strategy "hvdkit", which wraps its optimizers in DistributedOptimizers."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdkit.torch as hvd
import hvdkit.torch.lightning  # noqa: F401  # registers the strategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # the mean over all ranks
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


hvd.init()
torch.manual_seed(hvd.rank())  # different weights on each rank, until the strategy broadcasts rank 0's
pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels[:1792], dtype=torch.float32) / 16, torch.tensor(digits[:1792]))
loader = DataLoader(data, batch_size=128 // hvd.size())  # Lightning gives each rank its share of the data

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(
    accelerator="cpu", strategy="hvdkit", max_epochs=5, accumulate_grad_batches=2, gradient_clip_val=0.25, **quiet
)
trainer.fit(Classifier(), loader)
if trainer.is_global_zero:
    print(f"loss {trainer.callback_metrics['loss']:.6f}, on {trainer.world_size} rank(s)")
