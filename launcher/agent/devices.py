"""A process per node that measures its devices every so often, and writes a line of JSON each time.

It is apart from the agent since a question to NVML may hang, and the agent must go on whatever a driver does; it ends
with its agent. Readers put the files of all nodes together (`launcher.runs.devices`). Standard library and pynvml only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from launcher.agent import proc
from launcher.agent.cpumeter import CpuMeter
from launcher.agent.gpumeter import GpuMeter, NoMeterError
from launcher.planning.plan import Plan
from launcher.runs.rundir import RunDir

BEGIN_S = 1.0
"""After the start of the agent: until then, whatever starts should have the machine to itself."""
_FIRST_S = 1.0
"""From the begin to the first line, so that a short run has one."""
_END_S = 0.5
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""They are meant for the agent, which ends this process last."""


class DeviceWatch:
    """The process that measures the devices of a node, seen from the agent."""

    def __init__(self, plan: Plan, run: RunDir, node: int) -> None:
        self._plan, self._run, self._node = plan, run, node
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> set[int]:
        """Of the process, once there is one."""
        return set() if self._process is None else {self._process.pid}

    def start(self) -> None:
        """Start it; returns at once. Nothing where the plan wants no measurements."""
        if self._plan.watch_s is None:
            return
        order = {
            "file": str(self._run.devices(self._node)),
            "every_s": self._plan.watch_s,
            "agent": os.getpid(),
            "cpus": self._plan.nodes[self._node].cpus or sorted(os.sched_getaffinity(0)),
            "gpus": self._plan.device == "cuda",
            "visible": self._visible(),
        }
        argv = [sys.executable, "-P", str(Path(__file__).with_name("start.py")), "--devices", json.dumps(order)]
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def _visible(self) -> str | None:
        """The GPUs of the workers, as CUDA_VISIBLE_DEVICES names them. SLURM has named its own."""
        if self._plan.slurm is not None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")
        return ",".join(map(str, self._plan.nodes[self._node].gpus)) or None

    def stop(self) -> None:
        """End it. One that hangs in a driver is left to the kernel: it ends when the driver lets go of it."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)


def main(text: str) -> NoReturn:
    """Follow the order of an agent until that has ended."""
    order: dict[str, Any] = json.loads(text)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    proc.die_with_parent(order["agent"])
    watch(order)


def watch(order: Mapping[str, Any]) -> NoReturn:
    """Measure for ever."""
    path = Path(order["file"])
    cpus = CpuMeter(order["agent"], order["cpus"], skip=os.getpid())
    gpus, note = _gpus(order)
    due_s = time.monotonic() + min(_FIRST_S, order["every_s"])
    while True:
        time.sleep(max(0.0, due_s - time.monotonic()))
        line = {"time": round(time.time(), 3), **cpus.measure(), **(gpus.measure() if gpus else {}), **note}
        _append(path, json.dumps(line) + "\n")
        due_s = max(due_s, time.monotonic()) + order["every_s"]  # what was late is not made up for


def _gpus(order: Mapping[str, Any]) -> tuple[GpuMeter | None, dict[str, str]]:
    if not order["gpus"]:
        return None, {}
    try:
        return GpuMeter(order["visible"]), {}
    except NoMeterError as error:
        return None, {"note": f"GPUs are not measured: {error}"}


def _append(path: Path, line: str) -> None:
    """Opened each time: a file system that was away is back then. A line that cannot be written is lost alone."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
