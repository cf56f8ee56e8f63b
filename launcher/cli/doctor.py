"""`launch doctor`: this machine, or the hosts of a profile, with a fix for each finding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launcher.planning.doctor import Diagnosis


@click.command()
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE ...]")
@click.option("--on", "where", metavar="WHERE", help="The hosts of a profile; `here`: the nodes of the allocation.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--runs-dir", metavar="DIR", help="Where runs would be made. [env: LAUNCH_RUNS; default: ./runs]")
@click.option(
    "--all-reduce/--no-all-reduce",
    default=None,
    help="Add up numbers and multiply matrices on all GPUs, or on the CPU. [default: with two GPUs, or two hosts]",
)
def doctor(
    overrides: tuple[str, ...], where: str | None, as_json: bool, runs_dir: str | None, all_reduce: bool | None
) -> int:
    """This machine: what is missing, with a fix each. Exit code 1: there is a PROBLEM; notes do not count.

    With two GPUs or more all of them add up numbers over NCCL, for a minute at most: twice, where the first try fails.
    With `--on` the hosts of a profile are asked, each alone, all beside each other, and what they do together.
    """
    import os

    from launcher.errors import ExitCode
    from launcher.executors.doctor_places import machines_of
    from launcher.executors.host_doctor import examine
    from launcher.planning.doctor import Level
    from launcher.planning.facts import forwarded, gather_facts
    from launcher.recipe.paths import expanded
    from launcher.wording import count

    facts = gather_facts()
    looked = machines_of(where, overrides, gpus=bool(facts.gpus))
    root = expanded(runs_dir or os.environ.get("LAUNCH_RUNS") or looked.runs_dir or "runs")
    if looked.machines:
        network = {name: value for name, value in forwarded(os.environ).items() if name.startswith(("NCCL_", "GLOO_"))}
        found = [
            *examine(
                looked.machines,
                python=looked.python,
                runs_root=str(root.absolute()),
                all_reduce=all_reduce,
                environment=network,
            )
        ]
    else:
        from launcher.executors.host_doctor import examine_here

        found = [*examine_here(facts, root, all_reduce=all_reduce, environment=os.environ)]
    counts = {level: sum(each.level is level for each in found) for level in Level}
    if as_json:
        from dataclasses import asdict

        print(json.dumps({"findings": [asdict(each) for each in found], "problems": counts[Level.PROBLEM]}))
    else:
        _show(found)
        print(f"\n{count(counts[Level.PROBLEM], 'problem')}, {count(counts[Level.NOTE], 'note')}")
    return ExitCode.FINDING if counts[Level.PROBLEM] else ExitCode.DONE


def _show(found: list[Diagnosis]) -> None:
    width, of = max(len(each.what) for each in found), ""
    several = any(each.where for each in found)
    for each in found:
        if several and each.where != of:
            of = each.where
            print(f"\n{of or 'together'}")
        print(f"{each.level:<7}  {each.what:<{width}}  {each.message}")
        if each.fix:
            print(f"{'':<7}  {'':<{width}}  fix: {each.fix}")
