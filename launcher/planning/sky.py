"""The run as a task of SkyPilot: which machines, what is copied there, what runs, the commands for that. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from launcher.planning.plan import CODE, SkyPlan
from launcher.planning.sky_script import ENVIRONMENT, TOKEN, run_script, setup_script
from launcher.planning.slurm_nodes import NodeShape, device_of_node
from launcher.planning.topology import Device, Finding, Remarks
from launcher.wording import count

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.recipe.schema import Recipe

KILL_WAIT_S = 30.0
"""From SkyPilot's TERM to its KILL (0.14)."""
STOP_MARGIN_S = 5.0
TASK = "sky/task.yaml"
"""The task file, in the run directory."""
_OWN = {
    "accelerators": "accelerators",
    "autostop": "autostop",
    "cpus": "cpus",
    "disk_size": "disk_size",
    "image_id": "image",
    "infra": "infra",
    "instance_type": "instance_type",
    "job_recovery": "job_recovery",
    "max_hourly_cost": "max_hourly_cost",
    "memory": "memory",
    "network_tier": "network_tier",
    "use_spot": "spot",
}
"""Key of SkyPilot's `resources` -> ours that becomes it."""
_IMAGE_OF_A_CLOUD = re.compile(r"docker:|ami-|projects/|ocid1\.|skypilot:|[a-z]+:[^/]+:[^/]+:")
_FABRICS = ("aws", "gcp", "oci")
"""Where `network_tier: best` is taken (SkyPilot 0.14.1); on Nebius for eight GPUs. Elsewhere it is an error."""
_WANDB = "WANDB_API_KEY"
NOT_SEEN = (
    "SkyPilot's own loader reads such tasks, and their run script trains on machines of a test; renting them, prices, "
    "the loss of a spot machine and taking them down could not be tried where this was made (docs/cloud.md)"
)


@dataclass(frozen=True, kw_only=True)
class SkyJob:
    """What the rest of the plan has decided, as far as the task depends on it."""

    run_id: str
    run_dir: str
    device: Device
    python: str
    """Of the workers, on the machines."""


def python_on_sky(recipe: Recipe) -> str:
    """The interpreter there: as asked, else the image's, else that of the environment which `setup` makes."""
    asked = recipe.sky.python
    return asked if asked != "auto" else "python3" if recipe.sky.image else f"{ENVIRONMENT}/bin/python"


def cwd_on_sky(recipe: Recipe, run_dir: str) -> str:
    """Where the workers run: nothing of the machine that launches is there but the run directory."""
    return posixpath.join(run_dir, CODE) if recipe.is_script else run_dir


def store_of(recipe: Recipe) -> str:
    """The URL below which checkpoints are kept; empty where they are not kept anywhere else."""
    store = recipe.checkpoint.store
    return store.rstrip("/") if "://" in store else ""


def grace_on_sky(recipe: Recipe, remarks: Remarks) -> float:
    """How long a stop may take."""
    asked = recipe.faults.grace
    if asked == "auto":
        return KILL_WAIT_S - STOP_MARGIN_S
    if asked.time_s > KILL_WAIT_S:
        remarks.notes.append(
            f"faults.grace is {asked.time_s:g} s, but SkyPilot kills {KILL_WAIT_S:g} s after its TERM: "
            "a stop that it orders has no more"
        )
    return asked.time_s


def shape_on_sky(recipe: Recipe, remarks: Remarks) -> NodeShape:
    """Device, workers and CPUs of a node, by what is rented; nothing of this machine counts."""
    sky, gpus = recipe.sky, _gpus(recipe)
    device = device_of_node(
        recipe,
        gpus,
        remarks,
        where="sky.accelerators gives",
        hint="sky.accelerators: H100:8, or device: cpu",
        more="sky.accelerators: NAME:{}, ",
        one=("; on a rented one they count from 0", " and sky.accelerators: NAME:1"),
    )
    loaders = 0 if recipe.data is None else recipe.data.loader_workers
    threads = 1 if recipe.resources.threads == "auto" else recipe.resources.threads
    cpus = device.nproc_per_node * (threads + loaders) if sky.cpus is None else int(sky.cpus.rstrip("+"))
    return NodeShape(device=device, gpus=gpus, cpus=cpus, cpus_key="plan" if sky.cpus is None else "sky.cpus")


def plan_sky(recipe: Recipe, facts: Facts, job: SkyJob, remarks: Remarks) -> SkyPlan:
    """The task, and the commands around it. What is wrong goes to `remarks`."""
    sky, store, managed = recipe.sky, store_of(recipe), _is_managed(recipe)
    remarks.problems += _findings(recipe, facts, job, managed=managed)
    remarks.notes += _notes(recipe, job, managed=managed)
    name = job.run_id if job.run_id[0].isalpha() else f"run-{job.run_id}"
    secrets = (TOKEN, *dict.fromkeys(recipe.secrets))
    kept = f"{store}/{job.run_id}/record" if store else ""
    payload = f"~/.launch/{job.run_id}"
    mounts = _files(job, recipe, payload)
    task: dict[str, Any] = {
        "name": name,
        "num_nodes": recipe.resources.max_nodes,
        "resources": {**_resources(recipe, job, managed=managed), **sky.resources},
        "file_mounts": {**_plain(sky.file_mounts), **mounts},
        "envs": {"LAUNCH_RUN_ID": job.run_id},
        "secrets": dict.fromkeys(secrets),
        "setup": _setup(recipe, job.python, payload),
        "run": run_script(
            run_dir=job.run_dir,
            payload=payload,
            nodes=recipe.resources.max_nodes,
            python=job.python,
            port=sky.port,
            store=kept,
        ),
    }
    given = tuple(word for secret in secrets for word in ("--secret", secret))
    file = posixpath.join(job.run_dir, TASK)
    words = (sky.command,)
    common = ("--yes", "--detach-run")
    if managed:
        submit = (*words, "jobs", "launch", *common, "--name", name, *given, file)
        state: tuple[tuple[str, ...], ...] = ((*words, "jobs", "queue", "--output", "json"),)
        stop: tuple[str, ...] = (*words, "jobs", "cancel", "--yes", "--name", name)
        remove: tuple[str, ...] = ()
        logs: tuple[str, ...] = (*words, "jobs", "logs", "--name", name)
    else:
        submit = (*words, "launch", *common, "--cluster", name, *given, file)
        state = ((*words, "queue", name, "--output", "json"), (*words, "status", name, "--output", "json"))
        stop = (*words, "cancel", "--yes", "--all", name)
        remove = (*words, "down", "--yes", name)
        logs = (*words, "logs", name)
    return SkyPlan(
        name=name,
        managed=managed,
        task=_dump(task),
        submit=submit,
        state=state,
        stop=stop,
        remove=remove,
        logs=logs,
        head_port=sky.port,
        store=kept,
        price=_limit(recipe),
    )


def _limit(recipe: Recipe) -> str:
    cost, nodes = recipe.sky.max_hourly_cost, recipe.resources.max_nodes
    return "" if cost is None else f"at most ${cost * nodes:,.2f} per hour ({count(nodes, 'node')} x ${cost:g})"


def _is_managed(recipe: Recipe) -> bool:
    return recipe.sky.spot if recipe.sky.managed == "auto" else recipe.sky.managed


def _gpus(recipe: Recipe) -> int:
    """SkyPilot's `H100` is one, `H100:8` eight."""
    accelerators = recipe.sky.accelerators
    return 0 if accelerators is None else int(accelerators.partition(":")[2] or 1)


def _resources(recipe: Recipe, job: SkyJob, *, managed: bool) -> dict[str, Any]:
    """What SkyPilot is asked for; what nobody has said is left to it."""
    sky = recipe.sky
    fast = sky.network_tier == "best" or (sky.network_tier == "auto" and _has_fabric(recipe, job.device))
    minutes = max(1, round(sky.autostop.time_s / 60))
    asked: dict[str, Any] = {
        "infra": sky.infra,
        "accelerators": sky.accelerators,
        "cpus": sky.cpus,
        "memory": sky.memory,
        "instance_type": sky.instance_type,
        "image_id": None if sky.image is None else _image(sky.image),
        "disk_size": sky.disk_size,
        "network_tier": "best" if fast else None,
        "use_spot": sky.spot or None,
        "job_recovery": sky.job_recovery,
        "max_hourly_cost": sky.max_hourly_cost,
        "autostop": None if managed else {"idle_minutes": minutes, "down": True},
    }
    return {key: value for key, value in asked.items() if value is not None}


def _wants_fabric(recipe: Recipe, device: Device) -> bool:
    return recipe.resources.max_nodes > 1 and device.name == "cuda"


def _has_fabric(recipe: Recipe, device: Device) -> bool:
    """Whether the nodes need a fast network, and the cloud is one where SkyPilot can ask for it."""
    cloud = (recipe.sky.infra or "").partition("/")[0].lower()
    whole = recipe.sky.accelerators is not None and recipe.sky.accelerators.endswith(":8")
    return _wants_fabric(recipe, device) and (cloud in _FABRICS or (cloud == "nebius" and whole))


def _image(image: str) -> str:
    return image if _IMAGE_OF_A_CLOUD.match(image) else f"docker:{image}"


def _files(job: SkyJob, recipe: Recipe, payload: str) -> dict[str, str]:
    """What of the run directory goes to the machines. The token does not: it is a secret of SkyPilot's."""
    names = ["plan.json", "agent", *([CODE, "code.json"] if recipe.is_script else [])]
    return {f"{payload}/{name}": posixpath.join(job.run_dir, name) for name in names}


def _setup(recipe: Recipe, python: str, payload: str) -> str:
    sky = recipe.sky
    if sky.setup != "auto":
        there = [f"cd {payload}/{CODE}"] if recipe.is_script else []
        return "\n".join(["set -euo pipefail", *there, *sky.setup, ""])
    return setup_script(python=python, image=bool(sky.image), is_script=recipe.is_script, store=store_of(recipe))


def _findings(recipe: Recipe, facts: Facts, job: SkyJob, *, managed: bool) -> Iterator[Finding]:
    sky, store = recipe.sky, recipe.checkpoint.store
    for key in sky.resources:
        if (ours := _OWN.get(key)) is not None:
            yield Finding(f"sky.resources.{key}", f"sky.resources: {key} is set by sky.{ours}", f"use sky.{ours}")
    if sky.instance_type is not None and sky.infra is None:
        message = f"sky.instance_type: {sky.instance_type} is a name of one cloud, and sky.infra does not say which"
        yield Finding("sky.instance_type", message, "sky.infra: aws, or whose it is")
    if not recipe.is_script and recipe.resources.max_nodes > 1 and store == "shared":
        message = "checkpoint.store: shared, but machines that are rented share no folder"
        yield Finding("checkpoint.store", message, "checkpoint.store: s3://bucket/folder (or gs://...), or replicate")
    if not recipe.is_script and managed and not store_of(recipe):
        key = "sky.spot" if sky.spot else "sky.managed"
        message = f"{key}: machines that are taken away take the checkpoints along (checkpoint.store: {store})"
        yield Finding(key, message, "checkpoint.store: s3://bucket/folder, or gs://...")
    if sky.spot and not managed:
        message = "sky.managed: false, but nobody else gets other machines when spot ones are taken away"
        yield Finding("sky.managed", message, "managed: auto, or spot: false")
    if recipe.is_script and facts.code is not None and not facts.code.snapshot:
        message = f"workdir: {facts.code.root} cannot be copied to the machines: {facts.code.reason}"
        yield Finding("workdir", message, "workdir: a folder below 50 MB, in git, with all that the script needs")


def _notes(recipe: Recipe, job: SkyJob, *, managed: bool) -> Iterator[str]:
    sky = recipe.sky
    yield NOT_SEEN
    if _wants_fabric(recipe, job.device) and sky.infra is None and sky.network_tier == "auto":
        yield "nodes have the usual network: sky.infra (aws, gcp ...) or sky.network_tier: best asks for the fast one"
    if recipe.python is not None:
        yield "python is an interpreter of this machine; on rented ones sky.python says which one runs the workers"
    if recipe.workdir is not None and recipe.is_script:
        yield "the workers run in the copy of the workdir: the live one is not on the machines"
    if recipe.is_script and sky.spot:
        yield (
            "spot: what the script saves in LAUNCH_CHECKPOINT_DIR is lost with its machine; "
            "a bucket in sky.file_mounts keeps it"
        )
    if recipe.checkpoint.store.startswith("file:"):
        yield "checkpoint.store: a folder outlives the machines only as a bucket that sky.file_mounts puts there"
    if recipe.resources.is_elastic:
        yield f"{recipe.resources.nodes} nodes: SkyPilot ends all of them when it loses one; a managed run gets others"
    if not recipe.is_script and recipe.tracking.wandb.mode in ("auto", "online") and _WANDB not in recipe.secrets:
        yield f"W&B has no key on the machines, so it keeps the curves offline: secrets: [{_WANDB}]"
    if not managed:
        minutes = max(1, round(sky.autostop.time_s / 60))
        yield f"the machines are taken down {count(minutes, 'minute')} after the run, at the latest (sky.autostop)"
    if managed:
        yield (
            "SkyPilot's jobs controller, a small machine of its own that it keeps, watches over the run: "
            "it is paid, too"
        )


def _plain(value: Any) -> Any:
    """As YAML has it: the recipe is frozen, with tuples."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _Dumper(yaml.SafeDumper):
    """Scripts as they are, line by line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _dump(task: Mapping[str, Any]) -> str:
    return str(yaml.dump(_plain(task), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096))
