"""A notebook as a script: try the training on one rank in this process, then start it on two."""

import inspect
import subprocess
import sys
import tempfile
from pathlib import Path


# %% The whole job in one function, its imports included, so that it needs nothing of the notebook's memory.
def train(rate: float) -> None:
    """Train on the digits, on as many ranks as there are. Prints the loss on rank 0."""
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    import hvdkit.torch as hvd

    hvd.init()  # called again, as when a cell runs twice, it does nothing
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    mine = slice(hvd.rank(), 1792, hvd.size())
    images, labels = torch.tensor(pixels[mine], dtype=torch.float32) / 16, torch.tensor(digits[mine])
    # Made anew whenever the cell runs, since an optimizer cannot be wrapped twice.
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    loss = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"loss {loss:.6f}, on {hvd.size()} rank(s)")


# %% In this process there is one rank: what a debugger, a small model and a look at tensors are for.
train(rate=0.5)
train(rate=0.5)

# %% Ranks are processes of their own, which run a file. What they print comes back as the launcher's output.
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder) / "train.py"
    script.write_text(f"{inspect.getsource(train)}\n\ntrain(rate=0.5)\n")
    launcher = [sys.executable, "-m", "hvdkit.launch", "-np", "2"]  # hvdkitrun of the notebook's own environment
    done = subprocess.run([*launcher, sys.executable, str(script)], capture_output=True, text=True)  # noqa: S603
print(done.stdout, done.stderr, sep="", end="")
done.check_returncode()
