"""What is done with the checkpoints of a run, by programs of the job in the run's own interpreter: they need torch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import redact
from launcher.errors import Problem, Refused
from launcher.planning.plan import Plan
from launcher.runs.checkpoints import find_checkpoint
from launcher.runs.rundir import RunDir


class ProgramError(Exception):
    """The program has ended without an answer; it has said why on standard error."""


def chosen_checkpoint(run: RunDir, plan: Plan, step: str | None) -> tuple[Path, str]:
    """The folder of the checkpoint that is meant, and how it was chosen, in words.

    None: the best one where the recipe says what is best, else the newest. Raises RecipeError where it is not there,
    Refused for a run of a script, whose checkpoints are its own.
    """
    if plan.worker.kind != "job":
        hint = "its own code reads them: launch path RUN --checkpoint latest"
        message = "it runs a script, which has checkpoints of its own"
        raise Refused([Problem(where=run.run_id, message=message, hint=hint)])
    metric = str((plan.recipe.get("checkpoint") or {}).get("best") or "").partition(" ")[0]
    which = step or ("best" if metric else "latest")
    words = {"best": f"the best by {metric}" if metric else "the best", "latest": "the newest"}
    return find_checkpoint(run, which, flag="--step"), words.get(which, "")


def run_program(plan: Plan, module: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """Run `python -m MODULE` with an order on standard input; its answer.

    What it says meanwhile goes to standard error. Raises Refused where it cannot be started, ProgramError.
    """
    text = json.dumps(order)
    try:
        done = subprocess.run(
            [plan.worker.python, "-P", "-m", module],
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_own_environment(plan)},
            cwd=plan.worker.cwd,
            check=False,
        )
    except OSError as error:
        message = f"{error.filename}: {error.strerror}"
        raise Refused([Problem(where=plan.run_id, message=message, hint="on the machine where it was made")]) from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise ProgramError(f"exit code {done.returncode}")
    answer: dict[str, Any] = json.loads(redact.own().text(lines[-1]))
    return answer


def _own_environment(plan: Plan) -> dict[str, str]:
    """What the recipe gives its workers, but for what belongs to several of them."""
    given = {variable.name: variable.value for variable in plan.env if variable.origin.startswith("recipe:env")}
    return {**given, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(plan.threads)}
