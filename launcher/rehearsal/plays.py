"""What happens in a rehearsal, in order: for the built-in program, and for scripts.

The built-in program trains a few steps undisturbed, and the same steps again with a fault after half of them, when a
checkpoint is complete; what both leave behind must be equal. Of a script nothing is known but what its recipe declares:
it must save, be started again after the fault, and say, as far as it has a step clock, that it goes on from there.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from launcher.agent.newest import find_newest
from launcher.errors import ExitCode
from launcher.planning.plan import Plan
from launcher.rehearsal import checks
from launcher.rehearsal.checks import Check, Result
from launcher.rehearsal.stage import Played, Stage, TooLateError
from launcher.road import Request
from launcher.runs.events import Event
from launcher.runs.load import read_plan
from launcher.runs.steps import noted_checkpoints
from launcher.wording import count

STEPS = 6
_WINDOW_S = 1.0
"""So long the second half of the steps takes at least: the fault comes after the first, and must not come too late."""
_MOST_STEPS = 20_000
_NO_RESUME = "without a recipe that has `resume:` no script is started again after a failure"
_STILL_S = 1.0
"""A script's checkpoint that has not changed for so long is complete."""


class Fault(StrEnum):
    """What is done to the run."""

    KILL = "kill"
    PREEMPT = "preempt"
    NODE_LOSS = "node-loss"


@dataclass(kw_only=True)
class Rehearsal:
    """What was found so far. `say` is told each check when it is made, and what is being done meanwhile."""

    say: Callable[[Check | str], None]
    checks: list[Check] = field(default_factory=list)

    def add(self, check: Check) -> bool:
        """Note a check; returns whether it did not fail."""
        self.checks.append(check)
        self.say(check)
        return check.result is not Result.FAIL


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is rehearsed, and where."""

    request: Request
    plan: Plan
    """That of the request, which is known to be right."""
    fault: Fault
    stage: Stage


def rehearse(scene: Scene, say: Callable[[Check | str], None]) -> Rehearsal:
    """Play it through. Every finding is a check."""
    found = Rehearsal(say=say)
    play = _play_job if scene.plan.worker.kind == "job" else _play_script
    try:
        play(scene, found)
    except TooLateError as error:
        found.add(checks.failed("in time", str(error)))
    scene.stage.end_all()
    if scene.stage.has_runs:
        found.add(checks.leftovers_check(*scene.stage.leftovers()))
    return found


def _play_job(scene: Scene, found: Rehearsal) -> None:
    steps = STEPS
    found.say(f"undisturbed: {count(steps, 'step')}")
    calm, ended, took_s = _calm(scene, steps)
    if not ended and (more := _steps_for(calm, steps)) > steps:
        found.say(f"undisturbed: {count(more, 'step')}, for {steps} are over too soon to be disturbed")
        steps = more
        calm, ended, took_s = _calm(scene, steps)
    while True:
        check = checks.trained_check(calm.metrics, steps, ended, took_s)
        if check.result is Result.FAIL:
            found.add(check)
            _show_end(calm, found)
            return
        found.say(f"again, and {_WORDS[scene.fault]} when step {steps // 2} is saved")
        hit = scene.stage.start(*_arguments(scene.request, steps), name=f"disturbed-{steps}")
        if (code := _disturb_job(hit, scene, steps // 2)) is not None:
            break
        if steps >= _MOST_STEPS:
            raise TooLateError(f"{count(steps, 'step')} were over before the fault")
        steps *= 4
        found.say(f"undisturbed: {count(steps, 'step')}, for the run was over before the fault")
        calm, ended, took_s = _calm(scene, steps)
    found.add(check)
    _finish(hit, code, scene, found)
    saved = hit.happened("checkpoint_saved", step=steps // 2) or {}
    size = f"{saved.get('size_bytes', 0) / 1e6:.1f} MB" if saved.get("size_bytes") else "its size is not known"
    found.add(checks.passed("saves", f"step-{steps // 2} in {saved.get('time_s', 0):.2f} s, {size}"))
    if not found.add(checks.resumed_check(hit.events, steps // 2)):
        _show_end(hit, found)
        return
    exact = scene.plan.device == "cpu"
    found.add(checks.losses_check(calm.metrics, hit.metrics, exact=exact))
    weights = [played.result.get("weights_sha256") for played in (calm, hit)]
    found.add(checks.weights_check(*weights, exact=exact))
    found.add(checks.samples_check(calm.metrics, hit.metrics))


def _calm(scene: Scene, steps: int) -> tuple[Played, int, float]:
    calm = scene.stage.start(*_arguments(scene.request, steps), name=f"undisturbed-{steps}")
    return calm, *calm.wait()


def _arguments(request: Request, steps: int) -> list[str]:
    """The training of the request, cut to so many steps, with a checkpoint after half of them and copies to nobody."""
    return [
        request.target,
        *request.overrides,
        f"train.until={steps} steps",
        "train.log_every=1 steps",
        "train.eval_every=null",
        f"checkpoint.every={steps // 2} steps",
        *_quiet(request),
    ]


def _quiet(request: Request) -> list[str]:
    nodes = [] if request.nodes is None else ["--nodes", str(request.nodes)]
    workers = [] if request.nproc_per_node is None else ["--nproc-per-node", str(request.nproc_per_node)]
    return ["tracking.wandb.mode=disabled", "tracking.tensorboard=false", *nodes, *workers]


def _steps_for(calm: Played, steps: int) -> int:
    """How many steps are enough for a fault in the middle of them, by how long these took."""
    times = [record["time"] for record in calm.metrics if "train/loss" in record]
    passed = [later - earlier for earlier, later in itertools.pairwise(times)]
    step_s = max(statistics.median(passed), 1e-4) if passed else math.inf
    half = math.ceil(_WINDOW_S / step_s)
    return steps if half <= steps // 2 else min(2 * half, _MOST_STEPS)


_WORDS = {
    Fault.KILL: "one worker is killed",
    Fault.PREEMPT: "it is told to stop",
    Fault.NODE_LOSS: "the agent and all workers of a node are killed",
}


def _disturb_job(hit: Played, scene: Scene, step: int) -> int | None:
    """Do it when the checkpoint of a step is complete. Returns how the run ended; None where it was over before."""
    hit.until(f"step {step} was saved", lambda: hit.happened("checkpoint_saved", step=step))
    struck = _strike(hit, scene)
    code, _ = hit.wait()
    went_on = scene.fault is not Fault.PREEMPT and hit.happened("attempt_started", attempt=2) is not None
    return code if struck and (code or went_on) else None


def _strike(hit: Played, scene: Scene) -> bool:
    """Returns whether there was somebody to strike."""
    if scene.fault is Fault.PREEMPT:
        hit.send([e["pid"] for e in hit.events if e["event"] == "worker_started"], signal.SIGCONT)
        os.kill(hit.process.pid, signal.SIGTERM)
        return True
    workers = [e for e in hit.events if e["event"] == "worker_started" and e["attempt"] == 1]
    if scene.fault is Fault.KILL:
        return bool(hit.send([max(workers, key=lambda event: event["rank"])["pid"]], signal.SIGKILL))
    node = len(scene.plan.nodes) - 1
    agents = [e for e in hit.events if e["event"] == "agent_started" and e["node"] == node]
    struck = hit.send([e["pid"] for e in (*agents[-1:], *(w for w in workers if w["node"] == node))], signal.SIGKILL)
    return bool(struck)


def _finish(hit: Played, code: int, scene: Scene, found: Rehearsal) -> None:
    """The end of a run that was struck, by itself or by `launch resume`. code: that of the run itself."""
    wanted = int(ExitCode.STOPPED) if scene.fault is Fault.PREEMPT else 0
    if scene.fault is not Fault.PREEMPT and code and not scene.plan.limits.max_restarts:
        wanted = code  # nobody restarts it: faults.max_restarts is 0
    if not found.add(checks.exit_check(f"after {_SHORT[scene.fault]}", code, wanted)):
        _show_end(hit, found)
    if code:
        found.say("launch resume")
        again = scene.stage.resume(hit.run)
        code, _ = again.wait()
        if not found.add(checks.exit_check("launch resume", code, 0)):
            _show_end(again, found)


_SHORT = {Fault.KILL: "the kill", Fault.PREEMPT: "TERM", Fault.NODE_LOSS: "the loss of a node"}


def _show_end(played: Played, found: Rehearsal) -> None:
    for line in played.last_lines:
        found.say(f"    {line}")


# ---------------------------------------------------------------- scripts


def _play_script(scene: Scene, found: Rehearsal) -> None:
    request, plan, fault, stage = scene.request, scene.plan, scene.fault, scene.stage
    if not plan.resumable:
        found.add(checks.failed("resumes", f"{_NO_RESUME}; README: Your own torchrun script"))
        return
    if not plan.limits.max_restarts and fault is not Fault.PREEMPT:
        found.add(checks.failed("resumes", "faults.max_restarts is 0, so nothing would be started again"))
        return
    found.say("started; waiting for its first checkpoint")
    quiet = _quiet(request)
    hit = stage.start(request.target, *request.overrides, *quiet, name="script", script_args=request.script_args)
    first = _first_checkpoint(hit, plan, found)
    if first is None:
        return
    newest, saved_s = first
    found.say(f"now {_WORDS[fault]}")
    if not _strike(hit, scene):
        raise TooLateError("it ended before the fault")
    if fault is Fault.PREEMPT:
        code, _ = hit.wait()
        saved = code == ExitCode.STOPPED
        if not saved and code == 0:
            raise TooLateError("it ended before the fault")
        text = f"TERM: exit {code}" + ("" if saved else "; a script that has saved exits with 75, see the README")
        found.add(checks.passed("stops", text) if saved else checks.failed("stops", text))
        hit = stage.resume(hit.run)
    if not _second_attempt(hit, found):
        return
    _goes_on(hit, newest, saved_s, found)
    found.add(checks.unknown("losses", "losses and weights of a script: only the built-in program tells them"))


def _first_checkpoint(hit: Played, plan: Plan, found: Rehearsal) -> tuple[str, float] | None:
    """Wait for the first checkpoint of a script that is complete, and leave its workers frozen there if it is a file.

    They go on for nobody but the fault: a script of a few seconds would be over before it came. Returns the name of the
    checkpoint and when it was written (seconds since the epoch); None, with a finding, where there is none.
    """
    began_s = time.monotonic()
    folders: list[Path] = []
    try:
        path = hit.until("there was a checkpoint", lambda: _complete_checkpoint(hit, folders))
    except TooLateError as error:
        path = None if hit.process.poll() is None else _newest(hit)
        if path is None:
            why = f"{error}; looked for {_pattern(hit, plan)}"
        else:
            why = f"it ended within {_STILL_S:.0f} s of {path.name}, and could not be struck: let it train longer"
        found.add(checks.failed("saves", why))
        _show_end(hit, found)
        return None
    heard_s = time.monotonic()
    while plan.worker.progress_log and not _clock(hit) and time.monotonic() - heard_s < _STILL_S:
        time.sleep(0.01)  # what it has said of its progress is on the way
    shown = str(path).removeprefix(f"{hit.run.path}/")
    found.add(checks.passed("saves", f"{shown} after {time.monotonic() - began_s:.1f} s"))
    return shown, path.stat().st_mtime


def _pattern(hit: Played, plan: Plan) -> str:
    """Where the checkpoints of a script are looked for."""
    if plan.worker.adapter is not None:
        return f"what {plan.worker.adapter} saves"
    own = read_plan(hit.run).worker.resume_newest
    return own or f"{hit.run.checkpoints}/* (LAUNCH_CHECKPOINT_DIR)"


def _newest(hit: Played) -> Path | None:
    """The newest checkpoint of a script."""
    worker = read_plan(hit.run).worker
    if worker.adapter is not None:
        return next(reversed(noted_checkpoints(hit.run).values()), None)
    path = find_newest(worker.resume_newest or str(hit.run.checkpoints / "*"))
    return None if path is None else Path(path)


def _complete_checkpoint(hit: Played, folders: list[Path]) -> Path | None:
    """A checkpoint that nobody writes to any more; the workers are frozen then, where it is one file.

    folders: those that were the newest one at an earlier look; a script may save more often than they take to be still.
    """
    path = _newest(hit)
    if path is None:
        return None
    if read_plan(hit.run).worker.adapter is not None:
        return path  # noted when it was complete
    if path.is_dir():
        folders += [] if path in folders else [path]
        return next((each for each in folders if _is_still(each)), None)
    workers = [event["pid"] for event in hit.events if event["event"] == "worker_started"]
    hit.send(workers, signal.SIGSTOP)
    if path.exists() and not hit.has_open(workers, path):
        return path
    hit.send(workers, signal.SIGCONT)
    return None


def _is_still(folder: Path) -> bool:
    """Whether it is there, and has not changed for a while."""
    try:
        return time.time() - max(each.stat().st_mtime for each in (folder, *folder.rglob("*"))) > _STILL_S
    except FileNotFoundError:  # something in it was renamed, or it is removed
        return False


def _second_attempt(hit: Played, found: Rehearsal) -> bool:
    """Wait for the script to be started again."""
    try:
        hit.until("it was started again", lambda: hit.happened("attempt_started", attempt=2))
    except TooLateError as error:
        reason = (hit.happened("finished") or {}).get("reason")
        found.add(checks.failed("restarts", f"{reason or error}"))
        _show_end(hit, found)
        return False
    begun = hit.until("its workers were started again", lambda: hit.happened("worker_started", attempt=2))
    was_told = hit.happened("stop_requested") is not None
    failed = None if was_told else hit.happened("failure", attempt=1) or hit.happened("node_lost")
    how = f"{begun['time'] - failed['time']:.2f} s after the failure" if failed else "by launch resume"
    found.add(checks.passed("restarts", f"attempt 2, {how}"))
    return True


def _goes_on(hit: Played, newest: str, saved_s: float, found: Rehearsal) -> None:
    """Wait for a sign that the second attempt works: a step, another checkpoint, or the end."""
    path = _newest(hit)
    before_ns = None if path is None else (path, path.stat().st_mtime_ns)
    has_clock = bool(_clock(hit) or read_plan(hit.run).worker.progress_log)

    def sign() -> str:
        if any(said["attempt"] > 1 for said in _clock(hit)):
            return "a step"
        if has_clock:
            return ""  # it comes, and tells more than a checkpoint
        now = _newest(hit)
        if now is not None and (now, now.stat().st_mtime_ns) != before_ns:
            return "another checkpoint"
        return ""

    try:
        seen = hit.until("there was a step or a checkpoint after the restart", sign)
    except TooLateError as error:
        code = hit.process.poll()
        if code == 0:  # a short one
            found.add(checks.passed("works on", "to its end, exit 0"))
            found.add(checks.script_resumed_check(hit.events, newest, saved_s))
        else:
            found.add(checks.failed("works on", str(error) if code is None else f"exit {code} after the restart"))
            _show_end(hit, found)
        return
    found.add(checks.passed("works on", f"{seen} after the restart"))
    found.add(checks.script_resumed_check(hit.events, newest, saved_s))


def _clock(hit: Played) -> list[Event]:
    """What a script has said of its progress."""
    return [event for event in hit.events if event["event"] == "progress"]
