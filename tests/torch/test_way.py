"""The way of a tensor through the adapter: it is in the hands of those alone that have something to do with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import hvdkit
import hvdkit.torch as hvd
from tests.ranks import RankedCases

# With a size of buckets given, gradients are handed over during the backward pass, however many cores there are.
WAY = RankedCases("tests.torch.way_cases", HVDKIT_FUSION_THRESHOLD=str(64 << 20))
ROOT = Path(hvdkit.__file__).parent
GRADIENTS_AND_CODECS = {"torch/compression.py", "api/gradients/compression.py"}


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """A job of one rank in this process."""
    hvd.init()
    yield
    hvd.shutdown()


def adapters_files(call: Callable[[], Any]) -> set[str]:
    """The files of PyTorch's adapter, and of what adapters know of gradients, of which ``call`` calls functions."""
    files = set()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.add(path.relative_to(ROOT).as_posix())

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(before)
    return {file for file in files if file.startswith(("torch/", "api/gradients/"))}


def test_a_tensor_without_gradient_or_compression_passes_neither():
    tensor = torch.ones(4)
    files = adapters_files(lambda: hvd.allreduce(tensor, name="plain"))
    assert files == {"torch/ops/allreduce.py", "torch/ops/framework.py"}


@pytest.mark.parametrize(
    ("tensor", "compression"),
    [(torch.ones(4, requires_grad=True), hvd.Compression.none), (torch.ones(4), hvd.Compression.fp16)],
    ids=["gradient", "compression"],
)
def test_a_tensor_passes_what_was_asked_for(tensor: torch.Tensor, compression: Any):
    outputs = []
    files = adapters_files(lambda: outputs.append(hvd.allreduce(tensor, name="asked", compression=compression)))
    assert files >= GRADIENTS_AND_CODECS
    assert outputs[0].requires_grad == tensor.requires_grad


def test_a_gradient_passes_the_files_that_the_page_on_architecture_names():
    WAY.check("case_each_large_gradient_is_in_the_hands_of_the_files_that_the_page_names", 2, "mpi")
