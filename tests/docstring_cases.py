"""The examples of docstrings, run on each rank of a job of two.

Beside ``hvd`` (hvdkit.torch, .tensorflow or .keras) and ``np`` each docstring's examples find, made anew:

- PyTorch: ``torch``; ``model``, a Linear(2, 1) of weights 1 and bias 0, the same on all ranks; ``optimizer``, SGD of it
  at a learning rate of 0.1; ``x``, this rank's batch of shape (4, 2), all 1 on rank 0 and all 2 on rank 1. For DDP
  torch.distributed's process group is there, on Gloo.
- TensorFlow and Keras: ``tf``, ``keras``, and the same as a model of Keras with one Dense layer; ``y``, zeros of shape
  (4, 1). The model is compiled by nobody.

The folder is one that both ranks share. What is printed must be what the docstring says, on rank 1 too, unless a
comment beside the statement ends on what that prints: "on rank 1: tensor([2.])".
"""

from __future__ import annotations

import doctest
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.docstrings import objects

ON_RANK_1 = re.compile(r"#.*\bon rank 1\b[^:]*: (.*)$", re.MULTILINE)


def of_torch(hvd: Any, folder: Path) -> Callable[[], dict[str, Any]]:
    import torch

    torch.distributed.init_process_group("gloo", f"file://{folder}/ranks", rank=hvd.rank(), world_size=hvd.size())

    def made() -> dict[str, Any]:
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"torch": torch, "model": model, "optimizer": optimizer, "x": torch.full((4, 2), 1.0 + hvd.rank())}

    return made


def of_keras(hvd: Any, folder: Path) -> Callable[[], dict[str, Any]]:
    import keras
    import tensorflow as tf

    def made() -> dict[str, Any]:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", name="dense")])
        x, y = np.full((4, 2), 1.0 + hvd.rank(), np.float32), np.zeros((4, 1), np.float32)
        return {"tf": tf, "keras": keras, "model": model, "optimizer": keras.optimizers.SGD(0.1), "x": x, "y": y}

    return made


def failures(name: str, one: Any, names: dict[str, Any], rank: int) -> str:
    """What doctest says of the examples in a docstring; nothing if they do what it says."""
    (test,) = doctest.DocTestFinder(recurse=False).find(one, name, globs=names)
    for example in test.examples if rank else []:
        if other := ON_RANK_1.search(example.source):
            example.want = f"{other[1]}\n"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    return "".join(said)


def case_examples(hvd: Any) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = Path(hvd.broadcast_object(own))
        before = Path.cwd()
        os.chdir(folder)
        made = (of_torch if hvd.__name__ == "hvdkit.torch" else of_keras)(hvd, folder)
        found = dict(objects(hvd))
        said = []
        seen: set[int] = set()
        for name, one in found.items():
            if ">>>" in (one.__doc__ or "") and id(one) not in seen:
                seen.add(id(one))
                said.append(failures(name, one, {"hvd": hvd, "np": np, **made()}, hvd.rank()))
                # The other rank may wait for what this one did not do.
                assert "Exception raised:" not in said[-1], "\n".join(filter(None, said))
        os.chdir(before)
        hvd.barrier()  # before the folder goes
        assert said
        assert not any(said), "\n".join(filter(None, said))
