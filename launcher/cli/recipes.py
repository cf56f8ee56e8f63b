"""`launch check`, `launch schema`, `launch list`: what a recipe may say, and whether one does."""

from __future__ import annotations

import click

KINDS = ("models", "datasets", "strategies", "optimizers", "schedules")
"""The kinds of the catalog; written out, so that `launch list --help` reads nothing."""


@click.command()
@click.argument("items", nargs=-1, required=True, metavar="RECIPE... [KEY=VALUE ...]")
@click.pass_context
def check(ctx: click.Context, items: tuple[str, ...]) -> None:
    """Validate recipes and start nothing. Exit 2 when one has a mistake; all of its mistakes are listed."""
    from pathlib import Path

    from launcher.errors import ExitCode, RecipeError
    from launcher.recipe.loader import load_recipe
    from launcher.recipe.paths import is_file

    paths = [item for item in items if "=" not in item or is_file(Path(item))]
    overrides = [item for item in items if item not in paths]
    if not paths:
        raise click.UsageError("name a recipe to check")
    failed = False
    for path in paths:
        try:
            load_recipe(Path(path), overrides)
            click.echo(f"ok  {path}")
        except RecipeError as error:
            failed = True
            click.echo(str(error), err=True)
    ctx.exit(ExitCode.USAGE if failed else ExitCode.DONE)


@click.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for completion and checks in editors."""
    from importlib.resources import files

    click.echo(files("launcher.recipe").joinpath("schema.json").read_text("utf-8"), nl=False)


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: name -> description, options, file.")
def list_(kind: str, as_json: bool) -> None:
    """List what a recipe may name, with options, types and defaults."""
    from launcher.recipe.catalog import catalog

    entries = catalog(kind)
    if as_json:
        import dataclasses
        import json

        click.echo(json.dumps({name: dataclasses.asdict(e) for name, e in entries.items()}, indent=1, default=str))
        return
    for entry in entries.values():
        click.echo(f"{click.style(entry.name, bold=True)}  {entry.description}")
        for option in entry.options:
            default = "required" if option.required else f"= {option.default!r}"
            click.echo(f"    {option.name}: {option.type or 'any'} {default}    {option.doc}".rstrip())
