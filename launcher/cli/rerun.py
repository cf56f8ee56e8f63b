"""`launch rerun RUN`: the same plan again, as a new run."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.types import NODES


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--nodes", type=NODES, metavar="N|MIN:MAX", help="Number of nodes; 1:4 goes on with fewer.")
@click.option("--name", metavar="NAME", help="First part of the run id.")
@click.option("--on", "where", metavar="WHERE", help="Where to run, as of `launch`. Default: where RUN ran.")
@click.option("--dry-run", is_flag=True, help="Show the plan, start nothing.")
@click.option("--detach/--follow", default=None, help="Return at once (default on SLURM), or stay and show the output.")
@click.option(
    "--runs-dir", metavar="DIR", help="Where the run directory is made. [env: LAUNCH_RUNS; default: beside RUN]"
)
@click.option("--yes", is_flag=True, help="Rent machines (--on sky) without asking.")
@click.option("--json", "as_json", is_flag=True, help="The last line of the output is one JSON object.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
def rerun(run: str, overrides: tuple[str, ...], **options: Any) -> int:
    """Start the plan of RUN again: the same recipe and the same code, under a new id and from the beginning."""
    from launcher.cli.run import LaunchOptions, launch_prepared
    from launcher.road import prepare_again, recipe_flags
    from launcher.runs.find import find_run

    flags = recipe_flags(nodes=options.pop("nodes"), name=options.pop("name"))
    place = {key: options.pop(key) for key in ("where", "runs_dir")}
    return launch_prepared(
        prepare_again(find_run(run), overrides, flags=flags, dry_run=options["dry_run"], **place),
        LaunchOptions(**options),
    )
