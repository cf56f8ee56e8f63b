"""The recipe's `prepare`: lines of bash that are run once, where `launch` is called, before anything is submitted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from launcher import redact
from launcher.errors import Problem, Refused
from launcher.planning.variables import OFFLINE_ORIGIN
from launcher.runs.create import record_event
from launcher.wording import signal_name

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_KEPT_LINES = 3
_SAY_FAILED = 'trap \'printf "%s" "$BASH_COMMAND" >"$LAUNCH_PREPARE_FAILED"\' ERR'


def prepare(plan: Plan, run: RunDir, *, show: Callable[[str], None]) -> None:
    """Run the lines as one bash script that ends at the first failure; nothing where there are none.

    Each line of output goes to `show` and to RUN/logs/prepare.log. Raises Refused where one fails.
    """
    if not plan.prepare:
        return
    begun_s = time.monotonic()
    failed = run.path / "logs" / ".prepare-failed"
    code, output = _run(plan, run, failed, show)
    line = failed.read_text(encoding="utf-8", errors="replace") if failed.exists() else ""
    failed.unlink(missing_ok=True)
    if code:
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        said = f": {output[-1]}" if output else ""
        message = f"`{line}` {how}{said}" if line else f"prepare {how}{said}"
        raise Refused([Problem(where="prepare", message=message, hint="nothing was submitted")])
    record_event(run, "prepared", time_s=round(time.monotonic() - begun_s, 3))


def _run(plan: Plan, run: RunDir, failed: Path, show: Callable[[str], None]) -> tuple[int, list[str]]:
    """The exit code (negative: of a signal), and the last lines of the output."""
    redactor, kept = redact.own(), deque[str](maxlen=_KEPT_LINES)
    script = "\n".join(["set -E", _SAY_FAILED, *plan.prepare])
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script, "prepare"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(plan, run, failed, os.environ),
        start_new_session=True,  # Ctrl-C reaches it once, by us
    )
    assert process.stdout is not None
    with _passed_on(process), (run.path / "logs" / "prepare.log").open("ab") as log:
        for raw in process.stdout:
            line = redactor.data(raw)
            log.write(line)
            log.flush()
            text = line.decode(errors="replace").rstrip("\n")
            kept.append(text)
            show(text)
        return process.wait(), list(kept)


def _environment(plan: Plan, run: RunDir, failed: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The user's own environment with what `env` of the recipe says, which a download may need as the workers do.

    What only holds on nodes without internet does not hold here.
    """
    env = {variable.name: variable.value for variable in plan.env if variable.origin != OFFLINE_ORIGIN}
    ours = {"LAUNCH_RUN_DIR": str(run.path), "LAUNCH_RUN_ID": run.run_id, "LAUNCH_PREPARE_FAILED": str(failed)}
    return {**environment, **env, **ours}


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A request to stop this process ends the lines, too."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)

    before = {}
    try:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[signum] = signal.signal(signum, pass_on)
    except ValueError:
        pass  # not the main thread of a program that calls `launcher.run`: its signals are its own
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
