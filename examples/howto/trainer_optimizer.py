"""Train with the Trainer of transformers and a DistributedOptimizer."""

import os
import tempfile
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import hvdkit.torch as hvd

size = int(os.environ.get("WORLD_SIZE", 1))
if size > 1:  # for the loaders and the logged losses
    torch.distributed.init_process_group("hvdkit")
hvd.init()

torch.manual_seed(0)  # the same weights and data on each rank
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(
    vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **no_dropout
)
model = GPT2LMHeadModel(config)  # with random weights
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
tokens = torch.randint(0, 50, (32, 1)) + torch.arange(16)  # each token is the previous token plus 1
data = [{"input_ids": row, "labels": row} for row in tokens % 50]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=20, per_device_train_batch_size=4 // size,
        gradient_accumulation_steps=2, logging_steps=20, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    # No DistributedDataParallel around the model, which would reduce gradients, too.
    trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logged = trainer.state.log_history[0]  # the mean over all ranks
    if trainer.is_world_process_zero():
        print(f"loss {logged['loss']:.6f}, norm before clipping {logged['grad_norm']:.6f}, on {size} rank(s)")
