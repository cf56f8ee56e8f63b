"""`launch explain RUN`: every variable, address, port and interface, and why."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="What this rank finds in its environment.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def explain(run: str, rank: int | None, as_json: bool) -> None:
    """Every variable, address, port and interface of RUN, with where it comes from."""
    from launcher.errors import Problem, RecipeError
    from launcher.runs.events import read_events
    from launcher.runs.explain import as_fields, as_text, rank_environment
    from launcher.runs.explain import explain as explained
    from launcher.runs.find import find_run
    from launcher.runs.load import read_plan

    found = find_run(run)
    plan, events = read_plan(found), read_events(found.path)
    if rank is not None and rank >= plan.world_size:
        message = f"there is no rank {rank}; the ranks are 0 to {plan.world_size - 1}"
        raise RecipeError([Problem(where="--rank", message=message)])
    if rank is None:
        sections = explained(plan, events)
    else:
        sections = {f"Environment of rank {rank}": rank_environment(plan, events, rank)}
    if as_json:
        print(json.dumps({"run_id": found.run_id, "sections": as_fields(sections)}, ensure_ascii=False))
        return
    print(f"{found.run_id}\n\n{as_text(sections)}")
    if rank is not None:
        print("\nThe rest is the environment in which `launch` was called; it is not kept, since secrets may be in it.")
