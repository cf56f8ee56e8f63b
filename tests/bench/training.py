"""A training that goes on for as long as it is let, ours and torchrun's with a careful script: the same network, data,
batch, optimizer, number of ranks and checkpoints. Both are looked at in the same way, from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import BIN, SCRIPTS

ROOT = Path(__file__).parents[2]
RANKS = 2
MODEL = {"in_features": 256, "hidden": 768, "layers": 3, "classes": 10}
DATA = {"samples": 4096, "eval_samples": 0, "shape": "256", "classes": 10}
BATCH, LR = 128, 1e-3
EVERY = 100
"""Steps from one checkpoint to the next."""
_LOOK_S = 0.002
_AGAIN = 'until "$@"; do [ -e "$OUT/stop" ] && exit; sleep 0.1; done'
"""What a user writes who has seen torchrun itself die."""


class Training:
    """One training in a folder of its own. `started_s` and all times are seconds since the epoch."""

    name = ""

    def __init__(self, *, every: int = EVERY) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="bench-"))
        self.every = every
        scrubbed = {key: value for key, value in os.environ.items() if not key.startswith(("LAUNCH_", "TORCHELASTIC_"))}
        paths = {"OUT": str(self.out), "LAUNCH_RUNS": str(self.out / "runs"), "XDG_STATE_HOME": str(self.out / "state")}
        self._log = (self.out / "log").open("wb")
        self.started_s = time.time()
        self.process = subprocess.Popen(
            self._argv(),
            env={**scrubbed, "OMP_NUM_THREADS": "1", **paths, **self._env()},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self.out,
            start_new_session=True,
        )

    def _argv(self) -> Sequence[str]:
        raise NotImplementedError

    def _env(self) -> dict[str, str]:
        return {}

    def _steps_file(self) -> Path | None:
        raise NotImplementedError

    def worker(self, rank: int) -> int | None:
        """The pid of a rank now; None while there is none."""
        raise NotImplementedError

    def agent(self) -> int | None:
        """The pid of an agent now."""
        raise NotImplementedError

    def steps(self) -> list[tuple[int, float]]:
        """All that were made, each as often as it was made: number and time."""
        path = self._steps_file()
        if path is None or not path.exists():
            return []
        found = []
        for line in path.read_bytes().split(b"\n")[:-1]:
            with contextlib.suppress(ValueError):  # half a line of one that was killed
                record = json.loads(line)
                if "step" in record and ("loss" in record or "train/loss" in record):
                    found.append((int(record["step"]), float(record["time"])))
        return found

    def newest(self) -> int:
        """The newest step that was ever made."""
        return max((step for step, _ in self.steps()), default=0)

    def wait_for(self, step: int, *, limit_s: float) -> float:
        """Wait for a step that is as new as this; when it was made. Raises TimeoutError."""
        by_s = time.monotonic() + limit_s
        while True:
            if found := [at for number, at in self.steps() if number >= step]:
                return min(found)
            if time.monotonic() > by_s or self.process.poll() is not None:
                raise TimeoutError(f"{self.name}: no step {step} within {limit_s:g} s:\n{self.log[-3000:]}")
            time.sleep(_LOOK_S)

    @property
    def log(self) -> str:
        """What it has printed."""
        return (self.out / "log").read_text(errors="replace")

    def close(self) -> None:
        """End it, by force where it does not leave, and remove its folder. Only processes of this training."""
        (self.out / "stop").touch()
        self._ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        for pid in [self.process.pid, *self._left()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        shutil.rmtree(self.out, ignore_errors=True)

    def _ask_to_stop(self) -> None:
        """Beyond the file."""

    def _left(self) -> list[int]:
        """Processes that know this folder."""
        mark = f"OUT={self.out}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdecimal() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


class Ours(Training):
    """`launch` with the recipe, at its defaults but for the number of restarts."""

    name = "launch"

    def _argv(self) -> Sequence[str]:
        recipe = {
            "name": "bench",
            "model": {"name": "mlp", **MODEL},
            "data": {"name": "synthetic", "global_batch_size": BATCH, **DATA},
            "train": {"until": "10M steps", "optimizer": {"name": "adamw", "lr": LR}, "eval_every": None},
            "checkpoint": {"every": f"{self.every} steps", "keep": 2},
            "resources": {"nodes": 1, "nproc_per_node": RANKS, "threads": 1, "device": "cpu"},
            "faults": {"max_restarts": 1000},
            "tracking": {"wandb": {"mode": "disabled"}},
        }
        (self.out / "bench.yaml").write_text(json.dumps(recipe))
        return [str(BIN / "launch"), str(self.out / "bench.yaml"), "--on", "local"]

    def _run(self) -> Path | None:
        return next(iter((self.out / "runs").glob("bench-*/")), None)

    def _steps_file(self) -> Path | None:
        run = self._run()
        return None if run is None else run / "metrics.jsonl"

    def _events(self, name: str) -> list[dict[str, Any]]:
        run = self._run()
        path = None if run is None else run / "events" / "node-0.jsonl"
        if path is None or not path.exists():
            return []
        mark = f'"event": "{name}"'.encode()
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1] if mark in line]

    def worker(self, rank: int) -> int | None:
        found = [event["pid"] for event in self._events("worker_started") if event["rank"] == rank]
        return found[-1] if found and _lives(found[-1]) else None

    def agent(self) -> int | None:
        found = [event["pid"] for event in self._events("agent_started")]
        return found[-1] if found and _lives(found[-1]) else None

    def _ask_to_stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)


class Torchrun(Training):
    """torchrun with the careful script, at its best knobs, in a loop that starts it again when it is killed itself."""

    name = "torchrun"

    def _argv(self) -> Sequence[str]:
        knobs = ("--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "100", "--monitor-interval", "0.01")
        return ["bash", "-c", _AGAIN, "again", str(BIN / "torchrun"), *knobs, str(SCRIPTS / "careful.py")]

    def _env(self) -> dict[str, str]:
        settings = {"model": MODEL, "data": DATA, "batch": BATCH, "lr": LR, "every": self.every}
        return {
            "SETTINGS": json.dumps(settings),
            "PYTHONPATH": str(ROOT),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def _steps_file(self) -> Path | None:
        return self.out / "steps.jsonl"

    def worker(self, rank: int) -> int | None:
        path = self.out / f"pid-{rank}"
        pid = int(path.read_text().split()[0]) if path.exists() else None
        return pid if pid is not None and _lives(pid) else None

    def agent(self) -> int | None:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if b"torchrun" in Path(f"/proc/{pid}/cmdline").read_bytes()), None)


CONTENDERS: tuple[type[Training], ...] = (Torchrun, Ours)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
