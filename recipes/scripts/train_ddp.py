"""A plain PyTorch script: a linear model on random data, with DDP. Knows nothing of the launcher."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--checkpoint-dir", type=Path)
args = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
target = torch.randn(16, 1)

start, last = 0, args.checkpoint_dir / "last.pt" if args.checkpoint_dir else None
if last and last.exists():
    state = torch.load(last, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]

for step in range(start + 1, args.steps + 1):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step * world_size + rank))
    loss = torch.nn.functional.mse_loss(model(x.to(device)), (x @ target).to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 50 == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        if last:  # under another name first: what is there is always whole
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, last.with_suffix(".tmp"))
            last.with_suffix(".tmp").replace(last)
dist.destroy_process_group()
