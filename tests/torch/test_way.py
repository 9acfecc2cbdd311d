"""The way of a gradient is through the files that the page on architecture names."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import hvdkit
from tests.on_ranks import on_ranks
from tests.ranks import ROOT

PACKAGE = Path(hvdkit.__file__).parent


FEW, MANY = 4, 24  # gradients of 64 KiB


def files_on_the_page() -> set[str]:
    """Return the files that docs/architecture.md says each gradient calls functions in."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (paragraph,) = re.findall(
        r"each dense gradient of 64 KiB or more calls functions in.*?\n\n(.*?)\n\n", text, re.DOTALL
    )
    files = set()
    for line in paragraph.splitlines():
        folder, *names = re.findall(r"`([\w/]+)`", line)
        files |= {folder + name for name in names} or {folder}
    return files


def calls_in_a_step(hvd: Any, gradients: int) -> Counter[str]:
    """Return the calls of hvdkit's functions on this thread in a steady step, by file."""
    net = torch.nn.ParameterList([torch.ones(16384) for _ in range(gradients)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    calls: Counter[str] = Counter()
    is_waiting = False  # drives the engine meanwhile, in as many rounds as the other rank takes

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal is_waiting
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "drive_until" and event in ("call", "return"):
            is_waiting = event == "call"
        elif event == "call" and not is_waiting and path.is_relative_to(PACKAGE):
            calls[path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")] += 1

    for step in range(4):
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in net)
        before = sys.getprofile()
        sys.setprofile(count if step == 3 else before)
        try:
            loss.backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
    return calls


# With a size of buckets given, gradients are handed over during the backward pass, however many cores there are.
@on_ranks((2, "mpi"), HVDKIT_FUSION_THRESHOLD=str(64 << 20))
def test_each_large_gradient_is_in_the_hands_of_the_files_that_the_page_names(hvd: Any) -> None:
    few, many = calls_in_a_step(hvd, FEW), calls_in_a_step(hvd, MANY)
    assert {file for file in many if many[file] - few[file] >= MANY - FEW} == files_on_the_page()
