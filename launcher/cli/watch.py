"""`launch watch RUN`: whoever sees the run directory and reaches its machines can watch a run on Docker or ssh."""

from __future__ import annotations

import click

from launcher.errors import Problem, Refused


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--detach", is_flag=True, help="Return at once; the watcher stays.")
def watch(run: str, detach: bool) -> int:
    """Replace what RUN loses, pass stops on, bring its record home: go on from here where nobody else does.

    Ctrl-C ends the showing alone.
    """
    from launcher.cli.follow import Job, follow
    from launcher.cli.signals import SignalInbox
    from launcher.executors.base import JobRef, get_executor, observe_job
    from launcher.executors.hosted import start_watcher
    from launcher.executors.watch_lock import watcher_of
    from launcher.runs.find import find_run
    from launcher.runs.follow import Tail, size_bytes
    from launcher.runs.load import read_plan, read_record

    found = find_run(run)
    plan = read_plan(found)
    if plan.hosts is None:
        message = f"it was launched on {plan.executor}, where nobody has to watch it"
        raise Refused([Problem(where=found.run_id, message=message, hint=f"launch logs {found.run_id} -f")])
    record = read_record(found, observe_job)
    if record.state.is_final and found.result.exists() and watcher_of(found) is None:
        print(f"{found.run_id} has ended already: {record.state}")
        return 0
    if record.ref is None:
        raise Refused([Problem(where=found.run_id, message="it was never submitted; there is nothing to watch")])
    with SignalInbox() as inbox:
        if watcher_of(found) is None:
            start_watcher(found, first=False)
            print(f"{found.run_id} is watched from here")
        else:
            print(f"{found.run_id} is watched from here already")
        if detach:
            return 0
        ref = JobRef.parse(record.ref)
        console = Tail(found.console, begin_bytes=size_bytes(found.console))
        job = Job(executor=get_executor(ref.executor), ref=ref, plan=plan, run=found, console=console)
        return follow(job, inbox, looks_only=True)
