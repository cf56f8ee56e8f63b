"""`launch try RECIPE`: the rehearsal before the queue."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.app import LaunchCommand
from launcher.cli.types import NODES
from launcher.errors import ExitCode

if TYPE_CHECKING:
    from launcher.planning.plan import Plan
    from launcher.road import Request

FAULTS = ("kill", "preempt", "node-loss")
TIMEOUT = "5m"


class TryCommand(LaunchCommand):
    """Takes the arguments of a script after `--`, as launching does; with a help of its own."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As of any other command."""
        click.Command.format_help(self, ctx, formatter)


@click.command(cls=TryCommand)
@click.argument("target", metavar="RECIPE|SCRIPT.py")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--nodes", type=NODES, metavar="N", help="Number of nodes; on this machine one agent for each.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N", help="Workers per node.")
@click.option(
    "--fault",
    type=click.Choice(FAULTS),
    default="kill",
    show_default=True,
    help="kill: a worker; preempt: the run is told to stop, then resumed; node-loss: an agent and its workers.",
)
@click.option("--timeout", default=TIMEOUT, show_default=True, metavar="TIME", help="Of all of it: 90s, 10m.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, at the end.")
@click.pass_context
def try_(ctx: click.Context, /, target: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Rehearse RECIPE on this machine before it waits in a queue; PASS (exit 0) or FAIL (exit 1), with the evidence.

    A recipe that trains a model: a few steps undisturbed, and the same steps again with a fault after half of them,
    once they are saved. The losses of all steps and the weights at the end have to be equal.

    A script: it is started as the recipe says, struck after its first checkpoint, and has to go on from there when it
    is started again. What cannot be known of a script is said as `not checked`.

    Nothing is kept but the runs of a rehearsal that has failed, whose folder is named then.
    """
    from launcher.road import Request, prepared

    timeout_s = _seconds(options["timeout"])
    request = Request(
        target=target,
        overrides=overrides,
        script_args=ctx.meta["launcher.script_args"],
        nodes=options["nodes"],
        nproc_per_node=options["nproc_per_node"],
        where="local",
    )
    with prepared(request, warm=False) as ready:  # what is wrong with it is said as ever, and nothing is started
        plan = ready.plan
    return _rehearse(request, plan, options["fault"], timeout_s, as_json=options["as_json"])


def _rehearse(request: Request, plan: Plan, fault: str, timeout_s: float, *, as_json: bool) -> int:
    from launcher.rehearsal.checks import Check, check_row, fields, is_pass, verdict_line
    from launcher.rehearsal.plays import Fault, Scene, rehearse
    from launcher.rehearsal.stage import Stage
    from launcher.wording import count

    def say(what: Check | str) -> None:
        if not as_json:
            print(check_row(what) if isinstance(what, Check) else f"  {what}", flush=True)
        elif isinstance(what, str):
            print(what, file=sys.stderr, flush=True)

    began_s = time.monotonic()
    say(f"{request.target}: {plan.nodes_text}, {count(plan.world_size, 'worker')}, on this machine; fault: {fault}")
    with Stage(timeout_s) as stage:
        found = rehearse(Scene(request=request, plan=plan, fault=Fault(fault), stage=stage), say)
        passed = is_pass(found.checks)
        stage.keep = stage.has_runs and not passed
    time_s = time.monotonic() - began_s
    kept = None if passed or not stage.has_runs else str(stage.folder)
    if as_json:
        verdict = {"verdict": "PASS" if passed else "FAIL", "fault": fault, "time_s": round(time_s, 3), "kept": kept}
        print(json.dumps({**verdict, "checks": fields(found.checks)}, ensure_ascii=False))
    else:
        print(verdict_line(found.checks, time_s))
        if kept:
            print(f"the runs are kept in {kept}/runs")
    return 0 if passed else int(ExitCode.FINDING)


def _seconds(text: str) -> float:
    from launcher.recipe.units import Duration

    try:
        time_s = Duration.parse(text).time_s
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--timeout") from None
    if time_s <= 0:
        raise click.BadParameter("it has to be longer than nothing", param_hint="--timeout")
    return time_s
