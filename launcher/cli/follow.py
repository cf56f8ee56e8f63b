"""Staying with a run in the foreground: its output, requests to stop, the final words, the exit code."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.screen import Screen, status_line
from launcher.cli.summary import final_block, here
from launcher.errors import ExitCode
from launcher.executors.base import Executor, JobRef
from launcher.runs.events import read_events
from launcher.runs.fold import RunRecord, fold
from launcher.runs.follow import Tail
from launcher.runs.load import newest_metrics, read_record, read_result
from launcher.runs.observed import ALIVE, GONE
from launcher.runs.states import RunState

if TYPE_CHECKING:
    from launcher.cli.signals import SignalInbox
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_POLL_S = 0.05
_FEW_LINES_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan that was submitted, and where it shows what it does."""

    executor: Executor
    ref: JobRef
    plan: Plan
    run: RunDir
    console: Tail


def follow(job: Job, inbox: SignalInbox, *, as_json: bool = False) -> int:
    """Show a run until it has ended, pass requests to stop on, and return its exit code."""
    watch(job, inbox)
    record = read_record(job.run, lambda _: GONE)
    result = read_result(job.run)
    exit_code = int(ExitCode.INTERNAL if record.exit_code is None else record.exit_code)
    if as_json:
        fields = {"run_id": job.run.run_id, "run_dir": str(job.run.path), "ref": str(job.ref)}
        text = json.dumps({**fields, "state": record.state, "exit_code": exit_code}, ensure_ascii=False)
    elif not job.run.path.exists():
        text = f"{job.run.run_id}: how it ended is not known, for {job.run.path} was removed while it was alive"
    else:
        text = final_block(record, result, job.plan, cwd=here())
        if result is None and _is_full(job.run.path):
            text = f"{text}\nlaunch | no space is left for {job.run.path}"
        if not (result or {}).get("attempts"):  # no worker was started: all there is is what the agents' Python said
            text = "".join([*_last_lines(job.run.agents_log), text])
    Screen().lines(f"{text}\n".encode(errors="backslashreplace"))
    return exit_code


def _is_full(path: Path) -> bool:
    """Whether a disk has no room for even a few lines, which is why the agents could not say how it ended."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _FEW_LINES_BYTES or disk.f_favail == 0 < disk.f_files


def _last_lines(path: Path, *, count: int = 12) -> list[str]:
    return (
        path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-count:] if path.exists() else []
    )


def watch(job: Job, inbox: SignalInbox) -> None:
    """Copy the console log to the terminal until the job is gone."""
    screen, console, asked = Screen(), job.console, 0
    while True:
        gone = job.executor.observe(job.ref).alive is False
        # Read after the question, so that the last words of a job that is gone are all here.
        screen.lines(console.drain() if gone else console.read())
        if gone:
            break
        if screen.wants_status:
            screen.status(live_status(job.run))
        for signum in inbox.wait(_POLL_S):
            asked += 1
            screen.clear()
            print(stop_message(job.plan, asked), file=sys.stderr, flush=True)
            job.executor.cancel(job.ref, signum=signum)
    console.close()
    screen.clear()


def stop_message(plan: Plan, asked: int) -> str:
    """What a user is told when a request to stop is passed on."""
    if asked > 1:
        return "ending at once"
    saves = plan.worker.kind == "job" or plan.worker.adapter is not None  # of any other script only itself can tell
    what = "saving a checkpoint" if saves else "the workers are asked to end"
    return f"stopping: {what} (again to end at once)"


def live_status(run: RunDir) -> str:
    """The line below the output: where the run stands now. What an earlier attempt reached is not where it is."""
    events = list(read_events(run.path))
    record: RunRecord = fold(events, ALIVE, None, run_id=run.run_id)
    if record.waiting is not None:
        missing = ", ".join(map(str, record.waiting.get("missing", ())))
        return f"{run.run_id}  waiting for node {missing}, {record.waiting.get('waited_s', 0):.0f} s"
    if record.state is not RunState.RUNNING:
        return status_line(run.run_id, record.state, [], None)
    newest = [line for line in newest_metrics(run.metrics) if line.get("attempt") == record.attempts]
    line = status_line(run.run_id, record.state, newest, record.total_steps)
    of_script = [each for each in events if each["event"] == "progress" and each.get("attempt") == record.attempts]
    return f"{line}  step {of_script[-1].get('step')}" if of_script else line
