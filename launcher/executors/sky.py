"""Machines that SkyPilot rents for the run: its command submits the task, says how it is, stops it and takes it down.

The command may belong to another environment (`sky.command`): nothing of SkyPilot is imported here.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from launcher.errors import Problem, RecipeError, Refused
from launcher.executors.base import JobRef
from launcher.executors.sky_client import command_path, find_command, load_problems
from launcher.executors.sky_home import bring_home, copy_record
from launcher.executors.sky_states import job_state, read_answer
from launcher.planning import calls
from launcher.planning.plan import Plan, SkyPlan
from launcher.planning.sky import TASK
from launcher.planning.sky_script import TOKEN
from launcher.planning.store_facts import store_fault
from launcher.runs.find import find_run
from launcher.runs.load import read_plan
from launcher.runs.observed import Observation

if TYPE_CHECKING:
    from launcher.runs.rundir import RunDir

_ASK_S = 120.0
"""The first question starts SkyPilot's server on this machine."""
_LAST_LINES = 3
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class SkyExecutor:
    """Runs a plan on rented machines."""

    name: ClassVar[str] = "sky"

    def check(self, plan: Plan) -> Sequence[Problem]:
        """Whether SkyPilot is there, and takes the task."""
        assert plan.sky is not None
        problem = find_command(plan.sky.submit[0])
        found = [problem] if problem is not None else load_problems(plan)
        if plan.sky.store and (fault := store_fault(plan.sky.store)):
            hint = "the record of the run comes home through it"
            found.append(Problem(where="checkpoint.store", message=fault, hint=hint))
        return found

    def warm(self, run_dir: Path) -> None:
        """Agents run on other machines: there is nothing to import here."""

    def drop(self) -> None:
        """There is nothing to undo."""

    def submit(self, plan: Plan, run: RunDir, *, attached: bool) -> JobRef:
        """Hand the task to SkyPilot, which rents the machines: that takes minutes. Raises Refused with its words."""
        assert plan.sky is not None
        sky, task = plan.sky, run.path / TASK
        task.parent.mkdir(exist_ok=True)
        task.write_text(sky.task, encoding="utf-8")
        said = task.with_name("submit.log")
        if said.exists() and not sky.store:
            raise Refused([_nothing_left(plan)])
        if said.exists():  # it is resumed: what has ended it must not end it again
            copy_record("withdraw", sky.store, run.path)
        environment = {**os.environ, TOKEN: run.token.read_text(encoding="utf-8").strip()}
        begun_bytes = said.stat().st_size if said.exists() else 0
        with said.open("ab") as log:
            # In a session of its own: a Ctrl-C must not end it half-way, then nobody knows what is rented.
            process = subprocess.Popen(
                [command_path(sky.submit[0]), *sky.submit[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            code = process.wait()
        if code:
            _ask(sky.remove)  # of a cluster that came up halfway
            raise Refused([_not_submitted(sky, code, said.read_bytes()[begun_bytes:])])
        return JobRef(self.name, plan.run_id)

    def observe(self, ref: JobRef) -> Observation:
        """What SkyPilot says; and what the nodes have written down is brought home."""
        found = _run_of(ref)
        if found is None:
            return Observation(alive=None, detail=f"the run directory of {ref.ident} is not known here")
        run, plan = found
        sky = plan.sky
        if sky is None:
            return Observation(alive=None, detail=f"{ref.ident} has gone on elsewhere")
        if find_command(sky.submit[0]) is not None:
            return Observation(alive=None, detail=f"there is no command {sky.submit[0]!r} here, which has its machines")
        seen = job_state(sky, [_ask(argv) for argv in sky.state])
        if not seen.state:
            return seen
        is_over = seen.alive is False
        came = bring_home(plan, run, machines=bool(seen.nodes), last=is_over)
        if is_over and seen.nodes and sky.remove and came:
            _ask(sky.remove)
        return seen

    def observe_all(self, refs: Sequence[JobRef]) -> Mapping[JobRef, Observation]:
        """The same of many, one by one: each may be with a SkyPilot of its own."""
        return {ref: self.observe(ref) for ref in refs}

    def cancel(self, ref: JobRef, *, signum: int, again: bool = False) -> bool:
        """Ask the agents to save and leave; the second time, end it as SkyPilot does."""
        found = _run_of(ref)
        if found is None or found[1].sky is None:
            return False
        run, sky = found[0], found[1].sky
        if sky.store and not again:
            return copy_record(f"stop:{int(signum)}", sky.store, run.path)
        return _done(sky.stop)


def _run_of(ref: JobRef) -> tuple[RunDir, Plan] | None:
    """The run of a reference, by its id."""
    try:
        run = find_run(ref.ident)
        return run, read_plan(run)
    except (RecipeError, Refused, OSError):
        return None


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """One call of SkyPilot's command; None: it did not answer."""
    try:
        return calls.run([command_path(argv[0]), *argv[1:]], limit_s=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _ask(argv: Sequence[str]) -> Any:
    """The JSON that it answers with; None: no answer."""
    done = _run(argv) if argv else None
    return None if done is None or done.returncode else read_answer(done.stdout)


def _done(argv: Sequence[str]) -> bool:
    done = _run(argv)
    return done is not None and done.returncode == 0


def _nothing_left(plan: Plan) -> Problem:
    message = "its checkpoints were on machines that are taken down, so there is nothing to go on from"
    hint = "launch rerun starts it anew; checkpoint.store: s3://bucket/folder keeps them"
    return Problem(where=plan.run_id, message=message, hint=hint)


def _not_submitted(sky: SkyPlan, code: int, said: bytes) -> Problem:
    """SkyPilot's own last words."""
    text = _COLOURS.sub("", said.decode(errors="replace"))
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip(" \t-─")]
    errors = [line for line in lines if "error" in line.lower()]
    message = " | ".join(errors[-1:] or lines[-_LAST_LINES:]) or f"it ended with exit code {code}, and said nothing"
    hint = f"`sky status` shows whether machines are there; `sky down {sky.name}` takes them down"
    return Problem(where="SkyPilot", message=message, hint=hint)
