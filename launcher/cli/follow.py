"""Staying with a run in the foreground: its output, requests to stop, the final words, the exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.screen import Screen, status_line
from launcher.cli.signals import Requests
from launcher.cli.status import expected_start
from launcher.cli.story import Story, Watch
from launcher.cli.summary import final_block, here
from launcher.errors import ExitCode
from launcher.executors.base import Executor, JobRef
from launcher.runs.events import read_events
from launcher.runs.fold import RunRecord, fold
from launcher.runs.follow import Tail
from launcher.runs.load import newest_metrics, read_record, read_result
from launcher.runs.observed import ALIVE, GONE
from launcher.runs.report import short_id
from launcher.runs.states import RunState

if TYPE_CHECKING:
    from launcher.cli.signals import SignalInbox
    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_POLL_S = 0.05
_POLL_FAR_S = 0.3
"""For the files of a run on a cluster; its scheduler is asked less often."""
_FEW_LINES_BYTES = 16 << 10


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan that was submitted, and where it shows what it does."""

    executor: Executor
    ref: JobRef
    plan: Plan
    run: RunDir
    console: Tail


def follow(job: Job, inbox: SignalInbox, *, as_json: bool = False, looks_only: bool = False) -> int:
    """Show a run until it has ended, pass requests to stop on, and return its exit code.

    A run on a cluster belongs to its scheduler: a request to stop only ends the showing there; so it does where
    somebody `looks_only`. The end of a terminal (HUP) is no request to a run on machines, which needs none.
    """
    if looks_only or job.ref.executor in ("slurm", "sky"):
        record = watch_far(job, inbox)
        if not record.state.is_final:
            return _detach(job, record, as_json=as_json)
    else:
        if not watch(job, inbox):
            return _detach(job, read_record(job.run, lambda _: ALIVE), as_json=as_json)
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


def _detach(job: Job, record: RunRecord, *, as_json: bool) -> int:
    """The last words of a person who looks away."""
    if as_json:
        fields = {"run_id": job.run.run_id, "run_dir": str(job.run.path), "ref": record.ref, "state": record.state}
        print(json.dumps(fields, ensure_ascii=False), flush=True)
    else:
        name = short_id(job.run.run_id)
        if not job.run.path.exists():
            print(f"{job.run.path} was removed; job {job.ref.ident} goes on without it", file=sys.stderr)
            return int(ExitCode.DONE)
        print(f"{job.run.run_id} goes on ({record.state})", file=sys.stderr)
        print(f"Next   launch logs {name} -f      launch status {name}      launch cancel {name}", file=sys.stderr)
    return int(ExitCode.DONE)


def _is_full(path: Path) -> bool:
    """Whether a disk has no room for even a few lines, which is why the agents could not say how it ended."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _FEW_LINES_BYTES or disk.f_favail == 0 < disk.f_files


def _last_lines(path: Path, *, count: int = 12) -> list[str]:
    return (
        path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-count:] if path.exists() else []
    )


def watch(job: Job, inbox: SignalInbox) -> bool:
    """Copy the console log to the terminal until the job is gone. False: the terminal is, and the run goes on."""
    screen, console, asked, requests = Screen(), job.console, 0, Requests()
    while True:
        gone = job.executor.observe(job.ref).alive is False
        # Read after the question, so that the last words of a job that is gone are all here.
        screen.lines(console.drain() if gone else console.read())
        if gone:
            break
        if screen.wants_status:
            screen.status(live_status(job.run))
        for signum in requests.of(inbox.wait(_POLL_S), time.monotonic()):
            if signum == signal.SIGHUP and job.plan.hosts is not None:
                console.close()
                return False
            asked += 1
            screen.clear()
            print(stop_message(job.plan, asked), file=sys.stderr, flush=True)
            job.executor.cancel(job.ref, signum=signum)
    console.close()
    screen.clear()
    return True


def watch_far(job: Job, inbox: SignalInbox) -> RunRecord:
    """Copy the console log of a run on a cluster to the terminal until it is over, or until somebody looks away.

    Over all allocations: from the queue to the end. Returns the record; the run goes on if that is not final.
    """
    screen, console, story = Screen(), job.console, Story(beside_console=True)
    looking = Watch(job.run, lambda ref: job.executor.observe(JobRef.parse(ref)))
    while True:
        record = looking.look()
        if told := story.lines(record, now_s=time.time()):
            screen.clear()
            print("\n".join(told), file=sys.stderr, flush=True)
        screen.lines(console.drain() if record.state.is_final else console.read())
        if record.state.is_final or not job.run.path.exists():
            break
        if screen.wants_status:
            screen.status(_far_status(job.run, record))
        if inbox.wait(_POLL_FAR_S):
            break
    console.close()
    screen.clear()
    return record


def _far_status(run: RunDir, record: RunRecord) -> str:
    """As `live_status`, and what the scheduler says of a run that waits."""
    if record.queue is not None and record.queue.waits:
        starts = expected_start(record.queue.starts_s, time.time())
        return "  ".join(filter(None, [run.run_id, record.state, record.queue.reason, starts]))
    return live_status(run)


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
