"""Elastic training with PyTorch: ``hvd.elastic``, as ``horovod.torch.elastic``."""

from hvdkit.api.elastic import ObjectState, State, run
from hvdkit.torch.elastic.sampler import ElasticSampler
from hvdkit.torch.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
