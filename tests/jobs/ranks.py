"""Real ranks on this machine, forked from one preloaded process, with the environment that an agent gives them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.recipe.schema import Recipe
from launcher.runs.events import read_events
from launcher.runs.metrics import read_metrics

WAIT_S = 60.0


@dataclass
class Forker:
    process: subprocess.Popen[str]

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    script = Path(__file__).with_name("jobs_forker.py")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LAUNCH_", "WANDB_"))}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield Forker(process)
        assert process.stdin is not None
        process.stdin.close()


@dataclass
class Ranks:
    """The ranks of one attempt."""

    forker: Forker
    run_dir: Path
    attempt: int
    pids: list[int]
    open: set[int] = field(default_factory=set)

    def log(self, rank: int = 0) -> str:
        return (self.run_dir / f"attempt-{self.attempt}-rank-{rank}.log").read_text()

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def wait(self) -> list[int | None]:
        """Exit codes of all ranks; None for one that had to be killed here."""
        codes = [self.forker.ask({"wait": pid, "timeout_s": WAIT_S})["exit_code"] for pid in self.pids]
        self.open.clear()
        return codes

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be seen from outside."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, self.log()
            time.sleep(0.002)

    def until_step(self, step: int) -> None:
        """Wait until this attempt has trained a step."""
        self.until(lambda: any(r["step"] >= step and r["attempt"] == self.attempt for r in read_metrics(self.metrics)))

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    def event(self, name: str) -> dict[str, Any]:
        """The last event of this name."""
        return [event for event in read_events(self.run_dir) if event["event"] == name][-1]

    @property
    def weights(self) -> str:
        return str(self.event("summary")["weights_sha256"])


Start = Callable[..., Ranks]


@pytest.fixture
def start(forker: Forker) -> Iterator[Start]:
    """start(run_dir, recipe, ranks=2, attempt=1, env={}, load=[files to run first], path=[folders]) -> Ranks."""
    started: list[Ranks] = []

    def start_ranks(
        run_dir: Path,
        recipe: dict[str, Any],
        *,
        ranks: int = 2,
        attempt: int = 1,
        local_size: int | None = None,
        env: dict[str, str] | None = None,
        rank_env: dict[int, dict[str, str]] | None = None,
        planned: int | None = None,
        load: list[str] | None = None,
        path: list[str] | None = None,
        grace_s: float = 30.0,
    ) -> Ranks:
        write_plan(run_dir, recipe, planned or ranks, grace_s=grace_s)
        port = free_port()
        pids = []
        for rank in range(ranks):
            variables = worker_env(
                run_dir, rank=rank, ranks=ranks, local_size=local_size or ranks, port=port, attempt=attempt
            )
            order = {
                "env": {**variables, **(env or {}), **(rank_env or {}).get(rank, {})},
                "argv": [],
                "cwd": str(run_dir),
                "log": str(run_dir / f"attempt-{attempt}-rank-{rank}.log"),
                "load": load or [],
                "path": path or [],
            }
            pids.append(forker.ask({"start": order})["pid"])
        group = Ranks(forker, run_dir, attempt, pids, set(pids))
        started.append(group)
        return group

    yield start_ranks
    for group in started:
        for pid in group.open:
            os.kill(pid, signal.SIGKILL)
            forker.ask({"wait": pid, "timeout_s": 5})


def write_plan(run_dir: Path, recipe: dict[str, Any], ranks: int, *, grace_s: float) -> None:
    """The part of plan.json that the job reads."""
    run_dir.mkdir(parents=True, exist_ok=True)
    resolved = Recipe.model_validate(recipe).model_dump(mode="json", by_alias=True)
    plan = {"recipe": resolved, "device": "cpu", "nodes": [{}], "nproc_per_node": ranks, "limits": {"grace_s": grace_s}}
    (run_dir / "plan.json").write_text(json.dumps(plan))


def worker_env(run_dir: Path, *, rank: int, ranks: int, local_size: int, port: int, attempt: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": "1",
        "LAUNCH_RUN_DIR": str(run_dir),
        "LAUNCH_RUN_ID": run_dir.name,
        "LAUNCH_ATTEMPT": str(attempt),
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
