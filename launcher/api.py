"""`launcher.run(...)`: the road of the command, from Python.

    run = launcher.run("recipe.yaml", nodes=2, overrides=["train.until=300 steps"])
    run.wait()
    run.metrics()[-1]["train/loss"]

Works in a process that has imported torch and runs threads: the run is another process, started by an exec and never
by a fork of this one. No signal handler is set or called, so a thread may do it too. The run ends with this process,
unless it is detached. What `launch` would say on standard error is an exception here, with the same problems.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from launcher.errors import ExitCode, Problem, Refused
from launcher.executors.base import Executor, JobRef, Watcher, get_executor, observe_job
from launcher.preparation import prepare_new
from launcher.road import Request, make_run, prepared, returns_at_once, start
from launcher.runs.create import record_event
from launcher.runs.find import find_run
from launcher.runs.fold import RunRecord
from launcher.runs.load import read_record, read_result
from launcher.runs.logs import select_logs
from launcher.runs.metrics import read_metrics
from launcher.runs.observed import Observation
from launcher.runs.rundir import RunDir
from launcher.runs.states import RunState

_POLL_S = 0.05
_POLL_FAR_S = 0.5
"""For the files of a run on a cluster; its scheduler is asked less often."""

_attached: list[Run] = []
"""Runs that end with this process. They are held here, so that one nobody keeps in a variable is not ended early."""


class Run:
    """A run: one that was started here, or any other that `find` finds."""

    def __init__(self, folder: RunDir, executor: Executor | None = None, ref: JobRef | None = None) -> None:
        self._folder, self._executor, self._ref = folder, executor, ref

    def __repr__(self) -> str:
        return f"<Run {self.run_id} {self.status().state}>"

    @property
    def run_id(self) -> str:
        """Its id, as in every command of `launch`."""
        return self._folder.run_id

    @property
    def run_dir(self) -> Path:
        """Its folder, with all that is known of it."""
        return self._folder.path

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json; None while it runs."""
        return read_result(self._folder)

    @property
    def exit_code(self) -> int | None:
        """What `launch` would have returned: 0, 75 for a stop that saved, or that of the first failing worker.

        None while it runs.
        """
        record = self.status()
        if not record.state.is_final:
            return None
        return int(ExitCode.INTERNAL if record.exit_code is None else record.exit_code)

    def status(self) -> RunRecord:
        """Where it stands: state, cause, nodes, workers, step ..."""
        record = read_record(self._folder, self._observe)
        if record.state.is_final and self._executor is not None and self._ref is not None:
            self._executor.observe(self._ref)  # a process that has ended and is not asked for stays in the table
        return record

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end and return its exit code. Raises TimeoutError; the run goes on then."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        watcher = Watcher(self._observe)
        while self._is_running(watcher):
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.run_id} has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S if self._is_local else _POLL_FAR_S)
        code = self.exit_code
        return int(ExitCode.INTERNAL) if code is None else code

    def metrics(self) -> list[dict[str, Any]]:
        """One record per step, in order: what the newest attempt says. Empty for a script that logs none."""
        return read_metrics(self._folder.metrics)

    def logs(self, rank: int | None = None) -> str:
        """What the foreground would have shown, or all that a rank has printed in its newest attempt."""
        if rank is None:
            paths = [self._folder.console] if self._folder.console.exists() else []
        else:
            paths = select_logs(self._folder, rank=rank, node=None, attempt=None)
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)

    def cancel(self) -> bool:
        """Ask it to save a checkpoint and end; a second time: to end at once. False: it has ended already.

        Raises Refused for a run on another machine.
        """
        record = self.status()
        if record.state.is_final:
            return False
        if record.ref is None:
            raise Refused([Problem(where=self.run_id, message="it was never submitted")])
        if record.state is RunState.UNKNOWN:
            raise Refused(
                [Problem(where=self.run_id, message=f"it is out of reach from this machine: {record.sentence}")]
            )
        record_event(self._folder, "cancel_requested")
        # Of a chain the newest first: none that waits may begin because the one before it has ended.
        jobs = [JobRef.parse(ref) for ref in reversed(record.jobs)]
        asked = [
            (self._executor or get_executor(job.executor)).cancel(job, signum=signal.SIGTERM, again=record.is_cancelled)
            for job in jobs
        ]
        return any(asked)

    @property
    def _is_local(self) -> bool:
        """Whether it was started here, so that it lives just as long as its process."""
        return self._executor is not None and self._ref is not None and self._executor.name in ("local", "here")

    def _is_running(self, watcher: Watcher | None = None) -> bool:
        if self._is_local and self._executor is not None and self._ref is not None:
            return self._executor.observe(self._ref).alive is not False
        return not read_record(self._folder, watcher or self._observe).state.is_final

    def _observe(self, ref: str) -> Observation:
        if self._executor is not None and self._ref is not None and ref == str(self._ref):
            return self._executor.observe(self._ref)
        return observe_job(ref)


def run(
    target: str | PathLike[str],
    *,
    args: Sequence[str] = (),
    overrides: Sequence[str] | Mapping[str, object] = (),
    nodes: int | str | None = None,
    nproc_per_node: int | None = None,
    name: str | None = None,
    on: str | None = None,
    runs_dir: str | PathLike[str] | None = None,
    detached: bool = False,
    wait: bool = False,
    yes: bool = False,
) -> Run:
    """Start a recipe, or a script with its `args`, and return at once; with `wait`, when it has ended.

    Raises RecipeError and Refused, whose `problems` are what `launch` would print; nothing is started then.

    Args:
        target: A recipe (`recipe.yaml`) or a script (`train.py`).
        args: Arguments of the script.
        overrides: `["train.until=300 steps"]`, as on the command line, or `{"train.until": "300 steps"}`.
        nodes: Number of nodes; `"1:4"`: goes on with as few as one when others are lost.
        nproc_per_node: Workers per node.
        name: First part of the run id.
        on: Where to run.
        runs_dir: Where the run directory is made.
        detached: The run goes on when this process ends. On SLURM it always does.
        wait: Return when the run has ended.
        yes: Machines may be rented, which costs money (`on="sky"`).
    """
    _refuse_other_than_texts("args", args)
    if isinstance(overrides, Mapping):
        overrides = [f"{key}={_written(value)}" for key, value in overrides.items()]
    _refuse_other_than_texts("overrides", overrides)
    request = Request(
        target=fspath(target),
        overrides=tuple(overrides),
        script_args=tuple(args),
        nodes=nodes,
        nproc_per_node=nproc_per_node,
        where=on,
        name=name,
        runs_dir=None if runs_dir is None else fspath(runs_dir),
    )
    with prepared(request, warm=True) as ready:
        if ready.plan.sky is not None and not yes:
            raise Refused([Problem(where="on", message="machines are rented, which costs money", hint="yes=True")])
        folder = make_run(ready, command=["launcher.run", request.target, *request.overrides, "--", *args])
        prepare_new(ready.plan, folder, show=lambda line: print(f"prepare | {line}", file=sys.stderr))
        detached = detached or returns_at_once(ready.executor)
        ref = start(ready.plan, folder, ready.executor, attached=not detached)
    started = Run(folder, ready.executor, ref)
    if not detached:
        _attached[:] = [each for each in _attached if each._is_running()]
        _attached.append(started)
    if wait:
        started.wait()
    return started


def find(text: str | PathLike[str]) -> Run:
    """The run of an id, a unique prefix, its last four characters, a path, or `last`. Raises RecipeError."""
    return Run(find_run(fspath(text)))


def _refuse_other_than_texts(name: str, values: Sequence[object]) -> None:
    """Raise TypeError: a number arrives as it is written, so whoever calls writes it; one text is no list of them."""
    if isinstance(values, str):
        raise TypeError(f"{name} is one text, {values!r}, and has to be a list of texts")
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise TypeError(f"{name}[{index}] is {value!r}, and has to be a text")


def _written(value: object) -> str:
    """A value as YAML reads it back to the same one."""
    import json

    return value if isinstance(value, str) else json.dumps(value)
