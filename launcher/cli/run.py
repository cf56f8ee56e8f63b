"""`launch RECIPE|SCRIPT.py`: start it, or show its plan."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.cli.prices import confirm_price
from launcher.cli.signals import Requests, SignalInbox
from launcher.errors import Problem, RecipeError, Refused
from launcher.executors.base import Executor, JobRef
from launcher.preparation import prepare, prepare_new
from launcher.road import Prepared, Request, is_sweep, make_run, prepared, record_refused, returns_at_once, start
from launcher.runs.follow import Tail, size_bytes

if TYPE_CHECKING:
    from launcher.planning.facts import Facts
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a launch is shown, beside what is launched."""

    dry_run: bool = False
    detach: bool | None = None
    as_json: bool = False
    verbose: bool = False
    yes: bool = False
    """What machines cost is agreed to."""

    @property
    def follows(self) -> bool:
        """Whether somebody has asked to stay with what is started."""
        return self.detach is False


def launch_target(request: Request, options: LaunchOptions) -> int:
    """Start a recipe or a script, or show its plan. Returns the exit code."""
    _refuse_mistyped(request)
    if is_sweep(request):
        from launcher.cli.sweep import launch_sweep

        return launch_sweep(request, options)
    with prepared(request, warm=not options.dry_run) as ready:
        return launch_prepared(ready, options)


def launch_prepared(ready: Prepared, options: LaunchOptions) -> int:
    """Start a plan, or show it. Returns the exit code."""
    for note in ready.notes:
        print(note, file=sys.stderr)
    if options.dry_run:
        return show_plan(ready.plan, ready.facts, as_json=options.as_json, verbose=options.verbose)
    confirm_price(ready.plan, yes=options.yes)
    with SignalInbox() as inbox:
        run = make_run(ready, command=sys.argv)
        prepare_new(ready.plan, run, show=show_preparation)
        detach = returns_at_once(ready.executor) if options.detach is None else options.detach
        return submit(ready.plan, run, ready.executor, inbox, detach=detach, as_json=options.as_json)


def prepare_resumed(plan: Plan, run: RunDir) -> None:
    """Run the plan's `prepare` for a run that is resumed, and has ended again where it fails: Refused."""
    try:
        prepare(plan, run, show=show_preparation)
    except Refused as error:
        record_refused(run, error)
        raise


def show_preparation(line: str) -> None:
    """Pass on what a line of `prepare` has written."""
    print(f"prepare | {line}", file=sys.stderr, flush=True)


_STARTERS = ("python", "python3", "torchrun", "accelerate", "deepspeed", "run")


def _refuse_mistyped(request: Request) -> None:
    """A mistyped command looks like a recipe."""
    if request.target.isidentifier() and not request.script_args and not os.path.lexists(request.target):
        from difflib import get_close_matches

        from launcher.cli.app import COMMANDS

        close = get_close_matches(request.target, COMMANDS, n=1)
        hint = f"did you mean `launch {close[0]}`?" if close else f"commands: {', '.join(COMMANDS)}"
        if request.target in _STARTERS:
            hint = "a script is started by its name: launch train.py --nodes 2 -- --lr 1e-3"
        message = "there is no such command, and no such recipe file"
        raise RecipeError([Problem(where=request.target, message=message, hint=hint)])


def show_plan(plan: Plan, facts: Facts, *, as_json: bool, verbose: bool) -> int:
    """Print a plan, for people or for programs."""
    from launcher.planning.render import render_plan

    print(plan.to_json() if as_json else render_plan(plan, facts, verbose=verbose), end="")
    return 0


def submit(
    plan: Plan,
    run: RunDir,
    executor: Executor,
    inbox: SignalInbox,
    *,
    detach: bool,
    as_json: bool,
    is_new: bool = True,
    saved: int | None = None,
) -> int:
    """Start the agents of a plan, then stay with them or return. Returns the exit code.

    saved: of a resume, the step of the newest checkpoint.
    """
    console = Tail(run.console, begin_bytes=size_bytes(run.console))  # a resume does not show the past again
    if plan.sky is not None:
        said = run.path / "sky" / "submit.log"
        print(f"SkyPilot rents the machines, which takes minutes; what it says: {said}", file=sys.stderr, flush=True)
    ref = start(plan, run, executor, attached=not detach, is_new=is_new)
    more = (
        {}
        if plan.executor != "slurm"
        else _show_submitted(plan, run, ref, executor, as_json=as_json, follows=not detach, saved=saved)
    )
    if not detach:
        from launcher.cli.follow import Job, follow  # imported while the agents start

        job = Job(executor=executor, ref=ref, plan=plan, run=run, console=console)
        return follow(job, inbox, as_json=as_json)
    for signum in Requests().of(
        inbox.wait(0.0), time.monotonic()
    ):  # it came when there was nothing yet to pass it on to
        executor.cancel(ref, signum=signum)
    if as_json:
        show_json({"run_id": run.run_id, "run_dir": str(run.path), "ref": str(ref), **more})
    elif plan.executor != "slurm":
        if plan.sky is not None:
            print(f"{plan.sky.name} goes on without this machine; its record comes home whenever somebody looks at it")
        if plan.hosts is not None:
            print(
                "it needs neither this terminal nor this machine; what is lost is replaced from here while this one is"
            )
            print(f"up, and from anywhere that sees {run.path}: launch watch {run.run_id}")
        print(submitted_text(run.run_id))
    return 0


def _show_submitted(
    plan: Plan, run: RunDir, ref: JobRef, executor: Executor, *, as_json: bool, follows: bool, saved: int | None
) -> dict[str, Any]:
    """Say what SLURM makes of a job; the same for programs."""
    from launcher.cli.submitted import free_bytes, submitted_block, submitted_fields
    from launcher.cli.summary import here

    seen = executor.observe(ref)
    if not as_json:
        free, now_s = free_bytes(run.path), time.time()
        text = submitted_block(plan, ref, seen, cwd=here(), free_bytes=free, now_s=now_s, follows=follows, saved=saved)
        print(text, flush=True)
    return submitted_fields(plan, ref, seen)


def submitted_text(run_id: str) -> str:
    """What a user may want to do after a launch that returned at once."""
    return f"{run_id}\nNext   launch status last      launch logs last -f      launch cancel last"


def show_json(fields: Mapping[str, Any]) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(fields, ensure_ascii=False), flush=True)
