"""The interpreter that a recipe names: asked once, in bounded time, without importing torch."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass

PROBE_LIMIT_S = 20.0
"""A file system that is cold takes its time; an interpreter that is none takes for ever."""

_PROBE = """
import sys
print("launch-python %d.%d.%d" % tuple(sys.version_info[:3]))
sys.stdout.flush()
try:
    from importlib.metadata import version
    print("launch-torch " + version("torch"))
except ImportError:  # no such package, or a Python without importlib.metadata
    pass
"""
"""Runs on any Python 3. What a site of the user's prints besides does not count."""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What the workers of a script run in, where that is not our own interpreter."""

    path: str
    version: str = ""
    """Empty where it could not be asked."""
    torch_version: str | None = None
    """From the metadata of the package, None without one."""
    fault: str = ""
    """Why it could not be asked."""


def probe(path: str, *, limit_s: float = PROBE_LIMIT_S) -> Interpreter:
    """Ask an interpreter for its version and that of its torch, with the environment that the workers inherit."""
    try:
        process = subprocess.Popen(
            [path, "-c", _PROBE],
            cwd="/",  # the first entry of its path: nothing there hides a module
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Interpreter(path=path, fault=error.strerror or str(error))
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a script around an interpreter has it as a child
        process.communicate()
        return Interpreter(path=path, fault=f"no answer within {limit_s:g} s")
    answers = dict(line.split(" ", 1) for line in output.splitlines() if line.startswith("launch-") and " " in line)
    if "launch-python" not in answers:
        said = errors.strip().splitlines()
        return Interpreter(path=path, fault=said[-1] if said else f"it is no Python: exit code {process.returncode}")
    return Interpreter(path=path, version=answers["launch-python"], torch_version=answers.get("launch-torch"))
