"""`launch sync RUN`: upload what W&B kept offline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--dry-run", is_flag=True, help="Show what would be uploaded, in order.")
def sync(run: str, dry_run: bool) -> int:
    """Upload what W&B kept offline of RUN: all attempts, in order, as one W&B run."""
    from launcher.errors import Problem, Refused
    from launcher.executors.base import observe_job
    from launcher.runs.find import find_run
    from launcher.runs.load import read_plan, read_record

    found = find_run(run)
    plan, record = read_plan(found), read_record(found, observe_job)
    if not record.state.is_final and record.workers:
        hint = f"launch sync {found.run_id}, when it has ended"
        raise Refused([Problem(where=found.run_id, message=f"it goes on: {record.state}", hint=hint)])
    if plan.recipe["tracking"]["wandb"]["mode"] == "disabled":
        raise Refused([Problem(where="tracking.wandb.mode", message="disabled: there is nothing for W&B")])
    if plan.worker.kind == "job":
        return _sync_metrics(found, plan, exit_code=record.exit_code or 0, dry_run=dry_run)
    return _sync_parts(found, plan, dry_run=dry_run)


def _sync_metrics(run: RunDir, plan: Plan, *, exit_code: int, dry_run: bool) -> int:
    from launcher.errors import Problem, Refused
    from launcher.runs.metrics import read_metrics
    from launcher.runs.sync import (
        FOLDER,
        ORDER,
        find_parts,
        mark_synced,
        read_sent,
        sent_path,
        steps_text,
        unsent_steps,
    )
    from launcher.runs.upload import UploadError, upload_metrics
    from launcher.wording import count

    folder, parts = run.path / FOLDER, find_parts(run.path / "wandb")
    if not (folder / ORDER).exists():
        raise Refused([Problem(where=run.run_id, message="its tracking never started: there is nothing for W&B")])
    steps = unsent_steps(read_metrics(run.metrics), read_sent(sent_path(folder, "wandb")))
    instead = f", in place of {count(len(parts), 'offline part')}" if parts else ""
    print(f"{run.run_id}: from metrics.jsonl {steps_text(steps)}{instead}", flush=True)
    if dry_run or not steps:
        return 0
    _check_server()
    try:
        print(upload_metrics(run, plan, exit_code=exit_code))
    except UploadError as error:
        print(f"it did not work:\n{error}\n`launch sync {run.run_id}` goes on where it stopped")
        return 1
    mark_synced(parts)
    return 0


def _sync_parts(run: RunDir, plan: Plan, *, dry_run: bool) -> int:
    from launcher.errors import Problem, Refused
    from launcher.runs.sync import find_parts, parts_text
    from launcher.runs.upload import UploadError, must_append, upload_part, wandb_program

    parts = find_parts(run.path / "wandb")
    if not parts:
        raise Refused([Problem(where=run.run_id, message="there are no offline parts in its `wandb` folder")])
    lines = parts_text(parts, run.run_id)
    if dry_run:
        print("\n".join([f"{run.run_id}: W&B run {run.run_id}", *(f"  {line}" for line in lines)]))
        return 0
    _check_server()
    program = wandb_program(plan.worker.python)
    if program is None:
        raise Refused([Problem(where="wandb", message="not installed here", hint="pip install wandb")])
    try:
        appends = must_append(program)
        begun: set[str] = set()
        for part, line in zip(parts, lines, strict=True):
            print(f"  {line}", flush=True)
            if not part.synced:
                upload_part(part, first=part.wandb_id not in begun, program=program, appends=appends)
            begun.add(part.wandb_id)
    except UploadError as error:
        print(f"it did not work, and later parts wait for this one:\n{error}")
        return 1
    print(f"{run.run_id}: all parts are uploaded")
    return 0


def _check_server() -> None:
    """A key and a server that answers, or a sentence that says what is missing."""
    import os

    from launcher.errors import Problem, Refused
    from launcher.planning.wandb_login import key_source, server, unreachable

    where = server(os.environ)
    if not key_source(os.environ):
        hint = "wandb login, or export WANDB_API_KEY; `--dry-run` shows what would be uploaded"
        raise Refused([Problem(where="W&B", message=f"there is no key for {where}", hint=hint)])
    if problem := unreachable(where):
        raise Refused([Problem(where="W&B", message=problem, hint="from a machine with a network, or WANDB_BASE_URL")])
