"""What this process was started for: from the plan of a run directory, or from a recipe given by hand."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.recipe.schema import DataSection, ModelSection, Recipe, TrainSection
from launcher.runs.rundir import RunDir

_MARK = "torchrun"
"""File in a run directory that was made by hand: which torchrun made it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe, and the attempt at it."""

    recipe: Recipe
    model: ModelSection
    data: DataSection
    train: TrainSection
    attempt: int
    identity: str
    """The same on every rank that was started for this attempt."""
    run_dir: RunDir | None
    """None = by hand: `place` decides."""
    device: str
    """cpu, cuda or auto."""
    world_sizes: range | None
    """Numbers of ranks that the plan allows; which one it is, the environment says. None = by hand."""
    grace_s: float | None
    """How long a stop may take, to the end of the process; None = by hand, nobody counts."""


def read_job(argv: Sequence[str], env: Mapping[str, str]) -> Job:
    """The job of LAUNCH_RUN_DIR where it is set (by our agent), else of `RECIPE [KEY=VALUE ...]` in argv.

    Raises launcher.errors.RecipeError for a recipe that is wrong, ValueError for one that trains nothing of ours.
    """
    run_dir = env.get("LAUNCH_RUN_DIR")
    return _planned(RunDir(Path(run_dir)), env) if run_dir else _by_hand(argv, env)


def _planned(run_dir: RunDir, env: Mapping[str, str]) -> Job:
    plan = json.loads(run_dir.plan.read_text(encoding="utf-8"))
    attempt = int(env["LAUNCH_ATTEMPT"])
    return _job(
        Recipe.model_validate(plan["recipe"]),
        attempt=attempt,
        identity=f"run {env['LAUNCH_RUN_ID']}, attempt {attempt}",
        run_dir=run_dir,
        device=plan["device"],
        world_sizes=_world_sizes(plan),
        grace_s=plan["limits"]["grace_s"],
    )


def _world_sizes(plan: Mapping[str, Any]) -> range:
    """An elastic run may have any number of its nodes between the least and all."""
    nodes, per_node = len(plan["nodes"]), plan["nproc_per_node"]
    least = plan.get("min_nodes") or nodes
    return range(least * per_node, nodes * per_node + 1, per_node)


def _by_hand(argv: Sequence[str], env: Mapping[str, str]) -> Job:
    if not argv:
        raise ValueError("usage: torchrun ... -m jobs.train RECIPE [KEY=VALUE ...]")
    from launcher.recipe.loader import load_recipe  # under our agent the plan has been made, and nothing is parsed

    recipe = load_recipe(Path(argv[0]), argv[1:]).recipe
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    identity = f"torchrun {env.get('TORCHELASTIC_RUN_ID', '')}, attempt {attempt}"
    device = recipe.resources.device
    return _job(recipe, attempt=attempt, identity=identity, run_dir=None, device=device, world_sizes=None, grace_s=None)


def job_alone(recipe: Recipe) -> Job:
    """For one process that trains nothing: it evaluates, on the device of the recipe."""
    device = recipe.resources.device
    return _job(recipe, attempt=0, identity="", run_dir=None, device=device, world_sizes=None, grace_s=None)


def _job(
    recipe: Recipe,
    *,
    attempt: int,
    identity: str,
    run_dir: RunDir | None,
    device: str,
    world_sizes: range | None,
    grace_s: float | None,
) -> Job:
    if recipe.model is None or recipe.data is None or recipe.train is None:
        raise ValueError(f"recipe {recipe.name}: jobs.train needs the sections model, data and train")
    return Job(
        recipe=recipe,
        model=recipe.model,
        data=recipe.data,
        train=recipe.train,
        attempt=attempt,
        identity=identity,
        run_dir=run_dir,
        device=device,
        world_sizes=world_sizes,
        grace_s=grace_s,
    )


def place(name: str, *, attempt: int, root: Path) -> str:
    """Make the run directory of a job that was started by hand; for one rank only.

    ./runs/NAME-torchrun, with a number behind it where that is taken: a rerun by hand trains again. A restart by the
    same torchrun goes on in its own. Raises ValueError where that one is gone.
    """
    mark = f"{socket.gethostname()} {os.getppid()} {os.environ.get('MASTER_PORT', '')}\n"
    number = 1
    while (folder := root / (f"{name}-torchrun" if number == 1 else f"{name}-torchrun-{number}")).exists():
        if attempt > 1 and (folder / _MARK).is_file() and (folder / _MARK).read_text() == mark:
            return str(folder.resolve())
        number += 1
    if attempt > 1:
        raise ValueError(f"attempt {attempt}: no run directory of an earlier attempt in {root.resolve()}")
    folder.mkdir(parents=True)
    (folder / _MARK).write_text(mark)
    return str(folder.resolve())


def run_id(run_dir: RunDir, env: Mapping[str, str]) -> str:
    """The id of the run outside its folder. By hand the folder's name and birth: such folders have the same name."""
    if "LAUNCH_RUN_ID" in env:
        return env["LAUNCH_RUN_ID"]
    return f"{run_dir.run_id}-{int((run_dir.path / _MARK).stat().st_mtime):x}"
