"""Checkpoints of real ranks: which one is taken, what is said about it, and what happens when none can be written."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranks import Start
from tiny import tiny

from jobs.folders import complete
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

TIMED_OUT = ("Timed out waiting 3000ms", "Application timeout caused pair closure", "wait timeout after 3000ms",
             "Connection closed by peer", "Connection reset by peer")  # fmt: skip
"""What gloo says of a peer that does not come, and of one that has given up waiting for it."""

DIE_AT = """
import os, signal
import jobs.gradients
inner = jobs.gradients.Gradients.make
def update(gradients, share, step):
    if step + 1 == int(os.environ.get("DIE_AT", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(gradients, share, step)
jobs.gradients.Gradients.make = update
"""

RESHARD = """
import os, sys, traceback
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, Replicate, distribute_tensor, init_device_mesh
from jobs.state import open_tensors, read_tensors
from jobs.storage import plan

def whole(shape, dtype):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape).to(dtype)

WHOLE = {"a": whole((7, 5), torch.bfloat16), "b": whole((8, 6), torch.float32), "c": whole((3,), torch.int64)}

def shard(mesh, placements):
    return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in WHOLE.items()}

def work():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ["LAUNCH_RUN_DIR"]) / "sharded"
    state = {
        **{f"rows/{k}": v for k, v in shard(init_device_mesh("cpu", (size,)), [Shard(0)]).items()},
        **({f"tiles/{k}": distribute_tensor(WHOLE[k], init_device_mesh("cpu", (2, size // 2)), [Shard(0), Shard(1)])
            for k in ("a", "b")}),
        **{f"all/{k}": v for k, v in WHOLE.items()},
    }
    if os.environ["LAUNCH_ATTEMPT"] == "1":
        layout = plan(state, None)
        folder.mkdir(exist_ok=True)
        layout.write_part(folder, layout.parts(state))
        if rank == 0:
            layout.write_list(folder)
        dist.barrier()
        return
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    reader = open_tensors(folder, verify=[f"rank-{rank}.safetensors"])
    read_tensors(reader, folder, state, None)
    assert len(reader.hashes) == 1
    for name, tensor in state.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        expected = whole(full.shape, full.dtype)
        assert torch.equal(full, expected), name

try:
    work()
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
os._exit(0)
"""


def test_shards_of_four_ranks_are_read_by_two(start: Start, tmp_path: Path) -> None:
    """F086: rows and tiles (two axes), bfloat16 among them, uneven, and tensors that all ranks have."""
    (tmp_path / "reshard.py").write_text(RESHARD)
    load = [str(tmp_path / "reshard.py")]
    first = start(tmp_path / "run", tiny(), ranks=4, load=load)
    assert first.wait() == [0, 0, 0, 0], [first.log(rank) for rank in range(4)]
    second = start(tmp_path / "run", tiny(), ranks=2, attempt=2, load=load)
    assert second.wait() == [0, 0], [second.log(rank) for rank in range(2)]


def test_the_own_checkpoint_wins_over_weights_to_start_from(start: Start, tmp_path: Path) -> None:
    """F087: init_from, a crash at 30, then on from the own step 25, which is said; nothing of the other run's state."""
    source = start(tmp_path / "source", tiny(train={"until": "12 steps", "eval_every": None}))
    assert source.wait() == [0, 0], source.log()
    (tmp_path / "die.py").write_text(DIE_AT)
    checkpoint = {"every": "5 steps", "asynchronous": False}
    recipe = tiny(train={"until": "40 steps", "eval_every": None}, checkpoint=checkpoint)
    recipe["checkpoint"]["init_from"] = str(source.run_dir)
    whole = start(tmp_path / "whole", recipe)
    assert whole.wait() == [0, 0], whole.log()
    assert f"starting with the weights of {source.run_dir}: 40 of 40 steps" in whole.log()
    assert whole.event("training_started")["init_from"] == str(source.run_dir)
    crashed = start(tmp_path / "run", recipe, load=[str(tmp_path / "die.py")], rank_env={0: {"DIE_AT": "30"}})
    crashed.wait()
    resumed = start(tmp_path / "run", recipe, attempt=2)
    assert resumed.wait() == [0, 0], resumed.log()
    assert resumed.log().splitlines()[:3] == [
        "resumes from step-25",
        f"checkpoint.init_from ({source.run_dir}) is not read: the run goes on from a checkpoint of its own",
        "resuming: 15 of 40 steps, 2 ranks",
    ]
    started = resumed.event("training_started")
    assert (started["resumed_from"], started["step"], started["init_from"]) == ("step-25", 25, None)
    assert resumed.weights == whole.weights


def test_the_broken_newest_is_named_and_the_one_before_is_used(start: Start, tmp_path: Path) -> None:
    """F009: the middle of a file of rank 1 is zeroed; the ranks find it while they read, and read the one before."""
    checkpoint = {"every": "10 steps", "keep": 3, "asynchronous": False}
    recipe = tiny(train={"until": "40 steps", "eval_every": None}, checkpoint=checkpoint)
    whole = start(tmp_path / "whole", recipe)
    assert whole.wait() == [0, 0], whole.log()
    (tmp_path / "die.py").write_text(DIE_AT)
    crashed = start(tmp_path / "run", recipe, load=[str(tmp_path / "die.py")], rank_env={1: {"DIE_AT": "33"}})
    crashed.wait()
    victim = crashed.run_dir / "checkpoints" / "step-30" / "rank-1.safetensors"
    content = bytearray(victim.read_bytes())
    content[-40:-20] = bytes(20)
    victim.write_bytes(content)
    resumed = start(tmp_path / "run", recipe, attempt=2)
    assert resumed.wait() == [0, 0], resumed.log()
    said = resumed.log().splitlines()[0]
    assert said.startswith("resumes from step-20; step-30 is broken: rank-1.safetensors has the hash ")
    [rejected] = resumed.event("training_started")["rejected"]
    assert said == f"resumes from step-20; {rejected['name']} {rejected['problem']}"
    assert resumed.weights == whole.weights
    losses = [[record["train/loss"] for record in read_metrics(ranks.metrics)] for ranks in (whole, resumed)]
    assert losses[0] == losses[1]


OWN_METRIC = """
import os
import jobs.trainer
def evaluate(*_, **__):
    return {"eval/loss": 1.0, "eval/accuracy": float(os.environ["RANK"])}
jobs.trainer.evaluate = evaluate
"""
NEVER_SAVES = """
import os, time
import jobs.trainer
inner = jobs.trainer.Trainer._check_weights
def check(trainer):
    while trainer.progress.step == 10 and os.environ["RANK"] == "2":
        time.sleep(1)
    inner(trainer)
jobs.trainer.Trainer._check_weights = check
"""


def test_a_metric_that_each_rank_sees_otherwise_stops_no_save(start: Start, tmp_path: Path) -> None:
    """F017: which one is the best is decided once, and all ranks save together."""
    (tmp_path / "metric.py").write_text(OWN_METRIC)
    recipe = tiny(
        data={"global_batch_size": 15},
        train={"until": "40 steps", "eval_every": "5 steps"},
        checkpoint={"every": "10 steps", "best": "eval/accuracy max"},
    )
    ranks = start(tmp_path / "run", recipe, ranks=3, load=[str(tmp_path / "metric.py")])
    assert ranks.wait() == [0, 0, 0], ranks.log()
    assert complete(ranks.run_dir / "checkpoints")[-1] == "step-40"


def test_a_rank_that_never_comes_to_a_save_is_not_waited_for(start: Start, tmp_path: Path) -> None:
    """F017: the others say so within the timeout of the recipe; who is missing, the head agent names."""
    (tmp_path / "never.py").write_text(NEVER_SAVES)
    recipe = tiny(
        data={"global_batch_size": 15},
        train={"until": "40 steps", "eval_every": None},
        checkpoint={"every": "10 steps"},
        network={"timeout": "3s"},
    )
    ranks = start(tmp_path / "run", recipe, ranks=3, load=[str(tmp_path / "never.py")])
    for rank in (0, 1):
        ranks.until(lambda rank=rank: "Error" in ranks.log(rank))
        assert any(word in ranks.log(rank) for word in TIMED_OUT), ranks.log(rank)
    ranks.signal(signal.SIGKILL, 2)
    assert ranks.wait() == [1, 1, 137]
    assert complete(ranks.run_dir / "checkpoints") == []


def test_a_save_that_cannot_be_written_ends_all_ranks_at_once(start: Start, tmp_path: Path) -> None:
    """F084: between two saves a file takes the place of the folder."""
    (tmp_path / "die.py").write_text(
        DIE_AT.replace(
            "os.kill(os.getpid(), signal.SIGKILL)",
            "folder = gradients._parts.checkpoints.folder; folder.rename(f'{folder}.away'); folder.touch()",
        )
    )
    recipe = tiny(train={"until": "40 steps"}, checkpoint={"every": "5 steps", "asynchronous": False})
    ranks = start(tmp_path / "run", recipe, load=[str(tmp_path / "die.py")], rank_env={0: {"DIE_AT": "8"}})
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        error = ranks.log(rank).splitlines()[-1]
        assert error.startswith(f"jobs.checkpoint.SaveError: step-10 could not be written to {tmp_path}"), error
    assert complete(tmp_path / "run" / "checkpoints.away") == ["step-5"]


def test_a_folder_that_cannot_be_written_is_found_before_the_training(start: Start, tmp_path: Path) -> None:
    """F084: before the data is prepared, too."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()
    ranks = start(tmp_path / "run", tiny())
    assert ranks.wait() == [1, 1]
    assert "SaveError: no checkpoint can be written to" in ranks.log()
    assert not ranks.metrics.exists()
