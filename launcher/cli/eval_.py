"""`launch eval RUN`: the held-out data again, or other data, with a checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_ALLOWED = ("data", "train.task", "resources.device")
"""What may be different from the training."""


@click.command(name="eval")
@click.argument("run", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[data.KEY=VALUE ...]")
@click.option("--step", metavar="best|latest|N", help="Which checkpoint. Default: best, if the recipe says what is.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def eval_(run: str, overrides: tuple[str, ...], step: str | None, as_json: bool) -> int:
    """Evaluate a checkpoint of RUN on this machine: its held-out data, or other data.

    `resources.device=cpu` chooses the device; default: a GPU where there is one. Each result is kept in evals.jsonl.
    """
    from launcher.runs.after import ProgramError, chosen_checkpoint, run_program
    from launcher.runs.find import find_run
    from launcher.runs.load import read_plan

    found = find_run(run)
    plan = read_plan(found)
    folder, words = chosen_checkpoint(found, plan, step)
    recipe = _recipe(found, plan, overrides)
    order = {
        "checkpoint": str(folder),
        "recipe": recipe,
        "threads": plan.threads,
    }
    try:
        answer = run_program(plan, "jobs.evaluate", order)
    except ProgramError:
        return 1
    line = _line(folder, overrides, answer)
    kept = _keep(found, line)
    if as_json:
        print(json.dumps({"run_id": found.run_id, "run_dir": str(found.path), **line}, ensure_ascii=False))
    else:
        print(eval_text(found.run_id, answer, words, is_same_data=not overrides))
        if kept:
            print(f"  not kept: {kept}")
    return 0


def _recipe(run: RunDir, plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved recipe of the run, with what is to be different. Raises RecipeError."""
    from launcher.errors import Problem, RecipeError
    from launcher.runs.again import load_again

    problems = []
    for override in overrides:
        key = override.partition("=")[0]
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in _ALLOWED):
            message = f"{key} belongs to the training, and an evaluation has the model as it was trained"
            problems.append(Problem(where=override, message=message, hint=f"what may differ: {', '.join(_ALLOWED)}"))
    if problems:
        raise RecipeError(problems)
    own_device = any(override.startswith("resources.device=") for override in overrides)
    flags: dict[str, tuple[str, object]] = {} if own_device else {"resources.device": ("default of eval", "auto")}
    loaded = load_again(run, plan, overrides, flags)
    return loaded.recipe.model_dump(mode="json", by_alias=True)


def _line(folder: Path, overrides: Sequence[str], answer: Mapping[str, Any]) -> dict[str, Any]:
    import time

    names = ("step", "samples", "device", "metrics", "recorded")
    told = {name: answer[name] for name in names}
    return {"time": round(time.time(), 3), "checkpoint": folder.name, "overrides": list(overrides), **told}


def _keep(run: RunDir, line: Mapping[str, Any]) -> str:
    """Add it to evals.jsonl; why it could not be, where the run is somebody else's."""
    from launcher import redact

    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    try:
        with run.evals.open("ab", buffering=0) as file:
            file.write(redact.own().data(data))
    except OSError as error:
        return f"{run.evals}: {error.strerror}"
    return ""


def eval_text(run_id: str, answer: Mapping[str, Any], words: str, *, is_same_data: bool) -> str:
    """What `launch eval` says."""
    from launcher.wording import aligned, count

    recorded = (answer["recorded"] or {}) if is_same_data else {}
    rows = []
    for name, value in sorted(answer["metrics"].items()):
        before = recorded.get(name)
        told = "" if before is None else "as in the training" if before == value else f"{before:.6g} in the training"
        rows.append((name, f"{value:.6g}", told))
    chosen = f"step {answer['step']}" + (f", {words}" if words else "")
    head = f"{run_id}  {chosen}: {count(answer['samples'], 'sample')} on {answer['device']}"
    return "\n".join([head, *(f"  {line}" for line in aligned(rows))])
