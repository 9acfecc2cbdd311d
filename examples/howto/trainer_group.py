"""Train with the Trainer of transformers, which uses a DistributedDataParallel, on a process group of hvdkit."""

import os
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

size = int(os.environ.get("WORLD_SIZE", 1))
if size > 1:  # before TrainingArguments creates a Gloo group
    torch.distributed.init_process_group("hvdkit")

torch.manual_seed(0)  # the same weights and data on each rank
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(
    vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **no_dropout
)
model = GPT2LMHeadModel(config)  # with random weights
tokens = torch.randint(0, 50, (32, 1)) + torch.arange(16)  # each token is the previous token plus 1
data = [{"input_ids": row, "labels": row} for row in tokens % 50]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=20, per_device_train_batch_size=4 // size,
        gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=20, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logged = trainer.state.log_history[0]  # the mean over all ranks
    if trainer.is_world_process_zero():
        print(f"loss {logged['loss']:.6f}, norm before clipping {logged['grad_norm']:.6f}, on {size} rank(s)")
