"""Train a byte-level transformer language model on the source code of Python's own standard library.

    python examples/pytorch_text.py --steps 50                       # alone
    hvdkitrun -np 2 python examples/pytorch_text.py                  # on two processes
    hvdkitrun -np 2 python examples/pytorch_text.py --compression int8    # a quarter of the bytes between hosts

Nothing is downloaded: every Python has its standard library. At the defaults the model has 20.7 million parameters.
Every few steps rank 0 reports the throughput of all ranks, the loss, the bytes that a rank sent and how long it waited
for communication. What makes the script distributed is marked with "hvd:". Needs: pip install '.[torch]' in a
checkout.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import hvdkit.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Byte-level language model on Python's standard library",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per process and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--width", type=int, default=512, help="width of the model; a multiple of --heads")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate, reached after the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=20, help="steps over which the learning rate grows")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the averaged gradient")
    codecs = ["none", "fp16", "bf16", "int8", "onebit", "topk", "powersgd"]
    parser.add_argument("--compression", choices=codecs, default="none", help="gradients on the wire, between hosts")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="read no more source code than this")
    parser.add_argument("--report-every", type=int, default=10, help="steps between two reports")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and of the choice of sequences")
    parser.add_argument("--threads", type=int, default=1, help="compute threads per process")
    return parser.parse_args()


class Block(nn.Module):
    """Causal self-attention and a gated dense layer (SwiGLU, Shazeer 2020), each normalised first and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.dense_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.dense_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class ByteTransformer(nn.Module):
    """Predicts the next byte: [batch, length] bytes in, [batch, length, 256] logits out."""

    def __init__(self, context: int = 128, layers: int = 6, width: int = 512, heads: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def next_byte_loss(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats per byte, of [batch, context + 1] sequences."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def load_sources(max_bytes: int, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library as two flat tensors of at least ``least`` bytes: a tenth of the files is for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(library.rglob("*.py")) if not {"site-packages", "dist-packages"} & set(path.parts)]
    train, validation = bytearray(), bytearray()
    for number, path in enumerate(files):
        (validation if number % 10 == 1 else train).extend(path.read_bytes())
        if len(train) + len(validation) >= max_bytes:
            break
    if min(len(train), len(validation)) < least:
        raise SystemExit(f"--max-bytes {max_bytes} is too little text")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def draw(data: torch.Tensor, batch: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """[batch, context + 1] bytes from random places."""
    starts = torch.randint(len(data) - context, (batch, 1), generator=generator)
    return data[starts + torch.arange(context + 1)].long()


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    progress = (step - args.warmup_steps) / max(args.steps - args.warmup_steps, 1)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


class Report:
    """What rank 0 says about the steps since the last report; all ranks must call it, since it averages over them."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.start()

    def start(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.before = hvd.communication_stats()
        self.began = time.perf_counter()

    def line(self, step: int) -> str:
        seconds = time.perf_counter() - self.began
        now, steps = hvd.communication_stats(), len(self.losses)
        sent, waited = now.bytes_sent - self.before.bytes_sent, now.seconds - self.before.seconds
        # hvd: the mean over the ranks of the loss, of the bytes that one of them sent and of the time that it waited.
        mine = torch.tensor([torch.stack(self.losses).mean(), sent, waited, seconds], dtype=torch.float64)
        loss, sent, waited, seconds = hvd.allreduce(mine, name="report").tolist()
        self.start()
        return (
            f"step {step}: loss {loss:.3f}, {steps * self.tokens_per_step / seconds:,.0f} tokens/s, "
            f"{sent / steps / 1e6:.1f} MB sent per rank and step, "
            f"{waited / steps * 1e3:.0f} of {seconds / steps * 1e3:.0f} ms per step waiting for communication"
        )


@torch.no_grad()
def validate(model: nn.Module, data: torch.Tensor, args: argparse.Namespace) -> float:
    """Loss on files that were not trained on, each rank on other sequences, averaged over them."""
    generator = torch.Generator().manual_seed(args.seed + hvd.rank())
    loss = next_byte_loss(model, draw(data, 4 * args.batch_size, args.context, generator))
    return hvd.allreduce(loss, name="validation_loss").item()


def main() -> None:
    args = parse_arguments()
    hvd.init()  # hvd: find the other ranks
    first = hvd.rank() == 0
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    train, validation = load_sources(args.max_bytes, least=2 * args.context * hvd.size())
    # hvd: every rank trains on its own part of the text.
    share = train[len(train) * hvd.rank() // hvd.size() : len(train) * (hvd.rank() + 1) // hvd.size()]
    generator = torch.Generator().manual_seed(args.seed + hvd.rank())

    model = ByteTransformer(args.context, args.layers, args.width, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # hvd: average the gradients of all ranks, while the backward pass still computes the others.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, args.compression),
    )
    # hvd: everyone starts from rank 0's weights.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if first:
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"{millions:.1f} M parameters, {len(train) / 1e6:.1f} MB of source code, {hvd.size()} process(es)")

    report = Report(tokens_per_step=args.batch_size * args.context * hvd.size())
    with tqdm(total=args.steps, desc="training", unit="step", disable=not first) as bar:
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            optimizer.zero_grad()
            loss = next_byte_loss(model, draw(share, args.batch_size, args.context, generator))
            loss.backward()
            # hvd: to clip the averaged gradients, wait for them first; then step() need not wait again.
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            report.losses.append(loss.detach())
            bar.update()
            if (step + 1) % args.report_every == 0 or step + 1 == args.steps:
                line = report.line(step + 1)
                if first:
                    bar.write(line)

    loss = validate(model, validation, args)
    if first:
        print(f"validation loss {loss:.3f} nats per byte ({loss / math.log(2):.2f} bits)")
    hvd.shutdown()


if __name__ == "__main__":
    main()
