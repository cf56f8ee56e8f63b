"""The plan: every node, rank, variable, command and limit of a run, as a value.

Made by `make.make_plan`, shown by `--dry-run`, the only thing an executor and an agent see, kept as plan.json.
Standard library only, since the agent reads it on the node. No secret is ever in it.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.wording import between

PLAN_VERSION = 4
CODE = "code"
"""The folder of the copy of the code, in the run directory."""
AGENT_START = str(Path(__file__).resolve().parents[1] / "agent" / "start.py")
"""What our own interpreter runs."""


def local_agent_argv(python: str, run_dir: str, *, own: bool = True) -> tuple[str, ...]:
    """The command that starts all agents of a local run.

    An interpreter that is not our `own` has nothing of ours: the agent travels in the run directory.
    """
    start = AGENT_START if own else f"{run_dir}/agent/start.py"
    return (python, "-P", start, "--run-dir", run_dir, "--local")


def slurm_agent_argv(python: str, run_dir: str, mode: str, *, own: bool = True) -> tuple[str, ...]:
    """The commands of a SLURM job. mode: `batch`, once on the first node, which starts and outlives the agents;
    `task`, the agent of the node that it is started on, by srun.
    """
    start = AGENT_START if own else f"{run_dir}/agent/start.py"
    return (python, "-P", start, "--run-dir", run_dir, f"--{mode}")


def node_agent_argv(local_argv: Sequence[str], node: int, head: tuple[str, int]) -> tuple[str, ...]:
    """`Plan.agent_argv` of a plan whose nodes are machines of their own, for one of them.

    head: address and port of the head agent, on node 0.
    """
    address = f"[{head[0]}]" if ":" in head[0] else head[0]
    return (*local_argv[:-1], "--node", str(node), "--head", f"{address}:{head[1]}")


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    """One environment variable of the workers, and where its value comes from."""

    name: str
    value: str
    origin: str
    """`recipe:network.nccl.DEBUG`, `--flag`, `environment`, `preset loopback`, `default`, `plan`."""


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node: who it is and what it gives."""

    index: int
    """Node rank. Node 0 hosts the head agent and rank 0."""
    host: str
    """Empty: not known before the job starts; bound on the node (`node_bound`)."""
    address: str
    """How the other nodes reach it. Empty as `host`."""
    cpus: tuple[int, ...]
    """CPUs its workers may use (affinity). Empty = all that its agent has."""
    gpus: tuple[int, ...]
    """Device indices its workers use, one per local rank. Empty on CPU."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """What each rank runs."""

    kind: str
    """`job`: jobs.train; `script`: a file of the user's."""
    module: str | None
    """The module whose `main(argv)` is called (kind job), or that is run as `python -m` would (kind script)."""
    script: str | None
    """Absolute path of the file (kind script without a module)."""
    argv: tuple[str, ...]
    """Arguments. `{attempt}` and `{newest}` in them are filled by the agent (`placeholders.attempt_argv`)."""
    cwd: str
    preload: tuple[str, ...] | None
    """Modules imported once, before the workers are forked. None = each worker is a fresh interpreter."""
    python: str
    """The interpreter."""
    adapter: str | None = None
    """`lightning` or `hf`: its own save on a stop and its own resume are switched on in the worker."""
    resume_newest: str | None = None
    """Pattern for `glob`, absolute; the newest that it finds is `{newest}`. Node 0 looks, once per attempt."""
    resume_argv: tuple[str, ...] = ()
    """Arguments that are added where `resume_newest` finds something."""
    progress_log: str | None = None
    """Regular expression with one group: the step, in what rank 0 prints."""


@dataclass(frozen=True, kw_only=True)
class CodePlan:
    """Which code runs: what a resume compares."""

    root: str
    """The live folder: the workdir of a script, the folder of the package for the built-in job."""
    snapshot: bool
    """Whether the workers run a copy, in the run directory's `code/`. Else the live tree."""
    reason: str
    """Why there is no snapshot; empty where there is one."""
    sha256: str
    """Over names and contents of its files."""
    files: int = 0
    """How many files are copied, or watched in the live tree."""
    size_bytes: int = 0


WITH_CLOCK = "restart_with_clock"
"""What follows a hang of a script that may have a step clock: `restart` if it has marked a step, else `report`."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Budgets and waits."""

    max_restarts: int
    grace_s: float
    network_timeout_s: float
    join_timeout_s: float
    """How long the head agent waits for all nodes."""
    hang_timeout_s: float | None = None
    """Without a step for so long, the run hangs. None with `learns_hang_timeout`: learned; None without: never."""
    learns_hang_timeout: bool = False
    on_hang: str = "report"
    """`report`, `restart`, or WITH_CLOCK."""
    wall_s: float | None = None
    """Of the whole run, with workers; so are the next two."""
    gpu_hours: float | None = None
    until_s: float | None = None
    """A moment, in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True)
class SbatchFlag:
    """One line `#SBATCH FLAG=VALUE`, and who set it."""

    flag: str
    """`--partition`."""
    value: str
    """Empty: a switch without a value."""
    key: str
    """Of the recipe: `slurm.partition`, `resources.nodes`. `plan`: ours."""


@dataclass(frozen=True, kw_only=True)
class SlurmPlan:
    """The job of a run on SLURM."""

    flags: tuple[SbatchFlag, ...]
    script: str
    """The batch script, whole: what is submitted. It ends in `Plan.agent_argv`, the batch side."""
    srun: tuple[str, ...]
    """What the batch side runs on all nodes: srun, the container if there is one, and the agent of a node."""
    continue_how: str
    """`requeue`, `resubmit`, `chain` or `none`: who starts the next allocation when this one ends before the run."""
    continue_reason: str
    """Why it is that one, as a sentence without a full stop."""
    chain: int = 0
    """How many jobs are submitted at once, with `chain`."""
    partition: str = ""
    """Where it goes, as far as that is known: the one asked for, else the default of the cluster."""
    time_s: float | None = None
    """Limit of one allocation, where it is known."""
    kill_wait_s: float = 30.0
    """From TERM to KILL, as the site has set it (30 s by default)."""
    cpus_per_node: int
    gpus_per_node: int = 0
    interface: str = "auto"
    """Of the head agent's address; `auto`: the one that leads to the other nodes."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of a machine that a container of it sees."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, kw_only=True)
class HostNode:
    """One node of a run on Docker or ssh: where it is, and how it is started and stopped there."""

    machine: str
    """An ssh destination; empty: the machine that launches."""
    name: str
    """`RUN_ID-node-K`: of its container, or of the files of its process."""
    start: tuple[str, ...]
    """What is run on its machine, as it is: returns at once, and the agent goes on without whoever has started it."""
    stop: tuple[str, ...]
    """What stops the agent there, with a checkpoint. For people: the launcher sends the signals that it means."""
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostsPlan:
    """The nodes of a run on Docker or ssh. Their agents are started detached: no connection is needed to keep them."""

    nodes: tuple[HostNode, ...]
    head_address: str
    """Of node 0, by which the other nodes reach it: an address, or a name that they know."""
    head_port: int
    """Of the head agent there."""
    image: str = ""
    """Of the containers."""
    network: str = ""
    """The Docker network that is made for the run; empty: none."""
    before: tuple[tuple[str, ...], ...] = ()
    """Commands on the machine that launches, before the first node is started."""
    after: tuple[tuple[str, ...], ...] = ()
    """The same after the last one is removed."""
    shared: bool = True
    """Whether all nodes, and the machine that launches, see one run directory."""


@dataclass(frozen=True, kw_only=True)
class SkyPlan:
    """The run as a task of SkyPilot, which rents the machines, runs it on each, and takes them down."""

    name: str
    """Of SkyPilot's managed job, else of its cluster."""
    managed: bool
    """Whether SkyPilot's jobs controller rents other machines when some are lost."""
    task: str
    """The task file, whole: what SkyPilot loads."""
    submit: tuple[str, ...]
    """What is run on the machine that launches."""
    state: tuple[tuple[str, ...], ...]
    """What says how it is, as JSON: the job first, then, without a controller, its machines."""
    stop: tuple[str, ...]
    """What stops it: its processes get TERM, and KILL 30 s later."""
    remove: tuple[str, ...]
    """What takes its machines down at once; empty: the jobs controller does."""
    logs: tuple[str, ...]
    """What shows its output."""
    head_port: int
    """Of the head agent, on the first of SKYPILOT_NODE_IPS."""
    store: str = ""
    """Where the nodes keep the record of the run, below its id; empty: on their own disks alone."""
    price: str = ""
    """What the machines cost, as far as the plan can say: the most per hour that they may."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A resolved value of the recipe and where it comes from, for --dry-run."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything an executor and an agent need to know."""

    version: int = PLAN_VERSION
    run_id: str
    name: str
    executor: str
    run_dir: str
    """Absolute."""
    recipe_source: str | None
    """Absolute path of the recipe, None for `launch script.py`."""
    overrides: tuple[str, ...]
    recipe: dict[str, Any]
    """The resolved recipe, as a user would write it; `Recipe.model_validate` reads it back."""
    values: tuple[Value, ...]
    nodes: tuple[NodePlan, ...]
    nproc_per_node: int
    device: str
    """cpu or cuda."""
    device_reason: str
    backend: str
    """gloo or nccl."""
    interface: str
    """Network interface of the collectives."""
    threads: int
    """CPU threads per worker."""
    master_port: int | None
    """None = chosen on node 0, fresh for each attempt."""
    worker: WorkerPlan
    engine: str = "agent"
    """`agent`: ours starts and restarts the workers. `torchrun`: ours supervises the plan's torchrun line of each node,
    where the interpreter has a torch that ours does not know."""
    engine_reason: str = ""
    code: CodePlan | None = None
    """None: a file without a folder of its own."""
    secrets: tuple[str, ...] = ()
    """Names of variables whose values are in nothing that is written."""
    setup: tuple[str, ...] = ()
    """Lines of bash, run on each node before its agent."""
    env: tuple[EnvVar, ...]
    """Of every worker, sorted by name; ranks, addresses and LAUNCH_* are added per attempt by the agent."""
    env_unset: tuple[str, ...] = ()
    """Names to take out of the inherited environment: old spellings, forwarded in `env` under the new ones."""
    limits: Limits
    preflight: bool = False
    """Whether the nodes are measured, and reach for each other, before the first attempt."""
    resumable: bool
    """Whether a restart can go on from a checkpoint. Where it cannot, nothing is restarted."""
    rescue: bool = False
    """Whether the state of surviving workers is kept in memory for the next attempt."""
    agent_argv: tuple[str, ...]
    """The command that starts all agents of a local run, or one agent with `--node K` in place of `--local`."""
    slurm: SlurmPlan | None = None
    """On SLURM only."""
    hosts: HostsPlan | None = None
    """On Docker and ssh only."""
    sky: SkyPlan | None = None
    """On machines that SkyPilot rents only."""
    min_nodes: int | None = None
    """With how few of `nodes` the run goes on. None: it has a fixed size."""
    prepare: tuple[str, ...] = ()
    """Lines of bash, run once where `launch` is called, before the submission."""
    internet: bool = True
    watch_s: float | None = None
    """How often each node measures its devices. None: never."""
    scratch: str | None = None
    """Where a node's temporary files go; expanded by bash there."""
    torchrun: tuple[str, ...]
    """The equivalent command of each node, to be run by hand."""
    notes: tuple[str, ...]
    """What a user should know: conflicts, values that were chosen and why."""

    @property
    def forks_workers(self) -> bool:
        """Whether the workers come from a process that has imported torch. Else nothing of ours imports it."""
        return self.engine == "agent" and self.worker.preload is not None

    @property
    def live_script(self) -> str | None:
        """Where the user's own file of the script lies; the workers may run a copy, in the run directory's `code/`."""
        script, code = self.worker.script, self.code
        if script is None or code is None or not code.snapshot:
            return script
        return posixpath.normpath(posixpath.join(code.root, posixpath.relpath(script, f"{self.run_dir}/{CODE}")))

    @property
    def is_elastic(self) -> bool:
        """Whether it goes on with fewer nodes than it wants."""
        return self.min_nodes is not None

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes, when all are there."""
        return len(self.nodes) * self.nproc_per_node

    @property
    def nodes_text(self) -> str:
        """`2 nodes`, `1 to 4 nodes`."""
        return between(self.min_nodes, len(self.nodes), "node")

    @property
    def ranks_text(self) -> str:
        """`4 ranks`, `2 to 8 ranks`."""
        least = None if self.min_nodes is None else self.min_nodes * self.nproc_per_node
        return between(least, self.world_size, "rank")

    def to_json(self) -> str:
        """The plan as text; `from_json` reads it back to an equal plan."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises ValueError for another version."""
        raw = json.loads(text)
        if raw.get("version") != PLAN_VERSION:
            raise ValueError(f"plan version {raw.get('version')} is not {PLAN_VERSION}, the one this launcher reads")
        raw["nodes"] = tuple(
            NodePlan(**{**node, "cpus": tuple(node["cpus"]), "gpus": tuple(node["gpus"])}) for node in raw["nodes"]
        )
        worker = raw["worker"]
        preload = worker["preload"]
        raw["worker"] = WorkerPlan(
            **{
                **worker,
                "argv": tuple(worker["argv"]),
                "resume_argv": tuple(worker["resume_argv"]),
                "preload": None if preload is None else tuple(preload),
            }
        )
        raw["code"] = None if raw["code"] is None else CodePlan(**raw["code"])
        raw["env"] = tuple(EnvVar(**variable) for variable in raw["env"])
        raw["values"] = tuple(Value(**value) for value in raw["values"])
        raw["limits"] = Limits(**raw["limits"])
        if raw["slurm"] is not None:
            flags = tuple(SbatchFlag(**flag) for flag in raw["slurm"]["flags"])
            raw["slurm"] = SlurmPlan(**{**raw["slurm"], "flags": flags, "srun": tuple(raw["slurm"]["srun"])})
        if raw.get("hosts") is not None:
            raw["hosts"] = _hosts(raw["hosts"])
        if raw.get("sky") is not None:
            raw["sky"] = _sky(raw["sky"])
        for key in ("prepare", "overrides", "env_unset", "secrets", "setup", "agent_argv", "torchrun", "notes"):
            raw[key] = tuple(raw[key])
        return cls(**raw)


def _hosts(raw: dict[str, Any]) -> HostsPlan:
    nodes = tuple(
        HostNode(
            **{
                **node,
                "start": tuple(node["start"]),
                "stop": tuple(node["stop"]),
                "mounts": tuple(Mount(**mount) for mount in node["mounts"]),
            }
        )
        for node in raw["nodes"]
    )
    before, after = (tuple(map(tuple, raw[key])) for key in ("before", "after"))
    return HostsPlan(**{**raw, "nodes": nodes, "before": before, "after": after})


def _sky(raw: dict[str, Any]) -> SkyPlan:
    words = {key: tuple(raw[key]) for key in ("submit", "stop", "remove", "logs")}
    return SkyPlan(**{**raw, **words, "state": tuple(map(tuple, raw["state"]))})


def leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a resolved recipe, or of another nested mapping, by their dotted keys."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
