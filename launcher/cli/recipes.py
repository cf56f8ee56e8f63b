"""`launch check`, `launch schema`, `launch list`: what a recipe may say, and whether one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launcher.errors import Problem
    from launcher.recipe.loader import LoadedRecipe

KINDS = ("models", "datasets", "tasks", "strategies", "optimizers", "schedules")
"""The kinds of the catalog; written out, so that `launch list --help` reads nothing."""
PLACES = ("profiles", "executors")
"""What `--on` may name."""


@click.command()
@click.argument("items", nargs=-1, required=True, metavar="RECIPE... [KEY=VALUE ...]")
@click.option("--on", "where", metavar="WHERE", help="Check it on top of this profile, and the profile.")
@click.pass_context
def check(ctx: click.Context, items: tuple[str, ...], where: str | None) -> None:
    """Validate recipes and start nothing. Exit 2 when one has a mistake; all of its mistakes are listed.

    Workers and devices are counted as `launch` would at this place. What only this machine lacks is a remark.
    """
    from pathlib import Path

    from launcher.errors import ExitCode, RecipeError
    from launcher.executors.base import EXECUTORS
    from launcher.recipe.loader import load_recipe
    from launcher.recipe.paths import is_file
    from launcher.recipe.whereto import find_place

    paths = [item for item in items if "=" not in item or is_file(Path(item))]
    overrides = [item for item in items if item not in paths]
    if not paths:
        raise click.UsageError("name a recipe to check")
    place = find_place(where, EXECUTORS)
    profile = place.profile
    on = "" if profile is None else f" on {profile.name}"
    failed = False
    for path in paths:
        try:
            loaded = load_recipe(Path(path), overrides, profile=profile)
            points = f"   a sweep of {len(loaded.points)}" if loaded.points else ""
            notes = [*_fit(loaded, place.executor), *_missing(loaded, place.executor)]
            click.echo(f"ok  {path}{on}{points}")
            for note in notes:
                click.echo(f"    - {note}")
        except RecipeError as error:
            failed = True
            click.echo(str(error), err=True)
    ctx.exit(ExitCode.USAGE if failed else ExitCode.DONE)


def _fit(loaded: LoadedRecipe, executor: str) -> list[str]:
    """Remarks on a recipe, or on the points of its sweep, each once. Raises RecipeError for what does not fit."""
    from launcher.errors import RecipeError
    from launcher.planning.facts import gather_facts
    from launcher.planning.fit import fit
    from launcher.planning.make import problems_of
    from launcher.sweeps import at_point

    facts = gather_facts()
    notes: dict[str, None] = {}
    problems: dict[tuple[str, str], Problem] = {}
    for each in [at_point(loaded, point) for point in loaded.points] or [loaded]:
        remarks = fit(each.recipe, facts, executor)
        notes |= dict.fromkeys(remarks.notes)
        if remarks.problems:
            error = problems_of(remarks, each)
            problems |= {(problem.where, problem.message): problem for problem in error.problems}
    if problems:
        raise RecipeError(list(problems.values()))
    return list(notes)


def _missing(loaded: LoadedRecipe, executor: str) -> list[str]:
    """Files of the data that are not here, where the run would be: a recipe may be checked before they are."""
    from pathlib import Path

    from launcher.executors.local_data import missing_files

    recipe = loaded.recipe
    if executor != "local" or recipe.data is None or recipe.prepare or recipe.setup:
        return []
    source = loaded.source
    folder = Path.cwd() if source is None or recipe.workdir is None else source.parent / recipe.workdir
    found = missing_files(recipe.data.name, recipe.data.options, folder)
    return [f"data.{option}: there is no {path}" for option, path in found]


@click.command()
@click.option("--profile", is_flag=True, help="Of a profile, in place of a recipe.")
def schema(profile: bool) -> None:
    """Print the JSON Schema of a recipe, for completion and checks in editors."""
    from importlib.resources import files

    package, name = ("launcher.shipped", "profiles/schema.json") if profile else ("launcher.recipe", "schema.json")
    click.echo(files(package).joinpath(name).read_text("utf-8"), nl=False)


@click.command("list")
@click.argument("kind", type=click.Choice((*KINDS, *PLACES)))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: name -> description, options, file.")
def list_(kind: str, as_json: bool) -> None:
    """List what a recipe may name, with options, types and defaults; and what `--on` may name."""
    if kind in PLACES:
        _list_places(kind, as_json=as_json)
        return
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


def _list_places(kind: str, *, as_json: bool) -> None:
    """Executors, or profiles with the mistakes that they have."""
    import json

    from launcher.executors.base import EXECUTORS
    from launcher.recipe.files import shown
    from launcher.recipe.profiles import all_profiles, folders

    if kind == "executors":
        click.echo(json.dumps(list(EXECUTORS)) if as_json else "\n".join(EXECUTORS))
        return
    found = list(all_profiles())
    if as_json:
        rows = {
            profile.name: {"executor": profile.executor, "description": profile.description, "file": str(profile.path)}
            for profile in found
        }
        click.echo(json.dumps(rows, indent=1))
        return
    for profile in found:
        broken = click.style("  has mistakes: launch check RECIPE --on " + profile.name, fg="red")
        click.echo(f"{click.style(profile.name, bold=True)}  {profile.description}".rstrip())
        click.echo(f"    {profile.executor or '?'}  {shown(profile.path)}{broken if profile.findings else ''}")
    if not found:
        click.echo(f"no profiles in {', '.join(map(str, folders()))}: `launch init-site` writes one")
