"""What a user probably meant: the nearest name, or the section that a key belongs to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache

from pydantic import BaseModel

from launcher.recipe.nodes import Keys, dotted
from launcher.recipe.sbatch_options import sbatch_hint
from launcher.recipe.schema import Recipe
from launcher.recipe.typed import annotation_of, fields_of, section_of

COMMON_NAMES = {
    "lr": "train.optimizer.lr",
    "learning_rate": "train.optimizer.lr",
    "weight_decay": "train.optimizer.weight_decay",
    "momentum": "train.optimizer.momentum",
    "epochs": "train.until",
    "num_epochs": "train.until",
    "max_epochs": "train.until",
    "steps": "train.until",
    "max_steps": "train.until",
    "num_steps": "train.until",
    "total_steps": "train.until",
    "warmup_steps": "train.schedule.warmup",
    "scheduler": "train.schedule",
    "lr_scheduler": "train.schedule",
    "gradient_accumulation_steps": "train.accumulate",
    "grad_accum": "train.accumulate",
    "accumulate_grad_batches": "train.accumulate",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "amp": "train.precision",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "mixed_precision": "train.precision",
    "autocast": "train.precision",
    "half": "train.precision",
    "tf32": "train.precision",
    "allow_tf32": "train.precision",
    "gradient_clip_val": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "clip_grad_norm": "train.clip_norm",
    "grad_clip": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "gradient_checkpointing": "train.activation_checkpointing",
    "checkpoint_activations": "train.activation_checkpointing",
    "recompute": "train.activation_checkpointing",
    "memory_format": "train.channels_last",
    "torch_compile": "train.compile",
    "loss": "train.task",
    "criterion": "train.task",
    "objective": "train.task",
    "eval_steps": "train.eval_every",
    "val_check_interval": "train.eval_every",
    "check_val_every_n_epoch": "train.eval_every",
    "logging_steps": "train.log_every",
    "log_every_n_steps": "train.log_every",
    "random_seed": "train.seed",
    "batch_size": "data.global_batch_size",
    "num_workers": "data.loader_workers",
    "dataset": "data.name",
    "workers": "data.loader_workers",
    "dataloader_num_workers": "data.loader_workers",
    "prefetch_factor": "data.prefetch",
    "dataloader_pin_memory": "data.pin_memory",
    "gpus": "resources.nproc_per_node",
    "num_gpus": "resources.nproc_per_node",
    "gpus_per_node": "resources.nproc_per_node",
    "nproc": "resources.nproc_per_node",
    "num_nodes": "resources.nodes",
    "devices": "resources.nproc_per_node",
    "accelerator": "resources.device",
    "expandable_segments": "resources.alloc",
    "pytorch_cuda_alloc_conf": "resources.alloc",
    "pytorch_alloc_conf": "resources.alloc",
    "nnodes": "resources.nodes",
    "distributed": "parallelism.strategy",
    "deepspeed": "parallelism.strategy",
    "zero_stage": "parallelism.strategy",
    "data_parallel_size": "parallelism.dp",
    "tensor_parallel": "parallelism.tp",
    "tensor_parallel_size": "parallelism.tp",
    "tensor_model_parallel_size": "parallelism.tp",
    "pipeline_parallel": "parallelism.pp",
    "pipeline_parallel_size": "parallelism.pp",
    "pipeline_model_parallel_size": "parallelism.pp",
    "num_stages": "parallelism.pp",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "save_top_k": "checkpoint.keep",
    "max_retries": "faults.max_restarts",
    "retries": "faults.max_restarts",
    "project": "tracking.wandb.project",
    "command": "script",
    "entrypoint": "script",
    "main": "script",
    "program": "script",
    "arguments": "args",
    "argv": "args",
    "params": "args",
    "script_args": "args",
    "interpreter": "python",
    "python_path": "python",
    "venv": "python",
    "conda_env": "python",
    "cwd": "workdir",
    "working_dir": "workdir",
    "environment": "env",
    "env_vars": "env",
    "commands": "setup",
    "before": "setup",
    "pre_run": "setup",
    "modules": "setup",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "step_regex": "progress.log",
    "profile": "profiler",
    "profiling": "profiler",
    "trace": "profiler",
    "monitor": "tracking.watch",
}
"""Words of other tools, and the key that says it here."""

WITHOUT_KEY = {
    "persistent": "not needed: loader processes live as long as the training",
    "persistent_workers": "not needed: loader processes live as long as the training",
    "shuffle": "not needed: samples are shuffled anew in each epoch, by train.seed",
    "drop_last": "not needed: the last batch of an epoch may be smaller, and counts by its samples",
    "gradient_as_bucket_view": "not needed: with ddp it is always so",
    "fp8": "there is no fp8 here: train.precision is fp32, tf32, bf16 or fp16",
    "ddp": "parallelism: {strategy: ddp}",
    "fsdp": "parallelism: {strategy: fsdp}",
    "hsdp": "parallelism: {strategy: hsdp}",
    "sync_bn": "parallelism: {strategy: ddp, sync_batchnorm: true}",
    "use_fsdp": "parallelism: {strategy: fsdp}",
}
"""Words that are no key here, and what to do: nothing, or another thing."""

NO_STRATEGY = {
    **dict.fromkeys(
        ("tp", "tensor", "tensor_parallel"), "tp is a degree: {strategy: ddp, tp: 2}, also with fsdp and hsdp"
    ),
    **dict.fromkeys(
        ("pp", "pipeline", "pipeline_parallel"), "pp is a degree: {strategy: ddp, pp: 2}, also with fsdp and hsdp"
    ),
    **dict.fromkeys(("dp",), "dp is a degree, of ddp and hsdp: {strategy: ddp, dp: 2}"),
    **dict.fromkeys(("fsdp2", "deepspeed", "zero", "zero3", "sharded"), "did you mean 'fsdp'?"),
    **dict.fromkeys(("distributed", "ddp_spawn", "DistributedDataParallel", "ddp2"), "did you mean 'ddp'?"),
    **dict.fromkeys(("DataParallel", "nn.DataParallel"), "did you mean 'data_parallel'?"),
    **dict.fromkeys(("model_parallel", "naive", "device_map"), "did you mean 'split'?"),
    **dict.fromkeys(("none", "no", "one"), "did you mean 'single'?"),
}
"""Words for ways to share the work that are no strategy here."""


def unknown_key_hint(key: str, section: Keys, valid: Iterable[str], options: Mapping[Keys, Iterable[str]]) -> str:
    """The most helpful thing to say about an unknown key of a section.

    `valid` are the names that the section does know, `options` those of the named sections (`train.optimizer` has the
    options of the optimizer that the recipe names).
    """
    valid = list(valid)
    wanted = _normal(key)
    here = next((name for name in valid if _normal(name) == wanted), None)
    of_sbatch = sbatch_hint(key) if section == ("slurm",) else ""
    if here is not None or of_sbatch:
        return f"did you mean {here!r}?" if here is not None else of_sbatch
    homes = [path for path in _homes(wanted, options) if not _inside(path, section)]
    if wanted in WITHOUT_KEY or 0 < len(homes) <= 2:
        return WITHOUT_KEY.get(wanted) or f"belongs under {' or '.join(homes)}"
    if wanted in COMMON_NAMES:
        return f"here it is {COMMON_NAMES[wanted]!r}"
    near = did_you_mean(key, valid)
    if near:
        return near
    elsewhere = difflib.get_close_matches(wanted, [*COMMON_NAMES, *map(_leaf, key_paths())], n=1, cutoff=0.8)
    if elsewhere and not homes:
        known = elsewhere[0]
        paths = [path for path in key_paths() if _leaf(path) == known] or [COMMON_NAMES[known]]
        return f"did you mean {paths[0]!r}?"
    return f"valid names: {', '.join(sorted(valid))}" if valid else ""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`did you mean 'until'?`, or nothing where no name is near."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


@cache
def key_paths() -> tuple[str, ...]:
    """The full path of every key of the schema."""
    return tuple(dotted(keys) for keys in _paths(Recipe, ()))


def _paths(section: type[BaseModel], keys: Keys) -> list[Keys]:
    found: list[Keys] = []
    for key, field in fields_of(section).items():
        found.append((*keys, key))
        inner = section_of(annotation_of(field))
        if inner is not None:
            found += _paths(inner, (*keys, key))
    return found


def _homes(wanted: str, options: Mapping[Keys, Iterable[str]]) -> list[str]:
    """The sections that do have this key."""
    named = [dotted(section) for section, names in options.items() if wanted in map(_normal, names)]
    paths = [path for path in key_paths() if _normal(_leaf(path)) == wanted]
    return list(dict.fromkeys([path.rpartition(".")[0] or "the top level" for path in paths] + named))


def _inside(home: str, section: Keys) -> bool:
    return home == (dotted(section) or "the top level")


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _normal(key: str) -> str:
    return key.lower().replace("-", "_")
