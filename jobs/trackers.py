"""Where metrics are copied to. Runs in the tracking process only, so waiting or failing here hurts no training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from launcher.planning import wandb_login
from launcher.runs.rundir import RunDir
from launcher.runs.sync import UPLOAD

INIT_S = 30.0
"""How long the W&B server may take to accept a run."""

Mode = Literal["online", "offline"]


class Tracker(Protocol):
    """Takes values of a step."""

    name: str
    ledger: str
    """Where it is noted how far it has got; another one for a place that has to be filled separately."""
    before: tuple[str, ...]
    """Ledgers of others: what they have got is not wanted again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values."""

    def finish(self, exit_code: int) -> None:
        """Send what is left."""

    def facts(self) -> dict[str, Any]:
        """For the `tracking` event."""

    def sentence(self) -> str:
        """For people, once."""


def start_trackers(order: Mapping[str, Any], folder: Path) -> list[Tracker]:
    """Start those that the recipe wants. One that is not installed is said and left out."""
    trackers: list[Tracker] = []
    if order["wandb"]["mode"] != "disabled":
        try:
            trackers.append(Wandb(order, folder))
        except ImportError as error:
            print(f"W&B: not available ({error}); metrics.jsonl has everything", flush=True)
    if order["tensorboard"]:
        try:
            trackers.append(TensorBoard(Path(order["run_dir"]) / "tensorboard"))
        except ImportError as error:
            print(f"TensorBoard: not available ({error}); metrics.jsonl has everything", flush=True)
    return trackers


class Wandb:
    """Weights & Biases: one run over all attempts, its id is the run id, its axis is `step`."""

    name = "wandb"
    ledger = "wandb"
    before: tuple[str, ...] = ()

    def __init__(self, order: Mapping[str, Any], folder: Path) -> None:
        with (folder / "wandb.log").open("a") as log:
            os.dup2(log.fileno(), 2)  # W&B talks a lot, on standard error
        self._run_dir = Path(order["run_dir"])
        self._mode, self._reason = choose_mode(order["wandb"]["mode"], os.environ)
        self._must_upload = bool(order.get("upload"))  # `launch sync`, when the training is over
        if self._must_upload and self._mode != "online":
            raise ConnectionError(self._reason)
        os.environ.update(WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_DIR=str(self._run_dir))
        import wandb

        self._wandb = wandb
        self._run = self._start(order)
        if self._mode == "offline":
            # What is written here still waits for its upload, so an attempt that is online sends it all the same.
            self.ledger, self.before = "wandb-offline", ("wandb",)
        if self._must_upload:
            self.ledger, self.before = UPLOAD, ("wandb",)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _start(self, order: Mapping[str, Any]) -> Any:
        try:
            return self._init(order)
        except (self._wandb.errors.Error, OSError, TimeoutError) as error:
            if self._mode != "online" or self._must_upload:
                raise
            self._mode, self._reason = "offline", f"the server refused: {error}".splitlines()[0]
            self._wandb.teardown()  # W&B would still hold the run's id for the try that failed
            return self._init(order)

    def _init(self, order: Mapping[str, Any]) -> Any:
        section = order["wandb"]
        return self._wandb.init(
            id=order["run_id"],
            name=order["run_id"],
            resume="allow",
            mode=self._mode,
            project=section["project"] or order["name"],
            entity=section["entity"],
            tags=section["tags"],
            group=os.environ.get("WANDB_RUN_GROUP"),
            config=order["config"],
            dir=str(self._run_dir),
            settings=self._wandb.Settings(
                init_timeout=INIT_S,
                console="off",
                silent=True,
                git_commit=commit_of(self._run_dir),
                disable_git=True,  # it would copy the changes of the working tree, with what stands in them
                save_code=False,
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue values of a step."""
        self._run.log({"step": step, **values})

    def finish(self, exit_code: int) -> None:
        """Send what is queued."""
        self._run.finish(exit_code=exit_code)

    def facts(self) -> dict[str, Any]:
        """Mode, id, folder, and the line that uploads it."""
        return {
            "mode": self._mode,
            "reason": self._reason,
            "id": self._run.id,
            "dir": str(Path(self._run.dir).parent),
            "url": self._run.url if self._mode == "online" else None,
            "sync": self._sync_line() if self._mode == "offline" else None,
        }

    def sentence(self) -> str:
        """Where the curves are."""
        if self._mode == "online":
            return f"W&B    {self._run.url}"
        return f"W&B    offline ({self._reason}): {self._sync_line()}"

    def _sync_line(self) -> str:
        if RunDir(self._run_dir).plan.exists():
            return f"launch sync {self._run_dir.name}"
        return f"wandb sync {self._run_dir}/wandb/offline-run-*"  # started by hand: `launch` does not know it


class TensorBoard:
    """Event files that TensorBoard reads."""

    name = "tensorboard"
    ledger = "tensorboard"
    before: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]

        self._folder = folder
        self._writer = Writer(str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a step."""
        for name, value in values.items():
            if "/" in name:
                self._writer.add_scalar(name, value, step)

    def finish(self, exit_code: int) -> None:
        """Close the file."""
        self._writer.close()

    def facts(self) -> dict[str, Any]:
        """The folder."""
        return {"dir": str(self._folder)}

    def sentence(self) -> str:
        """How to look at it."""
        return f"TensorBoard    tensorboard --logdir {self._folder}"


def commit_of(run_dir: Path) -> str | None:
    """The commit that was launched, where there is one."""
    try:
        record = json.loads((run_dir / "launch.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # a job that was started by hand
        return None
    sha: str | None = record["git"]["sha"]
    return sha


def choose_mode(wanted: str, env: Mapping[str, str]) -> tuple[Mode, str]:
    """online or offline, and why. The recipe beats WANDB_MODE; without a key, or a server, it is offline."""
    mode = env.get("WANDB_MODE", "auto") if wanted == "auto" else wanted
    if mode == "offline":
        return "offline", "as asked"
    if not wandb_login.key_source(env):
        return "offline", "no key"
    if problem := wandb_login.unreachable(wandb_login.server(env)):
        return "offline", problem
    return "online", ""
