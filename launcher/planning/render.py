"""A plan as text: what `--dry-run` prints. Pure, plain, and the same words as in the plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from launcher.planning.codeplan import code_text
from launcher.planning.parallel import sharing_text
from launcher.planning.program import JOB_MODULE
from launcher.planning.slurm import FIRST_ONLY, ends_text
from launcher.planning.ssh import ssh_argv
from launcher.planning.worker_env import worker_env
from launcher.recipe.schema import ParallelismSection
from launcher.wording import count, duration, ranges, shortened

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.plan import EnvVar, HostsPlan, NodePlan, Plan, SkyPlan, SlurmPlan

MANY_NODES = 8
"""Beyond this many, the first two and the last stand for all."""

_ADAPTED = {"lightning": "Lightning", "hf": "the Hugging Face Trainer"}

_GROUPS = ("recipe and command line", "your environment", "presets and auto", "defaults")


def render_plan(plan: Plan, facts: Facts | None = None, *, verbose: bool = False) -> str:
    """What would run, where, and where each value comes from. `verbose` adds the values that nobody set."""
    blocks = [
        [f"{plan.run_id}   dry run: nothing was started"],
        _summary(plan, facts),
        _titled("Nodes", _nodes(plan)),
        _titled("Values" if verbose else "Values that are set or chosen (-v: all)", _values(plan, verbose=verbose)),
        _titled("Environment of the workers", _environment(plan, verbose=verbose)),
        _titled("Limits", _limits(plan)),
        _titled("Once, where `launch` is called, by `bash -euo pipefail`", _lines(plan.prepare)),
        _titled("Before, on each node, by `bash -euo pipefail`", _lines(plan.setup)),
        *_started_by(plan),
        _titled("Notes", [f"- {note}" for note in plan.notes]),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _started_by(plan: Plan) -> list[list[str]]:
    """The commands: of the agents, and the same by hand."""
    slurm = plan.slurm
    if plan.sky is not None:
        return _on_rented(plan.sky)
    if plan.hosts is not None:
        return _on_machines(plan, plan.hosts)
    if slurm is None:
        return [
            _titled("Agent", [shlex.join(plan.agent_argv)]),
            _titled("The same by hand, one line per node", _some(plan.torchrun)),
        ]
    once = [f"{flag.flag}={flag.value}" for flag in slurm.flags if flag.flag in (*FIRST_ONLY, "--array")]
    blocks = [_titled("Job", _job(plan, slurm))]
    if slurm.script:
        blocks.append(
            _titled(f"Batch script, submitted by `{shlex.join(['sbatch', *once])}`", slurm.script.splitlines())
        )
    else:
        blocks.append(_titled("Batch side, on this machine", [shlex.join(plan.agent_argv)]))
    return [
        *blocks,
        _titled("It starts one agent per node by", [shlex.join(slurm.srun)]),
        _titled("The same by hand, inside an allocation", plan.torchrun),
    ]


def _on_rented(sky: SkyPlan) -> list[list[str]]:
    """The task of SkyPilot, and the commands around it."""
    kept = sky.store or "on the machines alone: it is copied from there, before they are taken down"
    rows = [["stop", shlex.join(sky.stop)], ["take down", shlex.join(sky.remove) or "by SkyPilot's jobs controller"]]
    rows += [["output", shlex.join(sky.logs)], ["record", kept], *([["price", sky.price]] if sky.price else [])]
    return [
        _titled(f"Task, submitted by `{shlex.join(sky.submit)}`", sky.task.splitlines()),
        _titled("Then", _table(rows)),
    ]


def _on_machines(plan: Plan, hosts: HostsPlan) -> list[list[str]]:
    """The line of each node, as it is run on its machine, and what is run around them here."""
    config = (plan.recipe.get("ssh") or {}).get("config")
    lines = []
    for node in hosts.nodes:
        line = ssh_argv(node.machine, node.start, config=config) if node.machine else node.start
        lines.append(shlex.join(line))
    blocks = [_titled("Before", [shlex.join(argv) for argv in hosts.before])] if hosts.before else []
    blocks.append(_titled("Nodes, each started by", _some(lines)))
    if not hosts.shared:
        text = "the hosts do not see it here: it is copied there by ssh and tar, and comes home while it runs"
        blocks.append(_titled("Run directory", [text]))
    blocks += [_titled("After", [shlex.join(argv) for argv in hosts.after])] if hosts.after else []
    return [*blocks, _titled("The same by hand, one line per node", _some(plan.torchrun))]


def _job(plan: Plan, slurm: SlurmPlan) -> list[str]:
    flags = [[f"{flag.flag}={flag.value}" if flag.value else flag.flag, flag.key] for flag in slurm.flags]
    then = [["ends", ends_text(slurm)]]
    if slurm.chain:
        then.append(["jobs", f"{slurm.chain} at once, each after the one before"])
    limits = plan.limits
    most = [
        *([f"{duration(limits.wall_s)} with workers"] if limits.wall_s is not None else []),
        *([f"{limits.gpu_hours:g} GPU hours"] if limits.gpu_hours is not None else []),
        *([f"until {plan.recipe['limits']['until']}"] if limits.until_s is not None else []),
    ]
    if most:
        then.append(["in all", ", ".join(most)])
    return [*_table(flags), *_table(then)]


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    """A block, or nothing."""
    return [title, *(f"  {line}".rstrip() for line in lines)] if lines else []


def _summary(plan: Plan, facts: Facts | None) -> list[str]:
    rows = [
        ("recipe", plan.recipe_source or "none: a script of your own"),
        ("runs", _program(plan)),
        *([("code", code_text(plan.code))] if plan.code is not None else []),
        ("in", plan.worker.cwd),
        ("where", _where(plan)),
        ("workers", f"{_number(plan.ranks_text)} = {plan.nodes_text} x {plan.nproc_per_node} per node"),
        *([("strategy", _strategy(plan))] if plan.worker.kind == "job" else []),
        ("device", f"{plan.device} ({plan.device_reason}), {plan.backend} over {plan.interface}"),
        ("record", plan.run_dir),
    ]
    if facts is not None:
        torch = "no torch" if facts.torch_version is None else f"torch {facts.torch_version}"
        machine = f"{facts.hostname}: {count(facts.num_cpus, 'CPU')}, {count(len(facts.gpus), 'GPU')}"
        python = "" if facts.interpreter is not None else f", Python {facts.python_version}, {torch}"
        where = next(index for index, (name, _) in enumerate(rows) if name == "where")
        rows.insert(where, ("machine", f"{machine}{python}"))
        if (found := facts.interpreter) is not None:
            rows.insert(where + 1, ("python", f"{found.path}: Python {found.version}, torch {found.torch_version}"))
    return [f"{name:<9}{value}" for name, value in rows]


def _strategy(plan: Plan) -> str:
    """How the ranks share the work, with the degrees."""
    section, most = ParallelismSection.model_validate(plan.recipe["parallelism"]), len(plan.nodes)
    return sharing_text(section, least=plan.min_nodes or most, most=most, nproc=plan.nproc_per_node)


def _number(text: str) -> str:
    """`2 to 8 ranks` without the last word."""
    return text.rpartition(" ")[0]


def _program(plan: Plan) -> str:
    worker = plan.worker
    words = [str(worker.script)] if worker.module is None else ["-m", worker.module]
    program = JOB_MODULE if worker.kind == "job" else shlex.join([*words, *worker.argv])
    by = "by torchrun, " if plan.engine == "torchrun" else ""
    return f"{program}, {by}{how_started(plan)}"


def how_started(plan: Plan) -> str:
    """Where the process of a worker comes from."""
    if plan.worker.preload is None:
        return "each worker in a fresh interpreter"
    return f"forked from a process that has imported {', '.join(('torch', *plan.worker.preload))}"


def _where(plan: Plan) -> str:
    if plan.slurm is not None:
        place = f"partition {plan.slurm.partition}" if plan.slurm.partition else "the default partition"
        return "slurm: " + place if plan.slurm.script else "here: the allocation that this is in"
    if plan.sky is not None:
        kind = "a managed job" if plan.sky.managed else "a cluster"
        return f"sky: {kind} of SkyPilot, {plan.sky.name}"
    if plan.hosts is not None:
        machines = [node.machine for node in plan.hosts.nodes]
        where = shortened(", ".join(machines), 60) if any(machines) else "this machine"
        return f"{plan.executor}: {count(len(machines), 'node')} on {where}"
    return "local: " + (
        "this machine" if len(plan.nodes) == 1 else f"{len(plan.nodes)} nodes on this machine, {len(plan.nodes)} agents"
    )


def _nodes(plan: Plan) -> list[str]:
    rows = [_node(plan, node) for node in plan.nodes] if len(plan.nodes) <= MANY_NODES else _few_nodes(plan)
    return _table([["node", "host", "address", "ranks", "CPUs", "GPUs"], *rows])


def _few_nodes(plan: Plan) -> list[list[str]]:
    first, second, last = (_node(plan, plan.nodes[index]) for index in (0, 1, -1))
    return [first, second, ["..."], last]


def _node(plan: Plan, node: NodePlan) -> list[str]:
    first = node.index * plan.nproc_per_node
    ranks = ranges(range(first, first + plan.nproc_per_node))
    host, address = node.host or "-", node.address or "-"
    return [str(node.index), host, address, ranks, ranges(node.cpus) or "all", ranges(node.gpus) or "-"]


def _values(plan: Plan, *, verbose: bool) -> list[str]:
    shown = [item for item in plan.values if verbose or item.origin != "default"]
    if plan.slurm is None:  # what a recipe says to SLURM stays in it, and counts elsewhere
        shown = [item for item in shown if not item.key.startswith("slurm.")]
    if plan.sky is None:
        shown = [item for item in shown if not item.key.startswith("sky.")]
    return _table([[item.key, _text(item.value), item.origin] for item in shown])


def _environment(plan: Plan, *, verbose: bool) -> list[str]:
    """All variables by who decided, then those that are made for each worker."""
    lines: list[str] = []
    for number, title in enumerate(_GROUPS):
        group = [variable for variable in plan.env if _group(variable) == number]
        rows = _table([[f"  {item.name}", _text(item.value), "" if number == 3 else item.origin] for item in group])
        lines += [title, *rows] if rows else []
    if plan.env_unset:
        lines += ["taken out", *(f"  {name}" for name in plan.env_unset)]
    if plan.secrets:
        lines += ["secret, from your environment", *(f"  {name}" for name in plan.secrets)]
    own = _own_names(plan)
    short = [f"RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LAUNCH_RUN_DIR and {len(own) - 6} more (-v: all)"]
    return [
        *lines,
        "each worker's own, fresh for each attempt",
        *(f"  {line}" for line in (_filled(own) if verbose else short)),
    ]


def _own_names(plan: Plan) -> list[str]:
    """Names whose values are made for one worker in one attempt; rank 0 has them all."""
    first = worker_env(plan, node=0, local_rank=0, attempt=1, restarts=0, master_addr="", master_port=0, error_file="")
    return sorted(first.keys() - {variable.name for variable in plan.env})


def _group(variable: EnvVar) -> int:
    if variable.origin == "default":
        return 3
    if variable.origin.startswith(("auto: ", "preset ")):
        return 2
    return 1 if variable.origin == "environment" else 0


def _limits(plan: Plan) -> list[str]:
    limits = plan.limits
    port = "a free one for each attempt" if plan.master_port is None else f"{plan.master_port}, fixed"
    return _table(
        [
            ["restarts", str(limits.max_restarts), _after_failure(plan)],
            ["stop", _seconds(limits.grace_s), "to save and leave, then killed"],
            ["collective", *_collective(plan)],
            ["joining", _seconds(limits.join_timeout_s), "for all nodes to come together"],
            ["threads", str(plan.threads), "per worker"],
            ["port", port],
        ]
    )


def _collective(plan: Plan) -> tuple[str, str]:
    if plan.worker.kind == "script":
        return "-", "as long as the script's own process group says"
    return _seconds(plan.limits.network_timeout_s), "before a rank counts as stuck"


def _after_failure(plan: Plan) -> str:
    """What a restart goes on from, or why there is none."""
    worker = plan.worker
    if not plan.resumable:
        return "a failure ends the run: there is no `resume:`"
    if plan.limits.max_restarts == 0:
        return "a failure ends the run"
    if worker.kind == "job":
        return f"of the whole group, from the last checkpoint{_stored(plan)}"
    if worker.resume_newest is not None:
        return f"of the whole group, with {shlex.join(worker.resume_argv)} where {worker.resume_newest} finds one"
    if worker.adapter is not None:
        return f"of the whole group, from the newest checkpoint that {_ADAPTED[worker.adapter]} has saved"
    return "of the whole group; the script finds its own checkpoint"


def _stored(plan: Plan) -> str:
    """Where else than in the run directory checkpoints are."""
    store = plan.recipe.get("checkpoint", {}).get("store", "shared")
    if store == "replicate":
        return ", which is whole on two disks where the nodes share none"
    return "" if store == "shared" else f", the newest also at {store}"


def _lines(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in text.splitlines()]


def _some(lines: Sequence[str]) -> list[str]:
    """All lines of a few nodes; the first two and the last of many."""
    return list(lines) if len(lines) <= MANY_NODES else [*lines[:2], "...", lines[-1]]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns, two spaces apart."""
    widths = [max((len(row[column]) for row in rows if len(row) > column + 1), default=0) for column in range(8)]
    return ["  ".join(cell.ljust(widths[column]) for column, cell in enumerate(row)).rstrip() for row in rows]


def _filled(names: Sequence[str], width: int = 90) -> Iterator[str]:
    """Names in lines of at most `width` columns."""
    line = ""
    for name in names:
        if line and len(line) + 1 + len(name) > width:
            yield line
            line = ""
        line = f"{line} {name}".strip()
    yield line


def _text(value: Any) -> str:
    """As it was written, unless that would break the line."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, ensure_ascii=False)


def _seconds(time_s: float) -> str:
    return f"{time_s:g} s"
