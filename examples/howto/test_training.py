"""Tests of a training loop that run on all ranks at once. hvdkitrun starts them."""

import copy
import zlib

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector

import hvdkit.torch as hvd

pixels, digits = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels[:240], dtype=torch.float32) / 16, torch.tensor(digits[:240])
everything = slice(None)


# In a project, import these three functions from the training script.
def share() -> slice:
    """Return the rows of this rank."""
    return slice(hvd.rank(), len(images), hvd.size())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> None:
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()


@pytest.fixture(autouse=True, scope="session")
def job():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def model() -> nn.Module:
    """Return a model that has rank 0's weights on every rank."""
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model


def test_the_ranks_train_on_each_image_once():
    rows = hvd.allgather(torch.arange(len(images))[share()], name="rows")
    assert sorted(rows.tolist()) == list(range(len(images)))


def test_all_ranks_hold_the_same_parameters(model):
    train(model, hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()), share())
    checksum = zlib.crc32(parameters_to_vector(model.parameters()).detach().numpy())
    checksums = hvd.allgather_object(checksum)  # every rank compares all of them, so the test fails on every rank
    assert len(set(checksums)) == 1, checksums


def test_the_ranks_train_as_one_process_does(model):
    alone = copy.deepcopy(model)
    train(alone, hvd.unsynchronized(sgd(alone)), everything)  # without communication, with the images of all ranks
    train(model, hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()), share())
    vectors = [parameters_to_vector(each.parameters()) for each in (model, alone)]
    differences = hvd.allgather_object((vectors[0] - vectors[1]).abs().max().item())
    assert max(differences) < 1e-5, differences
