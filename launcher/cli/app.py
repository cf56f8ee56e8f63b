"""Every command and option of `launch`. Imports click alone; each command imports its code when it is called."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import click

from launcher.cli.failures import guarded
from launcher.cli.types import NODES

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("launcher.cli.recipes:check", "Validate recipes, start nothing."),
    "try": ("launcher.cli.try_:try_", "Rehearsal on this machine: train a little, break it, compare. PASS or FAIL."),
    "schema": ("launcher.cli.recipes:schema", "JSON Schema of a recipe, for editors."),
    "list": ("launcher.cli.recipes:list_", "What a recipe may name: models, datasets, strategies ..."),
    "ls": ("launcher.cli.runs:ls", "Runs, newest first."),
    "status": ("launcher.cli.status:status", "State, queue, nodes, workers, attempts and cause of a run, or of many."),
    "logs": ("launcher.cli.logs:logs", "Output of a run; -f follows it."),
    "report": ("launcher.cli.report:report", "Why a run ended, and where the time went."),
    "watch": (
        "launcher.cli.watch:watch",
        "Go on watching a run on Docker or ssh from here: what is lost is replaced.",
    ),
    "cancel": ("launcher.cli.runs:cancel", "Stop a run, with a checkpoint."),
    "resume": ("launcher.cli.resume:resume", "Go on with a run that has ended, under the same id."),
    "rerun": ("launcher.cli.rerun:rerun", "The same plan again, as a new run."),
    "diff": ("launcher.cli.diff:diff", "How two runs differ: recipe, code, environment, speed, memory, metrics."),
    "eval": ("launcher.cli.eval_:eval_", "Evaluate a checkpoint of a run, on its data or on other data."),
    "export": ("launcher.cli.export:export", "The model of a run as one safetensors file, with its recipe."),
    "path": ("launcher.cli.runs:path", "Directory of a run, or of one of its checkpoints."),
    "explain": ("launcher.cli.explain:explain", "Every variable, address, port and interface, and why."),
    "stacks": ("launcher.cli.stacks:stacks", "Where every rank is now: its Python stack."),
    "sync": ("launcher.cli.sync:sync", "Upload what W&B kept offline, in order."),
    "init-site": ("launcher.cli.init_site:init_site", "Write a profile of this cluster, from what SLURM says."),
    "doctor": ("launcher.cli.doctor:doctor", "This machine: what is missing, with a fix each."),
}
"""Name -> where the click command is, and its line in the help. Nothing is imported to show the help."""

_DEFAULT = ""
_USAGE = "RECIPE|SCRIPT.py [KEY=VALUE ...] [OPTIONS] [-- SCRIPT ARGUMENTS]"


def run_app(arguments: list[str]) -> int:
    """Run the command line and return its exit code. Problems are printed, never raised."""
    return guarded(lambda: app.main(arguments, prog_name="launch", standalone_mode=False), arguments)


class LaunchGroup(click.Group):
    """A group whose default command is launching itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, imported now."""
        if cmd_name == _DEFAULT:
            return launch
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Send everything that does not begin with the name of a command to the default one."""
        if args and args[0] not in COMMANDS and args[0] not in ("--help", "-h", "--version"):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of launching, and the other commands."""
        formatter.write_usage("launch", _USAGE)
        formatter.write_usage("launch", "COMMAND ...", prefix=" " * len("Usage: "))
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(inspect.cleandoc(self.help or ""))
        launch.format_options(click.Context(launch, help_option_names=ctx.help_option_names), formatter)
        with formatter.section("Commands (`launch COMMAND --help` says more)"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


class LaunchCommand(click.Command):
    """The default command. What follows `--` belongs to the script and is not parsed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at the first `--`."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta["launcher.script_args"] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help of `launch` itself."""
        app.format_help(ctx, formatter)


@click.group(cls=LaunchGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="launcher", prog_name="launch")
def app() -> None:
    """Train what RECIPE (YAML) describes, or run a torchrun script, on one node or many.

    RUN in the commands below is an id, a unique prefix, its last four characters, a path, or `last`; a point of a sweep
    is SWEEP.INDEX. `ls`, `status`, `report`, `cancel` and `resume` take a whole sweep, too.
    """


@click.command(name=_DEFAULT, cls=LaunchCommand)
@click.argument("target", metavar="RECIPE|SCRIPT.py")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--nodes", type=NODES, metavar="N|MIN:MAX", help="Number of nodes; 1:4 goes on with fewer.")
@click.option("--nproc-per-node", type=click.IntRange(min=1), metavar="N", help="Workers per node.")
@click.option(
    "--on",
    "where",
    metavar="WHERE",
    help="Where to run: local, slurm, here (this allocation), docker, ssh, sky, a profile.",
)
@click.option("--name", metavar="NAME", help="First part of the run id.")
@click.option("--after", metavar="RUN|JOB", help="On SLURM: not before this run, or job, has ended well.")
@click.option(
    "--begin", metavar="TIME", help="On SLURM: not before then, as sbatch writes it: now+1hour, 2026-12-24T08:00."
)
@click.option("--sweep", multiple=True, metavar="KEY=A,B", help="Many runs, one for each value; again for a grid.")
@click.option("--dry-run", is_flag=True, help="Show the plan, start nothing.")
@click.option("--detach/--follow", default=None, help="Return at once (default on SLURM), or stay and show the output.")
@click.option("--runs-dir", metavar="DIR", help="Where the run directory is made. [env: LAUNCH_RUNS; default: ./runs]")
@click.option("--yes", is_flag=True, help="Rent machines (--on sky) without asking.")
@click.option("--json", "as_json", is_flag=True, help="The last line of the output is one JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
@click.pass_context
def launch(ctx: click.Context, /, **options: Any) -> int:
    """Start what a recipe describes."""
    from launcher.cli.run import LaunchOptions, launch_target
    from launcher.road import Request

    asked = ("target", "overrides", "nodes", "nproc_per_node", "where", "name", "runs_dir", "after", "begin", "sweep")
    request = Request(script_args=ctx.meta["launcher.script_args"], **{key: options.pop(key) for key in asked})
    return launch_target(request, LaunchOptions(**options))
