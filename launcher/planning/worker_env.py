"""What one worker finds in its environment: torchrun's names, all of them, and ours. Standard library only.

The agent calls `worker_env` at the start of each attempt; nothing else in the project spells these names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.planning.plan import Plan
from launcher.planning.points import split_point_id
from launcher.redact import NAMES_VARIABLE

TORCHRUN_NAMES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "WORLD_SIZE",
    }
)
"""Every name that torchrun (torch 2.13, two or more workers on a node) adds; a test compares it with a real one."""

LAUNCH_NAMES = frozenset(
    {
        "LAUNCH_ATTEMPT",
        "LAUNCH_CHECKPOINT_DIR",
        "LAUNCH_NODE",
        "LAUNCH_RUN_DIR",
        "LAUNCH_RUN_ID",
        "LAUNCH_STOP_FILE",
    }
)
"""What a worker gets from us besides. Where they mean something, LAUNCH_ADAPTER, LAUNCH_RESUME_FROM, LAUNCH_MEMORY_DIR,
LAUNCH_MEMORY_COUNTS, LAUNCH_CONTROL_FD and LAUNCH_CLOCK_FD too (the last two are set by the agent)."""

FLIGHT_RECORDER = "TORCH_FR_DUMP_TEMP_FILE"
"""How the traces of NCCL's flight recorder begin; the rank follows."""

ROLE = "default"
"""torchrun's role of all workers."""

SIGNALS_TO_HANDLE = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""torchrun's default for `--signals-to-handle`."""


def worker_env(
    plan: Plan,
    *,
    node: int,
    local_rank: int,
    attempt: int,
    restarts: int,
    master_addr: str,
    master_port: int,
    error_file: str,
    newest: str | None = None,
    members: Sequence[int] | None = None,
    memory_dir: str | None = None,
    memory_counts: bool = False,
) -> dict[str, str]:
    """The variables of one worker in one attempt, to be laid over the agent's own environment.

    `attempt` counts from 1 over the whole run; `restarts` are those that were used up before this attempt and are
    taken off the budget that the worker sees. `newest` is what the plan's `resume_newest` has found.
    `members` are the nodes of this attempt in the order of their ranks, None = all of the plan. `memory_dir`: where the
    built-in job keeps states in the memory of this node. `memory_counts`: whether the newest state may be there alone.
    """
    nodes = range(len(plan.nodes)) if members is None else members
    group_rank, world_size = nodes.index(node), len(nodes) * plan.nproc_per_node
    rank = group_rank * plan.nproc_per_node + local_rank
    return {
        **{variable.name: variable.value for variable in plan.env},
        **_device(plan, node),
        **_tracking(plan, rank),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(group_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": ROLE,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(plan.nproc_per_node),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(attempt - 1 + max(0, plan.limits.max_restarts - restarts)),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        # The store is made by rank 0 on MASTER_PORT; "True" would tell the workers that an agent's store is there.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": SIGNALS_TO_HANDLE,
        "LAUNCH_RUN_ID": plan.run_id,
        "LAUNCH_RUN_DIR": plan.run_dir,
        "LAUNCH_CHECKPOINT_DIR": f"{plan.run_dir}/checkpoints",
        "LAUNCH_STOP_FILE": f"{plan.run_dir}/stop",
        "LAUNCH_ATTEMPT": str(attempt),
        "LAUNCH_NODE": str(node),
        **({"LAUNCH_ADAPTER": plan.worker.adapter} if plan.worker.adapter else {}),
        **({"LAUNCH_RESUME_FROM": newest} if newest else {}),
        **({"LAUNCH_MEMORY_DIR": memory_dir} if memory_dir else {}),
        **({"LAUNCH_MEMORY_COUNTS": "1"} if memory_dir and memory_counts else {}),
        **({NAMES_VARIABLE: ",".join(plan.secrets)} if plan.secrets else {}),
    }


def group_of(run_id: str) -> str:
    """What belongs together in W&B: the points of a sweep, else a run alone."""
    point = split_point_id(run_id)
    return run_id if point is None else point[0]


def _device(plan: Plan, node: int) -> dict[str, str]:
    """All devices of the node: each rank picks its own by LOCAL_RANK, as under torchrun. SLURM has set its own."""
    if plan.device != "cuda" or plan.slurm is not None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in plan.nodes[node].gpus)}


def _tracking(plan: Plan, rank: int) -> dict[str, str]:
    """One W&B run over all attempts, written by rank 0 alone."""
    wandb: dict[str, Any] = plan.recipe["tracking"]["wandb"]
    if rank != 0 or wandb["mode"] == "disabled":
        return {"WANDB_MODE": "disabled"}
    return {
        "WANDB_RUN_ID": plan.run_id,
        "WANDB_RESUME": "allow",
        "WANDB_DIR": plan.run_dir,
        "WANDB_RUN_GROUP": group_of(plan.run_id),
    }
