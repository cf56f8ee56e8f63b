"""The run directory: the names of everything in it. Standard library only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunDir:
    """Paths of one run. Only planning, which is below, spells some of them again; a test compares the two."""

    path: Path

    @property
    def run_id(self) -> str:
        """The folder's name is the run id."""
        return self.path.name

    @property
    def plan(self) -> Path:
        """The plan of the newest launch or resume."""
        return self.path / "plan.json"

    @property
    def recipe(self) -> Path:
        """The recipe as the user wrote it."""
        return self.path / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        """The recipe as it was understood."""
        return self.path / "resolved.yaml"

    @property
    def launch(self) -> Path:
        """Who, where, command, versions, git state."""
        return self.path / "launch.json"

    @property
    def token(self) -> Path:
        """Secret of the agents' channel, mode 0600."""
        return self.path / "token"

    def write_token(self) -> None:
        """Make it up. The mode is given at creation: it is at no moment readable by others."""
        descriptor = os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(os.urandom(32).hex())

    @property
    def events(self) -> Path:
        """One file per writer."""
        return self.path / "events"

    @property
    def console(self) -> Path:
        """What a person watching the run sees: rank 0, and errors of all, each line with `node:rank`."""
        return self.path / "logs" / "console.log"

    @property
    def agents_log(self) -> Path:
        """What the supervisor and the agents say themselves; empty unless something is wrong with them."""
        return self.path / "logs" / "agents.log"

    def node_log(self, node: int) -> Path:
        """The same of one node whose agent was started by ssh, since two machines cannot append to one file."""
        return self.path / "logs" / f"agents-{node}.log"

    @property
    def hosts(self) -> Path:
        """On each host that is reached by ssh: who its agent is."""
        return self.path / "hosts"

    def node_pid(self, node: int) -> Path:
        """Pid and start time of the agent of a node, and the boot of its machine, as it wrote them down there."""
        return self.hosts / f"node-{node}.pid"

    def node_exit(self, node: int) -> Path:
        """The exit code of that agent, once it has ended."""
        return self.hosts / f"node-{node}.exit"

    @property
    def watcher(self) -> Path:
        """Who watches the nodes of a run on Docker or ssh, and is locked by it."""
        return self.path / "watcher.json"

    @property
    def slurm(self) -> Path:
        """On SLURM: the batch script of each submission, as it was submitted, and the scheduler's own output."""
        return self.path / "slurm"

    def job_logs(self) -> list[Path]:
        """The scheduler's own output of each job, the newest first; a job that could not even begin says why there."""
        return sorted(self.slurm.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)

    @property
    def metrics(self) -> Path:
        """Written by rank 0 of the built-in job."""
        return self.path / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        """What `launch eval` has found."""
        return self.path / "evals.jsonl"

    def devices(self, node: int) -> Path:
        """What the agent of a node has measured of its devices (`launcher.runs.devices`)."""
        return self.path / "devices" / f"node-{node}.jsonl"

    @property
    def profile(self) -> Path:
        """What `profiler:` has recorded (`launcher.runs.profile`)."""
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        """The same in every attempt; LAUNCH_CHECKPOINT_DIR."""
        return self.path / "checkpoints"

    @property
    def replica(self) -> Path:
        """On a node that keeps a copy of what node 0 has written down (`checkpoint.store: replicate`)."""
        return self.path / "replica"

    @property
    def result(self) -> Path:
        """Written once, by the head agent."""
        return self.path / "result.json"

    @property
    def stop_file(self) -> Path:
        """Exists from the moment a stop is requested; LAUNCH_STOP_FILE."""
        return self.path / "stop"

    @property
    def code(self) -> Path:
        """Copy of the workdir of a script: the same code for every attempt."""
        return self.path / "code"

    @property
    def code_record(self) -> Path:
        """Which files the code of the run has, by their hashes."""
        return self.path / "code.json"

    @property
    def agent_code(self) -> Path:
        """Our agent, wrapper and client, for an interpreter that has nothing of ours."""
        return self.path / "agent"

    @property
    def agent_start(self) -> Path:
        """What such an interpreter runs."""
        return self.agent_code / "start.py"

    @property
    def client_code(self) -> Path:
        """Holds `launch_client.py` and nothing else: last on the sys.path of a script."""
        return self.agent_code / "client"

    @property
    def setup_log(self) -> Path:
        """What the recipe's `setup` printed."""
        return self.path / "logs" / "setup.log"

    def log(self, *, attempt: int, node: int, rank: int) -> Path:
        """The output of one rank in one attempt: both streams, whole lines."""
        return self.path / "logs" / f"attempt-{attempt}" / f"node-{node}" / f"rank-{rank}.log"

    def torchrun_log(self, *, attempt: int, node: int) -> Path:
        """What torchrun itself says, where it starts the workers."""
        return self.path / "logs" / f"attempt-{attempt}" / f"node-{node}" / "torchrun.log"
