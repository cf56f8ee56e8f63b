"""The recipe's `prepare`: lines of bash that are run once, where `launch` is called, before anything is submitted."""

from __future__ import annotations

import os
import select
import shlex
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
from launcher.runs.create import discard, record_event
from launcher.wording import first_line, signal_name

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.planning.plan import Plan
    from launcher.runs.rundir import RunDir

_KEPT_LINES = 3
_LOOK_S = 0.05


def prepare(plan: Plan, run: RunDir, *, show: Callable[[str], None]) -> None:
    """Run the lines as one bash script that ends at the first failure; nothing where there are none.

    Each line of output goes to `show` and to RUN/logs/prepare.log. Raises Refused where one fails.
    """
    if not plan.prepare:
        return
    begun_s = time.monotonic()
    begun = run.path / "logs" / ".prepare-line"
    code, output = _run(plan, run, begun, show)
    number = begun.read_text() if begun.exists() else ""
    begun.unlink(missing_ok=True)
    if code:
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        said = f": {output[-1]}" if output else ""
        line = f"line {number} (`{first_line(plan.prepare[int(number) - 1])}`)" if number.isdecimal() else "bash"
        raise Refused([Problem(where="prepare", message=f"{line} {how}{said}", hint="nothing was submitted")])
    record_event(run, "prepared", time_s=round(time.monotonic() - begun_s, 3))


def prepare_new(plan: Plan, run: RunDir, *, show: Callable[[str], None]) -> None:
    """The same for a run, or a sweep, that was just made: where a line fails, it is gone. Raises Refused."""
    try:
        prepare(plan, run, show=show)
    except Refused:
        discard(run)
        raise


def _run(plan: Plan, run: RunDir, begun: Path, show: Callable[[str], None]) -> tuple[int, list[str]]:
    """The exit code (negative: of a signal), and the last lines of the output."""
    redactor, kept = redact.own(), deque[str](maxlen=_KEPT_LINES)
    noted = shlex.quote(str(begun))
    script = "\n".join(f"echo -n {number} >{noted}\n{line}" for number, line in enumerate(plan.prepare, 1))
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script, "prepare"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(plan, run, os.environ),
        start_new_session=True,  # Ctrl-C reaches it once, by us
    )
    with _passed_on(process), (run.path / "logs" / "prepare.log").open("ab") as log:
        for raw in _output(process):
            line = redactor.data(raw)
            log.write(line)
            log.flush()
            text = line.decode(errors="replace").rstrip("\n")
            kept.append(text)
            show(text)
        return process.wait(), list(kept)


def _output(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """The lines of a process until its end. What it leaves running may hold its output open: that is not waited for."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    while True:
        has_ended = process.poll() is not None
        ready, _, _ = select.select([descriptor], [], [], 0 if has_ended else _LOOK_S)
        if not ready and has_ended:
            break
        if ready:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line + b"\n" for line in lines)
    process.stdout.close()
    if rest:
        yield rest + b"\n"


def _environment(plan: Plan, run: RunDir, environment: Mapping[str, str]) -> dict[str, str]:
    """The user's own environment with what `env` of the recipe says, which a download may need as the workers do.

    What only holds on nodes without internet does not hold here.
    """
    env = {variable.name: variable.value for variable in plan.env if variable.origin != OFFLINE_ORIGIN}
    ours = {"LAUNCH_RUN_DIR": str(run.path), "LAUNCH_RUN_ID": run.run_id}
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
