"""Programs of others that are waited for only so long, and not for what they have started: a site's `squeue` may be a
script around the real one. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, AnyStr


def run(
    argv: Sequence[str],
    *,
    limit_s: float,
    told: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program in a session of its own and return what it says. Raises as `subprocess.run` does."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        output, errors = answer(process, limit_s=limit_s, told=told)
    except KeyboardInterrupt:
        end(process)
        raise
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


def answer(process: subprocess.Popen[AnyStr], *, limit_s: float, told: AnyStr | None = None) -> tuple[AnyStr, AnyStr]:
    """What a program says on its two streams, after it was told something.

    It has to lead a group of its own (`process_group=0`). Raises subprocess.TimeoutExpired after so long; then all of
    the group is ended.
    """
    try:
        return process.communicate(told, timeout=limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        raise


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a program that leads a group, with all of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:  # what has left the group may hold the other end for ever
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    process.wait()
