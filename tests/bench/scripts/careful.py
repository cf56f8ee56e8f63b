"""The careful script of somebody who trains under torchrun: it saves every EVERY steps to another name and renames,
keeps the last two, goes on from the newest, times out early, and never outlives its agent.

The same network, data, batch and optimizer as the recipe of `training.py`. Writes OUT/steps.jsonl and OUT/pid-RANK.
"""

import ctypes
import datetime
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from jobs.data.synthetic import synthetic
from jobs.models.mlp import mlp

OUT = Path(os.environ["OUT"])
CHECKPOINTS = OUT / "checkpoints"


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whole or not at all."""
    unfinished = CHECKPOINTS / ".tmp"
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(CHECKPOINTS / f"{step:09}.pt")
    for old in sorted(CHECKPOINTS.glob("*.pt"))[:-2]:
        old.unlink()


def main() -> None:
    """Train until OUT/stop exists."""
    agent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != agent:
        return
    settings = json.loads(os.environ["SETTINGS"])
    CHECKPOINTS.mkdir(exist_ok=True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
    rank, world = dist.get_rank(), dist.get_world_size()
    (OUT / f"pid-{rank}.tmp").write_text(f"{os.getpid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    (OUT / f"pid-{rank}.tmp").rename(OUT / f"pid-{rank}")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(mlp(**settings["model"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    samples = synthetic(**settings["data"]).load().train
    batch, step = settings["batch"], 0
    if found := sorted(CHECKPOINTS.glob("*.pt")):
        state = torch.load(found[-1])
        step = state["step"]
        model.module.load_state_dict({name.removeprefix("module."): value for name, value in state["model"].items()})
        optimizer.load_state_dict(state["optimizer"])
    stop = torch.zeros(1)
    per_epoch = len(samples) // batch
    with (OUT / "steps.jsonl").open("a", buffering=1) as log:
        while not stop:
            epoch, position = divmod(step, per_epoch)
            order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch))
            mine = order[position * batch : (position + 1) * batch][rank::world].tolist()
            chosen = [samples[index] for index in mine]
            inputs, targets = (torch.stack([torch.as_tensor(pair[part]) for pair in chosen]) for part in (0, 1))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                log.write(json.dumps({"step": step, "time": time.time(), "loss": loss.item()}) + "\n")
                if step % settings["every"] == 0:
                    save(step, model, optimizer)
            stop.fill_(float((OUT / "stop").exists()))
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    os._exit(0)


if __name__ == "__main__":
    main()
