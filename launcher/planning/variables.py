"""The environment variables that all workers of a run have in common. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from launcher.placeholders import fill
from launcher.planning.network import PREFIXES, current_name
from launcher.planning.plan import EnvVar
from launcher.planning.topology import Finding
from launcher.planning.worker_env import FLIGHT_RECORDER, LAUNCH_NAMES, TORCHRUN_NAMES

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.network import Network
    from launcher.planning.topology import Device, Remarks, Threads
    from launcher.recipe.schema import Recipe

INSTEAD = {
    "CUDA_VISIBLE_DEVICES": "export it before `launch` to choose among the GPUs; each node gets its share",
    "LOCAL_WORLD_SIZE": "use resources.nproc_per_node",
    "MASTER_PORT": "use network.master_port",
    "TORCHELASTIC_MAX_RESTARTS": "use faults.max_restarts",
    "WANDB_DIR": "W&B writes into the run directory; --runs-dir moves it",
    "WANDB_MODE": "use tracking.wandb.mode",
    "WANDB_RESUME": "it is always `allow`: a restarted run stays one run",
    "WANDB_RUN_ID": "the run id is the W&B id too; name or --name is its first part",
    "WORLD_SIZE": "use resources.nodes and resources.nproc_per_node",
}
"""What to do in place of setting a name that is ours, where there is something to do."""

OFFLINE = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""What keeps libraries from waiting for hosts that a node without internet never reaches."""
OFFLINE_ORIGIN = "auto: internet is false"

FLIGHT_RECORDER_ON = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""So many of the newest collectives are kept, and written down when one times out."""

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""How PyTorch holds the memory of a GPU: the old and the new name; it reads both."""
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With which the products of matrices of cuBLAS are deterministic."""

_OWNED = (TORCHRUN_NAMES | LAUNCH_NAMES | INSTEAD.keys()) - {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def worker_variables(
    recipe: Recipe,
    facts: Facts,
    *,
    device: Device,
    threads: Threads,
    network: Network,
    rescue: bool,
    origins: Mapping[str, str],
    placeholders: Mapping[str, str],
    remarks: Remarks,
) -> tuple[EnvVar, ...]:
    """The variables of every worker, sorted by name. Names that are ours are problems.

    rescue: survivors of a fault keep the state of the training.
    """
    variables = {"PYTHONUNBUFFERED": EnvVar(name="PYTHONUNBUFFERED", value="1", origin="default")}
    if device.name == "cuda" and not _orders_devices(facts.environment):
        variables["CUDA_DEVICE_ORDER"] = EnvVar(name="CUDA_DEVICE_ORDER", value="PCI_BUS_ID", origin="default")
    if device.name == "cuda":
        traces = fill("{run_dir}/logs/nccl-trace-rank-", placeholders)
        for newest, value in ((FLIGHT_RECORDER, traces), *FLIGHT_RECORDER_ON.items()):
            name = current_name(newest, facts.torch_version)
            variables[name] = EnvVar(name=name, value=value, origin="auto: what NCCL did before it timed out")
    if device.name == "cpu" and recipe.is_script and "ACCELERATE_USE_CPU" not in facts.environment:
        # Without it accelerate and HF's Trainer see CPUs as one process, and each worker trains alone without a word.
        variables["ACCELERATE_USE_CPU"] = EnvVar(
            name="ACCELERATE_USE_CPU", value="true", origin="auto: without it accelerate trains alone in each worker"
        )
    if device.name == "cuda":
        variables |= {variable.name: variable for variable in _of_a_gpu(recipe, facts, remarks)}
    if not recipe.internet:
        variables |= {variable.name: variable for variable in _offline(recipe, facts)}
    for name, value in recipe.env.items():
        key = f"env.{name}"
        _check_name(name, value, threads, remarks)
        if not name.startswith(PREFIXES):  # those come back from the network, under the name that torch reads now
            variables[name] = EnvVar(
                name=name, value=fill(value, placeholders), origin=origins.get(key, f"recipe:{key}")
            )
    variables["OMP_NUM_THREADS"] = EnvVar(name="OMP_NUM_THREADS", value=threads.value, origin=threads.origin)
    variables |= {variable.name: _filled(variable, placeholders) for variable in network.env}
    if rescue and device.name == "cuda":
        name = current_name("TORCH_NCCL_ASYNC_ERROR_HANDLING", facts.torch_version)
        variables[name] = _aborted_by_us(variables[name], remarks)
    return tuple(variables[name] for name in sorted(variables))


def _of_a_gpu(recipe: Recipe, facts: Facts, remarks: Remarks) -> Iterator[EnvVar]:
    """What PyTorch and cuBLAS read when they take the GPU: too late for a key that the program would read."""
    key = f"resources.alloc: {recipe.resources.alloc}"
    if recipe.resources.alloc == "expandable_segments":
        given = next((name for name in ALLOCATOR if name in facts.environment or name in recipe.env), None)
        if given is None:
            name = current_name(ALLOCATOR[-1], facts.torch_version)
            yield EnvVar(name=name, value="expandable_segments:True", origin=f"auto: {key}")
        else:
            remarks.notes.append(f"{key} is not set: {given} is yours ({recipe.env.get(given, 'environment')})")
    if recipe.train is not None and recipe.train.deterministic and WORKSPACE[0] not in facts.environment:
        yield EnvVar(name=WORKSPACE[0], value=WORKSPACE[1], origin="auto: train.deterministic")


def _aborted_by_us(given: EnvVar, remarks: Remarks) -> EnvVar:
    """A survivor aborts NCCL itself: after an abort by torch an update with half of its gradients looks complete."""
    if given.value == "0":
        return given
    if not given.origin.startswith("default"):
        message = f"faults.rescue: true and {given.name}={given.value}: torch would abort what a survivor has to keep"
        remarks.problems.append(Finding("faults.rescue", message, f"leave {given.name} out, or rescue: false"))
    return EnvVar(name=given.name, value="0", origin="default beside faults.rescue")


def _offline(recipe: Recipe, facts: Facts) -> Iterator[EnvVar]:
    """All of OFFLINE but what the user has decided otherwise."""
    for name, value in OFFLINE.items():
        asked = name == "WANDB_MODE" and recipe.tracking.wandb.mode != "auto"
        if not asked and name not in facts.environment:
            yield EnvVar(name=name, value=value, origin=OFFLINE_ORIGIN)


def _filled(variable: EnvVar, placeholders: Mapping[str, str]) -> EnvVar:
    """With placeholders filled in, unless it came from the environment, whose text is only text."""
    if variable.origin == "environment":
        return variable
    return dataclasses.replace(variable, value=fill(variable.value, placeholders))


def check_secrets(recipe: Recipe, facts: Facts, remarks: Remarks) -> None:
    """Secrets come from the environment of the launch, under names that are not ours; here only their names count."""
    for index, name in enumerate(recipe.secrets):
        key = f"secrets.{index}"
        if name in _OWNED or name.startswith("LAUNCH_"):
            remarks.problems.append(Finding(key, f"secrets: {name} is no secret: the launcher sets it", "remove it"))
        elif name in facts.secrets_missing:
            message = f"secrets: {name} is not set in this environment"
            remarks.problems.append(Finding(key, message, f"export {name}=... before `launch`"))


def _orders_devices(environment: Mapping[str, str]) -> bool:
    """Whether the user's device numbers have to be read as CUDA would.

    Those of a plan are otherwise nvidia-smi's (by PCI bus); CUDA's own order is the fastest first.
    """
    numbers = environment.get("CUDA_VISIBLE_DEVICES", "").replace(",", "").replace(" ", "")
    return "CUDA_DEVICE_ORDER" in environment or numbers.isdecimal()


def _check_name(name: str, value: str, threads: Threads, remarks: Remarks) -> None:
    """Ranks, addresses and what is ours cannot be set by hand: two owners of one variable is how jobs hang."""
    key = f"env.{name}"
    if name in _OWNED or name.startswith("LAUNCH_"):
        remarks.problems.append(
            Finding(key, f"{key}: the launcher sets {name} for each worker", INSTEAD.get(name, "remove it"))
        )
    elif name == "OMP_NUM_THREADS" and value != threads.value:
        remarks.problems.append(
            Finding(key, f"{key}: {value} here, but resources.threads is {threads.value}", "keep one of the two")
        )
