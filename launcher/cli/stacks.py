"""`launch stacks RUN`: where every rank is now."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from launcher.runs.fold import RunRecord
    from launcher.runs.rundir import RunDir
    from launcher.runs.spy import Target


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="This rank alone.")
@click.option("-v", "--verbose", is_flag=True, help="Every thread, with all of its calls.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything.")
def stacks(run: str, rank: int | None, verbose: bool, as_json: bool) -> int:
    """Where every rank of RUN is now: its Python stack. Ranks at the same place stand together."""
    import socket

    from launcher.executors.base import observe_job
    from launcher.runs.find import find_run
    from launcher.runs.load import read_record
    from launcher.runs.spy import take_stacks
    from launcher.runs.stacks import as_fields, detail, summary

    found = find_run(run)
    record = read_record(found, observe_job)
    targets = targets_of(record, found, rank)
    taken = take_stacks(targets, run_id=found.run_id, hostname=socket.gethostname())
    shown = [stack for stack in taken if stack.threads]
    code = 0 if len(shown) == len(taken) else 1
    if as_json:
        attempt = record.workers[0]["attempt"]
        print(json.dumps({"run_id": found.run_id, "attempt": attempt, "ranks": as_fields(taken)}, ensure_ascii=False))
        return code
    sources = " and ".join(sorted({stack.source for stack in shown}))
    what = f"rank {rank}" if rank is not None else f"{len(shown)} of {len(record.workers)} ranks"
    by = f", from {sources}" if sources else ""
    print(f"{found.run_id}  {record.state}   stacks of {what}{by}")
    for line in summary(taken):
        print(f"  {line.replace(f'{found.code}/', '')}")  # as the page of a failure shows a place
    for hint in dict.fromkeys(stack.hint for stack in taken if stack.hint):
        print(f"  hint: {hint}")
    if verbose:
        for stack in taken:
            print("\n" + "\n".join(detail(stack)))
    elif shown:
        print(f"-v shows every call: launch stacks {run} -v")
    return code


def targets_of(record: RunRecord, run: RunDir, rank: int | None) -> list[Target]:
    """The workers to look at. Raises Refused where there is none."""
    from launcher.errors import Problem, Refused
    from launcher.runs.spy import Target

    if not record.workers:
        message = f"no worker runs: {record.state}" + (f", {record.sentence}" if record.sentence else "")
        hint = f"what they wrote is in `launch logs {run.run_id} --rank R`, and also the stacks after a timeout"
        raise Refused([Problem(where=run.run_id, message=message, hint=hint if record.state.is_final else "")])
    hosts = {node["node"]: str(node["host"]) for node in record.nodes}
    targets = [
        Target(
            rank=worker["rank"],
            node=worker["node"],
            pid=worker["pid"],
            host=hosts.get(worker["node"], record.host),
            job=record.ref.partition(":")[2] if record.ref and record.on_slurm else "",
            log=run.log(attempt=worker["attempt"], node=worker["node"], rank=worker["rank"]),
        )
        for worker in record.workers
        if rank in (None, worker["rank"])
    ]
    if not targets:
        ranks = ", ".join(str(worker["rank"]) for worker in record.workers)
        raise Refused([Problem(where="--rank", message=f"rank {rank} does not run", hint=f"those that do: {ranks}")])
    return targets
