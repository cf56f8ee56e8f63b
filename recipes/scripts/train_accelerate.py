"""A plain accelerate script: a tiny GPT-2 learns to count. Knows nothing of the launcher."""

import argparse
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

TINY = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False}
PLAIN = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}


def save(accelerator: Accelerator, folder: Path) -> None:
    """Save under another name first: `save_state` alone leaves half a checkpoint where it is interrupted."""
    part = folder.with_name(f"{folder.name}.tmp")
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path, required=True)
parser.add_argument("--resume_from", type=Path)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save_steps", type=int, default=20)
args = parser.parse_args()

set_seed(0)
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
model = GPT2LMHeadModel(GPT2Config(**TINY, **PLAIN))
model.loss_type = "ForCausalLM"  # else it warns that this is what it takes
sentences = (torch.randint(0, 64, (512, 1)) + torch.arange(16)) % 64
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sentences, batch_size=8, shuffle=True))

step = 0
if args.resume_from:
    accelerator.load_state(str(args.resume_from))
    step = int(args.resume_from.name.rpartition("-")[2])
while step < args.steps:
    epoch, batches_done = divmod(step, len(loader))
    loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(loader, batches_done):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 10 == 0:
            accelerator.print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % args.save_steps == 0:
            save(accelerator, args.output_dir / f"checkpoint-{step}")
        if step == args.steps:
            break
