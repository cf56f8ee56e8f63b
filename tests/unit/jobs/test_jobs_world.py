from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from jobs import world as module
from jobs.job import place
from jobs.report import clock, progress_line
from jobs.world import Meeting, PeerError, World, WorldError, check_identity, check_size, pick_device


def meet(function: Any, size: int = 3) -> list[Any]:
    """Run function(rank, meeting) for every rank at once; results or exceptions."""
    store = HashStore()

    def one(rank: int) -> Any:
        try:
            return function(rank, Meeting(store, World(rank=rank, size=size, local_rank=rank, local_size=size)))
        except (RuntimeError, OSError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def test_all_ranks_hear_what_each_says() -> None:
    assert meet(lambda rank, meeting: meeting.gather("x", lambda: rank * 10)) == [[0, 10, 20]] * 3


def test_rank_0_decides_for_all() -> None:
    assert meet(lambda rank, meeting: meeting.decide("x", lambda: f"by {rank}")) == ["by 0"] * 3


def test_what_one_rank_cannot_do_fails_on_all() -> None:
    def prepare(rank: int) -> None:
        if rank == 1:
            raise OSError("no space left")

    outcomes = meet(lambda rank, meeting: meeting.gather("prepare the data", lambda: prepare(rank)))
    assert isinstance(outcomes[1], OSError)
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other, PeerError)
        assert str(other) == "rank 1 could not prepare the data: OSError: no space left"


def test_a_long_wait_says_for_whom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """F073."""
    monkeypatch.setattr(module, "REMIND_S", 0.05)
    late = threading.Event()
    threading.Timer(0.4, late.set).start()
    meet(lambda rank, meeting: meeting.gather("prepare the data", lambda: rank == 2 and late.wait(5)))
    assert re.search(r"waiting for rank 2 to prepare the data, \d+ s", capsys.readouterr().out)


def test_ranks_of_different_runs_do_not_train_together() -> None:
    """F034."""
    check_identity(["run a", "run a"])
    with pytest.raises(WorldError, match="rank 0 belongs to run a, rank 1 to run b; they must be the same run"):
        check_identity(["run a", "run b"])


def test_a_rank_that_could_not_see_the_others_does_not_train_alone() -> None:
    """F034; an elastic run may be smaller than its plan, by whole nodes, down to its minimum."""
    check_size(2, range(2, 3, 2))
    with pytest.raises(WorldError, match="the world size is 1, the plan says 2"):
        check_size(1, range(2, 3, 2))
    check_size(4, range(4, 9, 2))
    check_size(1, None)
    for size in (2, 5, 10):
        with pytest.raises(WorldError, match=f"the world size is {size}, the plan says 4 to 8 in steps of 2"):
            check_size(size, range(4, 9, 2))


def test_a_device_that_is_not_there_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(rank=0, size=2, local_rank=0, local_size=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto", world).type == "cpu"
    assert pick_device("cpu", world).type == "cpu"
    with pytest.raises(WorldError, match="cuda, for 2 ranks on this node; CUDA devices here: 1"):
        pick_device("cuda", world)
    with pytest.raises(WorldError, match="cuda:0 is one GPU, and this node has 2 ranks; use cuda"):
        pick_device("cuda:0", world)
    alone = World(rank=0, size=1, local_rank=0, local_size=1)
    with pytest.raises(WorldError, match="cuda:1, for 1 rank on this node; CUDA devices here: 1"):
        pick_device("cuda:1", alone)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert pick_device("cuda:1", alone) == torch.device("cuda", 1)
    assert pick_device("cuda", alone) == torch.device("cuda", 0)


def test_an_environment_without_ranks_is_explained() -> None:
    with pytest.raises(WorldError, match=r"^RANK, LOCAL_WORLD_SIZE: not set; start this with"):
        World.from_env({"WORLD_SIZE": "1", "LOCAL_RANK": "0"})


def test_by_hand_each_run_has_its_folder_and_a_restart_goes_on_in_its_own(tmp_path: Path) -> None:
    first = place("demo", attempt=1, root=tmp_path)
    assert Path(first).name == "demo-torchrun"
    assert place("demo", attempt=2, root=tmp_path) == first
    assert Path(place("demo", attempt=1, root=tmp_path)).name == "demo-torchrun-2"
    (tmp_path / "demo-torchrun" / "torchrun").write_text("another host 1 29500\n")
    (tmp_path / "demo-torchrun-2" / "torchrun").write_text("another host 1 29500\n")
    with pytest.raises(ValueError, match="attempt 2: no run directory of an earlier attempt"):
        place("demo", attempt=2, root=tmp_path)


def test_progress_reads_as_promised() -> None:
    line = progress_line(
        step=100, total_steps=632, steps_per_epoch=79, loss=0.3124, lr=0.0019, samples_per_s=4050.4, left_s=12.4
    )
    assert line == "step 100/632  epoch 1.3/8  loss 0.312  lr 1.9e-03  4,050 samples/s  eta 0:12"
    short = progress_line(step=50, total_steps=60, steps_per_epoch=157, loss=1, lr=1, samples_per_s=1, left_s=1)
    assert short.startswith("step 50/60  epoch 0.3/0.4  ")
    assert [clock(s) for s in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def test_importing_the_job_starts_nothing() -> None:
    """A process that has imported it must be safe to fork: one thread, and no process group."""
    program = (
        "import os, sys, jobs.train, torch.distributed as dist;"
        "assert len(os.listdir('/proc/self/task')) == 1, os.listdir('/proc/self/task');"
        "assert not dist.is_initialized();"
        "assert {'torch._dynamo', 'jobs.models.convnet', 'jobs.data.mnist', 'jobs.parallel.ddp'} <= set(sys.modules);"
        "assert not {'wandb', 'tensorboard'} & set(sys.modules)"
    )
    # numpy starts threads of its own for linear algebra, and ends them before a fork by itself
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=env)
