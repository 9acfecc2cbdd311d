"""How many images per second does a ResNet train on? The data are random, so nothing but speed is measured.

    python examples/pytorch_synthetic_benchmark.py --model resnet18 --batch-size 8
    hvdkitrun -np 2 python examples/pytorch_synthetic_benchmark.py
    hvdkitrun -np 2 python examples/pytorch_synthetic_benchmark.py --fp16-allreduce

Options and report are those of Horovod's script of the same name, so its figures can be compared line by line. Uses the
GPU of the local rank where there is one. Needs: pip install '.[examples]' in a checkout.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import hvdkit.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=["resnet18", "resnet50"], default="resnet50", help="model to train")
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of an image in pixels")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches that are not timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches per measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients with 16 bits")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients with Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    parser.add_argument("--threads", type=int, default=0, help="compute threads per process; 0: as PyTorch chooses")
    return parser.parse_args()


class ConvNorm(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
        )


class Residual(nn.Module):
    """A basic (two 3x3 convolutions) or a bottleneck (1x1, 3x3, 1x1) block of He et al. 2015, and its shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            self.body = nn.Sequential(
                ConvNorm(inputs, width, 1),
                nn.ReLU(inplace=True),
                ConvNorm(width, width, 3, stride),
                nn.ReLU(inplace=True),
                ConvNorm(width, outputs, 1),
            )
        else:
            self.body = nn.Sequential(
                ConvNorm(inputs, width, 3, stride), nn.ReLU(inplace=True), ConvNorm(width, outputs, 3)
            )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """ResNet for 1000 classes; ``depths`` are the blocks in each of the four stages."""

    def __init__(self, depths: tuple[int, ...], bottleneck: bool) -> None:
        layers = [ConvNorm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            for block in range(depth):
                layers.append(Residual(channels, width, 2 if stage and not block else 1, bottleneck))
                channels = 4 * width if bottleneck else width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


MODELS = {
    "resnet18": lambda: ResNet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: ResNet((3, 4, 6, 3), bottleneck=True),
}


def main() -> None:
    args = parse_arguments()
    hvd.init()
    first = hvd.rank() == 0
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(42 + hvd.rank())
    cuda = torch.cuda.is_available() and not args.no_cuda
    kind = "GPU" if cuda else "CPU"
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")

    model = MODELS[args.model]().to(device)
    # Adasum scales by itself; an average asks for a learning rate that grows with the number of ranks.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size()))
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    target = torch.randint(1000, (args.batch_size,), device=device)

    def train_batches(count: int) -> float:
        """Train ``count`` batches. Returns images per second of this rank."""
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(data), target).backward()
            optimizer.step()
            bar.update()
        if cuda:
            torch.cuda.synchronize()
        return args.batch_size * count / (time.perf_counter() - began)

    batches = args.num_warmup_batches + args.num_iters * args.num_batches_per_iter
    with tqdm(total=batches, unit="batch", disable=not first) as bar:

        def log(line: str) -> None:
            if first:
                bar.write(line)

        log(f"Model: {args.model}")
        log(f"Batch size: {args.batch_size}")
        log(f"Number of {kind}s: {hvd.size()}")
        log("Running warmup...")
        train_batches(args.num_warmup_batches)
        log("Running benchmark...")
        speeds = []
        for iteration in range(args.num_iters):
            speeds.append(train_batches(args.num_batches_per_iter))
            log(f"Iter #{iteration}: {speeds[-1]:.1f} img/sec per {kind}")
        mean, margin = statistics.fmean(speeds), 1.96 * statistics.pstdev(speeds)
        log(f"Img/sec per {kind}: {mean:.1f} +-{margin:.1f}")
        log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * margin:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
