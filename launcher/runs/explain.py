"""Every variable, address, port and interface of a run, each with where it comes from. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.planning.plan import Plan
from launcher.planning.render import how_started
from launcher.planning.worker_env import worker_env
from launcher.runs.events import Event
from launcher.runs.rundir import RunDir
from launcher.runs.times import newest_submission
from launcher.wording import ranges

_MADE: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "plan: the GPUs of its node",
    "GLOO_SOCKET_IFNAME": "agent: the interface of its node that leads to node 0",
    "GROUP_WORLD_SIZE": "plan: nodes",
    "GROUP_RANK": "agent: its node's place in the plan",
    "LAUNCH_": "agent: this run, this attempt",
    "LAUNCH_ALLOCATION": "batch side: which allocation of the run this is, from 1",
    "LOCAL_RANK": "agent: its place on its node",
    "LOCAL_WORLD_SIZE": "plan: workers per node",
    "MASTER_ADDR": "head agent: how the nodes reach node 0",
    "MASTER_PORT": "head agent: free on node 0, another in each attempt",
    "NCCL_SOCKET_IFNAME": "agent: the interface of its node that leads to node 0",
    "RANK": "agent: node x workers per node + its place there",
    "ROLE_": "agent: as torchrun, which calls all workers one role",
    "TMPDIR": "agent: what is left there goes with the run",
    "TP_SOCKET_IFNAME": "agent: the interface of its node that leads to node 0",
    "TORCHINDUCTOR_CACHE_DIR": "agent: where torch keeps it without the TMPDIR above",
    "TORCHELASTIC_ERROR_FILE": "agent: where its traceback is written",
    "TORCHELASTIC_MAX_RESTARTS": "agent: restarts before this attempt + those that are left",
    "TORCHELASTIC_RESTART_COUNT": "agent: attempts before this one",
    "TORCHELASTIC_": "agent: as torchrun",
    "WANDB_MODE": "agent: one W&B run, written by rank 0",
    "WANDB_": "agent: one W&B run over all attempts",
    "WORLD_SIZE": "plan: nodes x workers per node",
}
"""Who makes a variable that is a worker's own; by name or its longest beginning."""

_LIMITS: Mapping[str, tuple[str, str]] = {
    "max_restarts": ("faults.max_restarts", "restarts"),
    "grace_s": ("faults.grace", "seconds to save and leave on a stop"),
    "network_timeout_s": ("network.timeout", "seconds that a collective may take"),
    "join_timeout_s": ("", "seconds for all nodes to come together"),
}
_TORCHRUNS_OWN = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
"""What it tells its workers of itself, where the agent supervises it."""
_NOT_YET = "(when the attempt starts)"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing with a value."""

    name: str
    value: str
    origin: str
    """Where the value comes from and why."""


Sections = dict[str, list[Row]]


def explain(plan: Plan, events: Sequence[Event]) -> Sections:
    """Everything, by what it is about. Sections without content are left out."""
    origins = {value.key: value.origin for value in plan.values}
    sections = {
        "Program": list(_program(plan)),
        "Device and network": list(_place(plan, origins)),
        "Nodes": list(_nodes(plan, events)),
        "Addresses and ports": list(_addresses(plan, events)),
        "Variables of all workers": [Row(name=v.name, value=v.value, origin=v.origin) for v in plan.env],
        "Variables of each worker": _each_worker(plan, events),
        "Taken out of the environment": [
            Row(name=name, value="", origin="an old name; the new one is above") for name in plan.env_unset
        ],
        "Secrets": [
            Row(name=name, value="", origin="your environment; the value is kept nowhere") for name in plan.secrets
        ],
        "W&B": list(_wandb(plan, events)),
        "Limits": list(_limits(plan, origins)),
    }
    return {title: rows for title, rows in sections.items() if rows}


def rank_environment(plan: Plan, events: Sequence[Event], rank: int) -> list[Row]:
    """What one rank finds in its environment in the newest attempt, on top of what `launch` was called in."""
    origins = {variable.name: variable.origin for variable in plan.env}
    environment = _environment(plan, events, rank)
    rows = [
        Row(name=name, value=value, origin=_made_by(plan, name) if name not in origins else origins[name])
        for name, value in environment.items()
    ]
    secrets = [Row(name=name, value="***", origin="your environment") for name in plan.secrets]
    return sorted([*rows, *secrets], key=lambda row: row.name)


def as_text(sections: Sections) -> str:
    """The sections as aligned columns."""
    return "\n\n".join("\n".join([title, *columns(rows)]) for title, rows in sections.items())


def as_fields(sections: Sections) -> dict[str, list[dict[str, str]]]:
    """For `--json`."""
    return {title: [asdict(row) for row in rows] for title, rows in sections.items()}


def columns(rows: Sequence[Row]) -> list[str]:
    """Name, value and origin, aligned; a long value does not push all the others away."""
    cells = [(row.name, _shown(row.value), row.origin) for row in rows]
    name_width = max(len(name) for name, _, _ in cells)
    value_width = min(40, max(len(value) for _, value, _ in cells))
    return [f"  {name:<{name_width}}  {value:<{value_width}}  {origin}".rstrip() for name, value, origin in cells]


def _program(plan: Plan) -> Iterator[Row]:
    worker, code = plan.worker, plan.code
    program = worker.module if worker.module is not None else str(worker.script)
    yield Row(name="recipe", value=plan.recipe_source or "none", origin=" ".join(plan.overrides))
    yield Row(name="runs", value=shlex.join([program, *worker.argv]), origin=how_started(plan))
    yield Row(name="python", value=worker.python, origin=f"engine {plan.engine}{_because(plan.engine_reason)}")
    yield Row(name="folder", value=worker.cwd, origin="cwd of the workers")
    if code is not None:
        where = f"{plan.run_dir}/code" if code.snapshot else code.root
        why = f"a copy of {code.root}" if code.snapshot else f"the live tree: {code.reason}"
        yield Row(name="code", value=where, origin=f"{why}; sha256 {code.sha256[:12]}")
    yield Row(name="record", value=plan.run_dir, origin="")
    for line in plan.setup:
        yield Row(name="setup", value=line, origin="on each node, before its agent")


def _place(plan: Plan, origins: Mapping[str, str]) -> Iterator[Row]:
    yield Row(name="where", value=plan.executor, origin="")
    yield Row(name="device", value=plan.device, origin=plan.device_reason)
    yield Row(name="backend", value=plan.backend, origin=f"of device {plan.device}")
    preset = next((value.value for value in plan.values if value.key == "network.preset"), "auto")
    yield Row(name="preset", value=str(preset), origin=origins.get("network.preset", ""))
    yield Row(name="interface", value=plan.interface, origin=origins.get("network.interface", ""))
    yield Row(name="threads", value=str(plan.threads), origin=origins.get("resources.threads", ""))


def _nodes(plan: Plan, events: Sequence[Event]) -> Iterator[Row]:
    bound = {event.get("node"): event for event in newest_submission(events) if event["event"] == "node_bound"}
    for node in plan.nodes:
        found = bound.get(node.index, {})
        cpus, gpus = found.get("cpus", node.cpus), found.get("gpus", node.gpus)
        where = f"{found.get('host', node.host)}, {found.get('address', node.address)}"
        first = node.index * plan.nproc_per_node
        ranks = ranges(range(first, first + plan.nproc_per_node))
        given = f"ranks {ranks}, CPUs {ranges(cpus) or 'all'}, GPUs {ranges(gpus) or 'none'}"
        yield Row(
            name=f"node {node.index}", value=where, origin=f"{given}{'' if found else ' (planned, not bound yet)'}"
        )


def _addresses(plan: Plan, events: Sequence[Event]) -> Iterator[Row]:
    started = [event for event in events if event["event"] == "supervisor_started"]
    channel = started[-1].get("channel") if started else None
    if channel:
        where = _endpoint(channel["address"], channel["port"])
        yield Row(
            name="agents", value=where, origin="the head agent listens, free port; who knows the run's token gets in"
        )
    why = (
        "network.master_port" if plan.master_port is not None else "free on node 0, bound there until the next attempt"
    )
    for event in events:
        if event["event"] == "attempt_started":
            where = _endpoint(event["master_addr"], event["master_port"])
            yield Row(
                name=f"attempt {event['attempt']}",
                value=where,
                origin=f"MASTER_ADDR:MASTER_PORT, rank 0 listens; {why}",
            )


def _each_worker(plan: Plan, events: Sequence[Event]) -> list[Row]:
    """The values of the first rank and, where it differs, of the last. Paths are shown as they are in a recipe."""
    common = {variable.name: variable.value for variable in plan.env}
    first, last = _environment(plan, events, 0), _environment(plan, events, plan.world_size - 1)
    return [
        Row(
            name=name,
            value=_both(first.get(name), last.get(name)).replace(plan.run_dir, "{run_dir}"),
            origin=_made_by(plan, name),
        )
        for name in sorted(first.keys() | last.keys())
        if name not in common or {first.get(name), last.get(name)} != {common[name]}
    ]


def _both(first: str | None, last: str | None) -> str:
    if first is None:
        return f"{last} (not on rank 0)"
    if last is None or "/" in first:
        return first if first == last else f"{first} (rank 0)"
    return first if first == last else f"{first} ... {last}"


def _environment(plan: Plan, events: Sequence[Event], rank: int) -> dict[str, str]:
    node, local_rank = divmod(rank, plan.nproc_per_node)
    now = newest_submission(events)
    begun = [event for event in now if event["event"] == "attempt_started"]
    bound = [event.get("env", {}) for event in now if event["event"] == "node_bound" and event["node"] == node]
    newest: Event = begun[-1] if begun else {"attempt": 1, "master_addr": plan.nodes[0].address, "master_port": 0}
    before = [event for event in now if event["event"] == "restarting" and event["attempt"] <= newest["attempt"]]
    log = RunDir(Path(plan.run_dir)).log(attempt=newest["attempt"], node=node, rank=rank)
    environment = worker_env(
        plan,
        node=node,
        local_rank=local_rank,
        attempt=newest["attempt"],
        restarts=before[-1]["restarts"] if before else 0,
        master_addr=newest["master_addr"],
        master_port=newest["master_port"],
        error_file=str(log.with_suffix(".error.json")),
        newest=newest.get("resumes_from"),
    )
    environment = {**(bound[-1] if bound else {}), **environment}
    if plan.engine == "torchrun":
        environment |= dict.fromkeys(_TORCHRUNS_OWN, "(torchrun's own)")
    return environment if begun else {**environment, "MASTER_PORT": str(plan.master_port or _NOT_YET)}


def _wandb(plan: Plan, events: Sequence[Event]) -> Iterator[Row]:
    section: dict[str, Any] = plan.recipe["tracking"]["wandb"]
    if section["mode"] == "disabled":
        yield Row(name="mode", value="disabled", origin="tracking.wandb.mode")
        return
    told = [event for event in events if event["event"] == "tracking" and event.get("wandb")]
    seen: dict[str, Any] = told[-1]["wandb"] if told else {}
    asked = f"tracking.wandb.mode: {section['mode']}"
    yield Row(
        name="mode", value=str(seen.get("mode", section["mode"])), origin=f"{asked}{_because(seen.get('reason', ''))}"
    )
    yield Row(name="id", value=plan.run_id, origin="the run id: one curve over all attempts")
    yield Row(name="project", value=section["project"] or plan.name, origin="tracking.wandb.project, else the name")


def _limits(plan: Plan, origins: Mapping[str, str]) -> Iterator[Row]:
    for name, (key, meaning) in _LIMITS.items():
        if name == "network_timeout_s" and plan.worker.kind == "script":
            continue  # its process group is its own
        origin = f"{key} ({origins.get(key, 'default')})" if key else "fixed"
        yield Row(name=name, value=f"{getattr(plan.limits, name):g}", origin=f"{meaning}; {origin}")
    if not plan.resumable:
        yield Row(name="resume", value="no", origin="a script without `resume:`: a failure ends the run")


def _made_by(plan: Plan, name: str) -> str:
    if name == "MASTER_PORT" and plan.master_port is not None:
        return "network.master_port"
    beginnings = [known for known in _MADE if name.startswith(known)]
    return _MADE[max(beginnings, key=len)] if beginnings else "agent"


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _shown(value: str) -> str:
    return value if value.isprintable() else json.dumps(value, ensure_ascii=False)
