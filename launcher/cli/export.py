"""`launch export RUN`: the model of a run in one file, with its recipe and its metrics."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from launcher.runs.rundir import RunDir

MODEL = "model.safetensors"
RECIPE = "recipe.yaml"
METRICS = "metrics.json"


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--step", metavar="best|latest|N", help="Which checkpoint. Default: best, if the recipe says what is.")
@click.option("--out", metavar="DIR", help="A folder that is not there yet. Default: ./RUN-step-N.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def export(run: str, step: str | None, out: str | None, as_json: bool) -> int:
    """Write the model of RUN to one safetensors file, with the resolved recipe and the metrics beside it."""
    from launcher.runs.after import ProgramError, chosen_checkpoint, run_program
    from launcher.runs.find import find_run
    from launcher.runs.load import read_plan

    found = find_run(run)
    plan = read_plan(found)
    folder, words = chosen_checkpoint(found, plan, step)
    target = Path(out if out is not None else f"{found.run_id}-{folder.name}").expanduser().absolute()
    unfinished = _unfinished(target)
    order = {"checkpoint": str(folder), "file": str(unfinished / MODEL), "run_id": found.run_id}
    try:
        answer = run_program(plan, "jobs.export", order)
        _add(found, unfinished, answer)
        unfinished.rename(target)
    except ProgramError:
        return 1
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if as_json:
        print(json.dumps({"run_id": found.run_id, "out": str(target), **answer}, ensure_ascii=False))
    else:
        print(export_text(found.run_id, target, answer, words))
    return 0


def _unfinished(target: Path) -> Path:
    """A folder beside the one that is asked for, which takes its place when all is in it. Raises Refused."""
    from launcher.errors import Problem, Refused

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused([Problem(where="--out", message=f"{target} is there, and not empty", hint="another folder")])
    made = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        made.mkdir(parents=True)
    except OSError as error:
        raise Refused([Problem(where="--out", message=f"{target.parent}: {error.strerror}")]) from None
    return made


def _add(run: RunDir, folder: Path, answer: Mapping[str, Any]) -> None:
    """The recipe, and what is known of the model."""
    shutil.copyfile(run.resolved, folder / RECIPE)
    names = ("step", "samples_seen", "metrics", "weights_sha256")
    about = {"run_id": run.run_id, **{name: answer[name] for name in names}}
    (folder / METRICS).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def export_text(run_id: str, target: Path, answer: Mapping[str, Any], words: str) -> str:
    """What `launch export` says."""
    from launcher.wording import count

    chosen = f"step {answer['step']}" + (f", {words}" if words else "")
    size = f"{answer['size_bytes'] / 1e6:,.1f} MB"
    return "\n".join(
        [
            f"{run_id}  {chosen}: {target}",
            f"  {MODEL}  {count(answer['tensors'], 'tensor')}, {size}, weights_sha256 {answer['weights_sha256']}",
            f"  {RECIPE}, {METRICS}",
            f'Next   safetensors.torch.load_file("{target / MODEL}")',
        ]
    )
