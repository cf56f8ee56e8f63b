"""The real `launch` command, real agents, real workers. Everything waits for events and files, never for a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.events import Event, read_events
from launcher.runs.rundir import RunDir

LAUNCH = str(Path(sys.executable).with_name("launch"))
LIMIT_S = 90.0
"""More than anything here takes, on a machine that does other things too."""
_LOOK_EVERY_S = 0.01

TOY = '''
"""What the scripts of these tests share; imported from the script's own folder."""
import os, pathlib, time
RANK, WORLD, ATTEMPT = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LAUNCH_ATTEMPT"))
RUN = pathlib.Path(os.environ["LAUNCH_RUN_DIR"])

def mark(name):
    """Leave a note with this process's pid: RUN/name.rank.attempt."""
    note = RUN / f"{name}.{RANK}.{ATTEMPT}"
    note.with_suffix(".tmp").write_text(str(os.getpid()))
    note.with_suffix(".tmp").rename(note)

def wait_for(name):
    """Wait for a file in the run directory."""
    while not (RUN / name).exists():
        time.sleep(0.005)

def join():
    """A gloo group, and an all-reduce that proves it."""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    assert dist.get_world_size() == WORLD and dist.get_rank() == RANK
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == WORLD
    return dist
'''


class Launched:
    """One `launch` command that was started by a test."""

    def __init__(
        self, argv: list[str], name: str, folder: Path, env: dict[str, str], *, cwd: Path | None = None
    ) -> None:
        self.runs, self.name, self._out = folder / "runs", name, folder / f"{name}.out"
        self.started_s = time.monotonic()
        with self._out.open("wb") as file:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=cwd or folder
            )

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._out.read_text(errors="replace")

    @property
    def run(self) -> RunDir:
        """The run directory, once there is one."""
        return RunDir(self.until(self._folders)[0])

    def _folders(self) -> list[Path]:
        return [path.parent for path in self.runs.glob(f"{self.name}-*/token")]

    def _is_over(self) -> bool:
        names = [event["event"] for folder in self._folders() for event in read_events(folder)]
        return names.count("supervisor_ended") > names.count("resumed")

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def events(self) -> list[Event]:
        return read_events(self.run.path)

    @property
    def result(self) -> dict[str, Any]:
        return dict(json.loads(self.run.result.read_text()))

    def until(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Wait until something holds, and return it; the test fails when it does not come to be."""
        deadline_s = time.monotonic() + limit_s
        while True:
            was_over = self._is_over()
            if found := condition():
                return found
            assert not was_over, f"the run is over, and it did not happen:\n{self.text}"
            assert time.monotonic() < deadline_s, f"it did not happen within {limit_s} s:\n{self.text}"
            time.sleep(_LOOK_EVERY_S)

    def happened(self, name: str, **fields: Any) -> list[Event]:
        """The events of a name with these fields."""
        return [e for e in self.events if e["event"] == name and all(e.get(k) == v for k, v in fields.items())]

    def wait_for_event(self, name: str, limit_s: float = LIMIT_S, **fields: Any) -> Event:
        """Wait for an event with these fields and return the first one."""
        found: list[Event] = self.until(lambda: self.happened(name, **fields), limit_s)
        return found[0]

    def wait_for_marks(self, name: str, ranks: int, attempt: int = 1, limit_s: float = LIMIT_S) -> list[int]:
        """Wait for the notes of all ranks; return their pids by rank."""
        paths = [self.run.path / f"{name}.{rank}.{attempt}" for rank in range(ranks)]
        self.until(lambda: all(path.exists() for path in paths), limit_s)
        return [int(path.read_text()) for path in paths]

    def let(self, name: str) -> None:
        """Make the file that the workers wait for."""
        (self.run.path / name).touch()

    def signal(self, signum: int) -> None:
        """To the `launch` process itself."""
        os.kill(self.process.pid, signum)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the command to end; its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"launch did not end within {limit_s} s:\n{self.text}")

    def log(self, rank: int, *, node: int = 0, attempt: int = 1) -> str:
        """The log of one rank."""
        return self.run.log(attempt=attempt, node=node, rank=rank).read_text(errors="replace")


Launch = Callable[..., Launched]
Recipe = Callable[..., Path]


def zygote_of(agent: int) -> int:
    """The first child of an agent, from which its workers are forked. Another one measures the devices of the node."""
    return int(Path(f"/proc/{agent}/task/{agent}/children").read_text().split()[0])


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Write a script, which can `import toy`, and a recipe that runs it on two ranks; return the recipe's path."""
    (tmp_path / "toy.py").write_text(TOY)

    def write(source: str, *, nodes: int = 1, nproc: int = 2, **fields: Any) -> Path:
        name = fields.get("name", "script")
        (tmp_path / f"{name}.py").write_text(source)
        known = {
            "name": name,
            "script": f"{name}.py",
            "preload": True,
            "resources": {"nodes": nodes, "nproc_per_node": nproc, "threads": 1},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps({**known, **fields}))  # JSON is YAML
        return path

    return write


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Start `launch TARGET ARGUMENTS`. What still runs at the end of the test is stopped."""
    started: list[Launched] = []

    def start(
        target: str | Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        cwd: Path | None = None,
    ) -> Launched:
        name = f"r{len(started)}"
        options = ["--runs-dir", str(tmp_path / "runs"), "--name", name]
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        argv = [*prefix, LAUNCH, str(target), *arguments[:cut], *options, *arguments[cut:]]
        launched = Launched(argv, name, tmp_path, {**os.environ, **(env or {})}, cwd=cwd)
        started.append(launched)
        return launched

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.signal(signal.SIGKILL)  # the agents see its end, and end
            launched.process.wait()


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run another command of `launch` to its end, from another directory."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [LAUNCH, *arguments], cwd=elsewhere, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    return call
