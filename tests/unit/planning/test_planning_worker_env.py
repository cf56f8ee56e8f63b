"""A worker's environment is torchrun's, all of it, plus ours."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planning_values import facts, job, plan

from launcher.planning.plan import CODE, Plan, local_agent_argv
from launcher.planning.program import placeholders_of
from launcher.planning.worker_env import LAUNCH_NAMES, TORCHRUN_NAMES, worker_env
from launcher.runs.rundir import RunDir


def environment(of: Plan, *, node: int = 0, local_rank: int = 0, attempt: int = 1, restarts: int = 0) -> dict[str, str]:
    return worker_env(
        of,
        node=node,
        local_rank=local_rank,
        attempt=attempt,
        restarts=restarts,
        master_addr="127.0.0.1",
        master_port=1234,
        error_file="/tmp/error.json",
    )


@pytest.mark.process
def test_the_names_are_those_of_a_real_torchrun_and_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "dump.py").write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(dict(os.environ)))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    bare["TMPDIR"] = str(tmp_path)  # where torchrun leaves a folder
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--node-rank", "0"),
            *("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)),
            *(str(tmp_path / "dump.py"), str(tmp_path)),
        ],
        env=bare,
        check=True,
        capture_output=True,
        timeout=120,
    )
    theirs = {rank: json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)}
    made = plan(job(resources={"nproc_per_node": 2}), facts())
    inherited = bare.keys() | {"LC_CTYPE"}  # Python sets LC_CTYPE for itself where no locale is given
    assert theirs[1].keys() - inherited == TORCHRUN_NAMES
    for rank in (0, 1):
        ours = environment(made, local_rank=rank)
        network = {variable.name for variable in made.env} - TORCHRUN_NAMES
        tracking = {name for name in ours if name.startswith("WANDB_")}
        assert ours.keys() == TORCHRUN_NAMES | LAUNCH_NAMES | network | tracking
        own = {"MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}
        # torchrun allows no restarts unless told to, and its agent holds the store; here rank 0 does.
        own |= {"TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"}
        same = TORCHRUN_NAMES - own
        assert {name: ours[name] for name in same} == {name: theirs[rank][name] for name in same}


@pytest.mark.parametrize(("node", "local_rank", "rank"), [(0, 0, 0), (0, 2, 2), (1, 0, 3), (1, 2, 5)])
def test_ranks_follow_the_order_of_the_plan(node: int, local_rank: int, rank: int) -> None:
    made = plan(job(resources={"nodes": 2, "nproc_per_node": 3}, batch=120), facts())
    ours = environment(made, node=node, local_rank=local_rank)
    assert (
        ours.items()
        >= {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(node),
            "WORLD_SIZE": "6",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_WORLD_SIZE": "2",
            "LAUNCH_NODE": str(node),
        }.items()
    )


def test_folders_are_the_same_in_every_attempt() -> None:
    made = plan(job(), facts())
    first, third = environment(made), environment(made, attempt=3, restarts=2)
    for name in ("LAUNCH_RUN_DIR", "LAUNCH_CHECKPOINT_DIR", "LAUNCH_STOP_FILE", "LAUNCH_RUN_ID", "WANDB_RUN_ID"):
        assert first[name] == third[name]
    assert first["LAUNCH_CHECKPOINT_DIR"] == "/home/ada/project/runs/r0/checkpoints"
    assert third.items() >= {"LAUNCH_ATTEMPT": "3", "TORCHELASTIC_RESTART_COUNT": "2"}.items()


def test_a_plan_spells_the_run_directory_as_rundir_does() -> None:
    """Planning is below `runs`, and cannot ask it."""
    made = plan(job(), facts())
    run, first = RunDir(Path(made.run_dir)), environment(made)
    assert first["LAUNCH_CHECKPOINT_DIR"] == str(run.checkpoints)
    assert first["LAUNCH_STOP_FILE"] == str(run.stop_file)
    assert placeholders_of(job(), made.run_dir, 1)["checkpoint_dir"] == str(run.checkpoints)
    assert Path(made.run_dir, CODE) == run.code
    assert str(run.agent_start) in local_agent_argv("/elsewhere/python", made.run_dir, own=False)


def test_the_restart_budget_shrinks_with_restarts_and_not_with_resumes() -> None:
    made = plan(job(), facts())

    def left(attempt: int, restarts: int) -> int:
        ours = environment(made, attempt=attempt, restarts=restarts)
        return int(ours["TORCHELASTIC_MAX_RESTARTS"]) - int(ours["TORCHELASTIC_RESTART_COUNT"])

    assert [left(1, 0), left(2, 1), left(4, 3), left(5, 0)] == [3, 2, 0, 3]


def test_one_wandb_run_written_by_rank_0() -> None:
    made = plan(job(resources={"nproc_per_node": 2}), facts())
    assert (
        environment(made).items() >= {"WANDB_RUN_ID": "r0", "WANDB_RESUME": "allow", "WANDB_DIR": made.run_dir}.items()
    )
    assert "WANDB_MODE" not in environment(made)
    assert environment(made, local_rank=1)["WANDB_MODE"] == "disabled"
    assert "WANDB_RUN_ID" not in environment(made, local_rank=1)
    off = plan(job(tracking={"wandb": {"mode": "disabled"}}), facts())
    assert environment(off)["WANDB_MODE"] == "disabled"


def test_a_worker_sees_all_devices_of_its_node_and_no_others() -> None:
    made = plan(job(resources={"nodes": 2}), facts(gpus=4))
    assert environment(made, node=1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environment(plan(job(), facts()))


def test_ranks_cannot_be_set_from_outside() -> None:
    made = plan(job(), facts(environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}))
    assert environment(made)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"


def test_what_a_script_resumes_from_and_its_adapter_are_there_where_there_is_one() -> None:
    made = plan(job(), facts())
    assert not {"LAUNCH_ADAPTER", "LAUNCH_RESUME_FROM"} & environment(made).keys()
    adapted = replace(made, worker=replace(made.worker, adapter="hf"))
    known = {"master_addr": "::1", "master_port": 1, "error_file": "e", "attempt": 2, "restarts": 1}
    ours = worker_env(adapted, node=0, local_rank=0, newest="/runs/r0/out/checkpoint-500", **known)
    assert ours.items() >= {"LAUNCH_ADAPTER": "hf", "LAUNCH_RESUME_FROM": "/runs/r0/out/checkpoint-500"}.items()


def test_that_memory_may_hold_the_newest_state_is_said_where_there_is_memory() -> None:
    made = plan(job(), facts())
    order = {"node": 0, "local_rank": 0, "attempt": 2, "restarts": 1, "master_addr": "127.0.0.1", "master_port": 1234}
    for folder, counts, seen in ((None, True, False), ("/dev/shm/x", False, False), ("/dev/shm/x", True, True)):
        env = worker_env(made, **order, error_file="", memory_dir=folder, memory_counts=counts)
        assert ("LAUNCH_MEMORY_COUNTS" in env) == seen
