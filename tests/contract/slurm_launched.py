"""The real `launch` on the login node of the test cluster; its runs, its jobs. As `launched` for one machine."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH, LIMIT_S, Launched
from slurm_cluster import COMMAND, SlurmCluster

from launcher.runs.events import read_events

_RESULT_LIMIT_S = 5.0
_LOGIN = (str(COMMAND), "run")


class SlurmLaunched(Launched):
    """One `launch ... --on slurm`. The command itself ends when the job is queued, unless it follows: `wait()`."""

    def __init__(self, cluster: SlurmCluster, argv: list[str], name: str, folder: Path, env: dict[str, str]) -> None:
        super().__init__(argv, name, folder, env)
        self.cluster = cluster

    def _is_over(self) -> bool:
        folders = self._folders()
        if not folders:  # nothing was started, and nothing will be
            return self.process.poll() not in (None, 0)
        names = [event["event"] for folder in folders for event in read_events(folder)]
        return names.count("finished") > names.count("resumed")

    @property
    def refs(self) -> list[str]:
        """Every job of the run, in the words of the executor, in the order in which they were asked for."""
        return [str(e["ref"]) for e in self.events if e["event"] in ("submitted", "requeued") and e.get("ref")]

    @property
    def job(self) -> str:
        """The id of its newest job, as squeue and scontrol take it; waits until there is one."""
        ref: str = self.until(lambda: self.refs)[-1]
        return ref.partition(":")[2]

    @property
    def state(self) -> str:
        """What squeue says of the newest job: PENDING, RUNNING, COMPLETED ..."""
        return self.cluster.state_of(self.job)

    def wait_for_state(self, state: str, limit_s: float = LIMIT_S) -> None:
        """Wait until squeue says this of the newest job."""
        self.until(lambda: self.state == state, limit_s)

    def wait_for_result(self, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait until the run is over, whatever comes of it; its result.json."""
        self.until(self._is_over, limit_s)
        deadline_s = time.monotonic() + _RESULT_LIMIT_S  # the event may be seen before the file
        while not self.run.result.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self.result

    @property
    def console(self) -> str:
        """What a person who watches the run sees, and for a run that has no such thing yet its jobs' own output."""
        slurm = sorted(self.run.slurm.glob("*")) if self.run.slurm.exists() else []
        texts = [path for path in (self.run.console, self.run.agents_log, *slurm) if path.is_file()]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')}" for path in texts)


def quickest_s(call: Callable[[], object], *, limit_s: float, times: int = 6) -> float:
    """How long a call takes, the best of several: other tests may be at work. One that is quick enough is enough."""
    best_s = math.inf
    for _ in range(times):
        begun_s = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - begun_s)
        if best_s < limit_s:
            break
    return best_s


OnSlurm = Callable[..., SlurmLaunched]
Login = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def on_slurm(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[OnSlurm]:
    """Start `launch TARGET ARGUMENTS --on slurm` on the login node, with runs and state of the test's own.

    `--on` among the arguments is left as it is; `prefix` stands before `launch`, as `env -i` would. What is still
    queued or runs at the end of the test is cancelled.
    """
    started: list[SlurmLaunched] = []

    def start(
        target: str | Path, *arguments: str, env: dict[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> SlurmLaunched:
        name = f"s{len(started)}"
        options = ["--runs-dir", str(tmp_path / "runs"), "--name", name]
        options += [] if "--on" in arguments else ["--on", "slurm"]
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        argv = [*_LOGIN, *prefix, LAUNCH, str(target), *arguments[:cut], *options, *arguments[cut:]]
        launched = SlurmLaunched(slurm_cluster, argv, name, tmp_path, {**os.environ, **(env or {})})
        started.append(launched)
        return launched

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.signal(signal.SIGKILL)
            launched.process.wait()
    cancel_jobs_below(slurm_cluster, tmp_path)


@pytest.fixture
def login(slurm_cluster: SlurmCluster, tmp_path: Path) -> Login:
    """Run another command of `launch` on the login node to its end, from another directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        assert slurm_cluster.scratch.exists()
        return subprocess.run(
            [*_LOGIN, LAUNCH, *arguments], cwd=elsewhere, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})},
        )  # fmt: skip

    return call


def cancel_jobs_below(cluster: SlurmCluster, folder: Path) -> None:
    """Cancel every job that was submitted from a folder, or whose script is in it, and wait until it has left."""

    def jobs() -> list[str]:
        lines = cluster.run("squeue", "-h", "-r", "-o", "%i|%Z|%o").splitlines()
        return [job for job, *paths in (line.split("|") for line in lines) if any(is_below(path) for path in paths)]

    def is_below(path: str) -> bool:
        return Path(path).is_relative_to(folder)

    if left := jobs():
        # At once, the steps and the batch script alike: nobody waits for a checkpoint any more.
        cluster.command("run", "scancel", "--full", "--signal=KILL", *left)
        cluster.command("run", "scancel", *left)
        cluster.wait_until(lambda: not jobs(), lambda: f"jobs {jobs()} do not leave")
