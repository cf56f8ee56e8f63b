"""A plain torchrun script: a linear model on random data with DDP. Knows nothing of the launcher."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train for `--steps`; go on from a checkpoint where LAUNCH_CHECKPOINT_DIR holds one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    target = torch.randn(16, 1)

    folder = os.environ.get("LAUNCH_CHECKPOINT_DIR")
    checkpoint = Path(folder) / "last.pt" if folder else None
    start = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        start = state["step"]

    for step in range(start + 1, args.steps + 1):
        generator = torch.Generator().manual_seed(step * 10_000 + rank)
        x = torch.randn(64, 16, generator=generator)
        loss = torch.nn.functional.mse_loss(model(x.to(device)), (x @ target).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            if checkpoint is not None:
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                torch.save({"model": model.module.state_dict(), "step": step}, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
