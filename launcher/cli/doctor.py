"""`launch doctor`: this machine, with a fix for each finding."""

from __future__ import annotations

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--runs-dir", metavar="DIR", help="Where runs would be made. [env: LAUNCH_RUNS; default: ./runs]")
@click.option(
    "--all-reduce/--no-all-reduce",
    default=None,
    help="Add up numbers on all GPUs, or by two processes on the CPU. [default: where there are two GPUs or more]",
)
def doctor(as_json: bool, runs_dir: str | None, all_reduce: bool | None) -> int:
    """This machine: what is missing, with a fix each. Exit code 1: there is a PROBLEM; notes do not count.

    With two GPUs or more all of them add up numbers over NCCL, for a minute at most: twice, where the first try fails.
    """
    import os
    import sys
    from dataclasses import asdict

    from launcher.agent.stacks import find_pyspy
    from launcher.errors import ExitCode
    from launcher.planning.all_reduce import all_reduce_here
    from launcher.planning.doctor import Level, diagnose
    from launcher.planning.facts import gather_facts, package_version
    from launcher.planning.machine import probe_machine
    from launcher.recipe.paths import expanded
    from launcher.runs.find import state_root
    from launcher.wording import count

    root = expanded(runs_dir or os.environ.get("LAUNCH_RUNS") or "runs")
    wandb = package_version("wandb", sys.path)
    machine = probe_machine(gather_facts(), root, state_root(), pyspy=find_pyspy(), wandb_version=wandb)
    found = [*diagnose(machine), *all_reduce_here(machine, asked=all_reduce, environment=os.environ)]
    counts = {level: sum(each.level is level for each in found) for level in Level}
    if as_json:
        print(json.dumps({"findings": [asdict(each) for each in found], "problems": counts[Level.PROBLEM]}))
    else:
        width = max(len(each.what) for each in found)
        for each in found:
            print(f"{each.level:<7}  {each.what:<{width}}  {each.message}")
            if each.fix:
                print(f"{'':<7}  {'':<{width}}  fix: {each.fix}")
        print(f"\n{count(counts[Level.PROBLEM], 'problem')}, {count(counts[Level.NOTE], 'note')}")
    return ExitCode.FINDING if counts[Level.PROBLEM] else ExitCode.DONE
