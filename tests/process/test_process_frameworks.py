"""The recipes for scripts, on two nodes: undisturbed, killed, stopped and resumed, with the real frameworks.

What is disturbed is the shipped script itself, behind one line that counts optimizer steps: a worker kills itself after
a certain one, or all workers wait there until somebody asks for a stop.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from launched import LAUNCH, Launch, Launched

from launcher.runs.events import Event
from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

RECIPES = Path(__file__).parents[2] / "recipes"
LIMIT_S = 180.0
"""The frameworks alone take ten seconds to import on a busy machine."""

FAULTS = """
import json, os, pathlib, signal, time
from torch.optim.optimizer import register_optimizer_step_post_hook

RANK, ATTEMPT = os.environ["RANK"], os.environ["LAUNCH_ATTEMPT"]
WHAT, AFTER = json.loads(os.environ["FAULTS"]).get(ATTEMPT, ["nothing", 0])
steps = 0

def after_step(optimizer, args, kwargs):
    global steps
    steps += 1
    if steps == AFTER and WHAT == "kill" and RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if steps == AFTER and WHAT == "stop":
        pathlib.Path(os.environ["LAUNCH_RUN_DIR"], f"here.{RANK}.{ATTEMPT}").touch()
        while not os.path.exists(os.environ["LAUNCH_STOP_FILE"]):
            time.sleep(0.01)

register_optimizer_step_post_hook(after_step)
"""


class Scripts:
    """Starts shipped recipes on two nodes, as they are or with faults."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch, self._folder = launch, folder

    def undisturbed(self, name: str, *arguments: str) -> RunDir:
        run = self._launch(RECIPES / f"{name}.yaml", "--nodes", "2", "--nproc-per-node", "1", *arguments)
        assert run.wait(LIMIT_S) == 0, run.text
        return run.run

    def with_faults(self, name: str, faults: dict[str, list[Any]], *arguments: str, **fields: Any) -> Launched:
        recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
        source = (RECIPES / recipe["script"]).read_text()
        code = self._folder / "code"
        code.mkdir(exist_ok=True)
        (code / "faults.py").write_text(FAULTS)
        (code / "train.py").write_text(f"import faults\n{source}")
        changed = {**recipe, "script": "train.py", "env": {"FAULTS": json.dumps(faults)}, **fields}
        path = code / f"{name}.yaml"
        path.write_text(json.dumps(changed))
        return self._launch(path, "--nodes", "2", "--nproc-per-node", "1", *arguments)


@pytest.fixture
def scripts(launch: Launch, tmp_path: Path) -> Scripts:
    return Scripts(launch, tmp_path)


def resume(run: RunDir, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [LAUNCH, "resume", str(run.path), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str], code: int) -> str:
    text, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, text
    return text


def last_saved(run: Launched) -> Event:
    return run.happened("checkpoint_saved")[-1]


def said(run: RunDir, attempt: int, rank: int = 0) -> list[str]:
    log = run.log(attempt=attempt, node=rank, rank=rank).read_text(errors="replace")
    return [line.removeprefix("launch: ") for line in log.splitlines() if line.startswith("launch: ")]


def wait_until_all_are_there(run: RunDir, attempt: int) -> None:
    """Wait until both workers are where they wait for a stop."""
    deadline_s = time.monotonic() + LIMIT_S
    while not all((run.path / f"here.{rank}.{attempt}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline_s, run.console.read_text(errors="replace")
        time.sleep(0.01)


def test_lightning_is_killed_stopped_and_resumed_and_ends_with_the_same_weights(
    scripts: Scripts, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """F009, and DESIGN section 6. Workers are forked from a process that has imported Lightning already."""
    weights = lightning_weights(scripts.undisturbed("lightning", "args.max_epochs=2"))

    faults = {"1": ["kill", 30], "2": ["stop", 20], "3": ["stop", 30]}
    run = scripts.with_faults("lightning", faults, "args.max_epochs=2", preload=["lightning.pytorch"])
    wait_until_all_are_there(run.run, attempt=2)
    assert [(event["attempt"], event["exit_code"]) for event in run.happened("worker_ended", rank=1)] == [(1, 137)]
    assert said(run.run, 2)[0].startswith("resumes from step 20: "), "its own ModelCheckpoint, of every 20 steps"
    assert said(run.run, 2)[1] == "passes over 20 batches of epoch 0, which are trained already"
    run.signal(signal.SIGTERM)
    assert run.wait(LIMIT_S) == 75, run.text
    saved = last_saved(run)
    assert 40 <= saved["step"] <= 44
    assert saved["path"] == f"checkpoints/step-{saved['step']}/lightning.ckpt"
    assert f"saved step {saved['step']}" in said(run.run, 2)[-1]
    assert command("path", str(run.run.path), "--checkpoint", "latest").stdout.strip().endswith(saved["path"])

    # Again, past the end of an epoch of 64 steps; by another command.
    again = resume(run.run)
    wait_until_all_are_there(run.run, attempt=3)
    assert command("cancel", str(run.run.path)).returncode == 0
    ended(again, 75)
    assert said(run.run, 3)[0].startswith(f"resumes from step {saved['step']}: ")
    second = last_saved(run)
    assert second["step"] >= saved["step"] + 30

    ended(resume(run.run), 0)
    assert said(run.run, 4)[0].startswith(f"resumes from step {second['step']}: ")
    assert lightning_weights(run.run) == weights
    assert run.result["step"] == 128


def test_hf_trainer_is_killed_stopped_and_resumed_and_passes_over_a_broken_checkpoint(scripts: Scripts) -> None:
    """F009: the newest one that is whole, the broken one is named. Fresh interpreters."""
    weights = (scripts.undisturbed("hf_trainer").path / "out/checkpoint-100/model.safetensors").read_bytes()

    run = scripts.with_faults("hf_trainer", {"1": ["kill", 30], "2": ["stop", 15], "3": ["stop", 10]})
    wait_until_all_are_there(run.run, attempt=2)
    assert said(run.run, 2)[0].startswith("resumes from step 20: ")
    run.signal(signal.SIGTERM)
    assert run.wait(LIMIT_S) == 75, run.text
    stopped = last_saved(run)
    assert 35 <= stopped["step"] <= 39
    folder = run.run.path / "out" / f"checkpoint-{stopped['step']}"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == stopped["step"]
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {path.name for path in folder.iterdir()}, "both ranks, same step"

    again = resume(run.run)
    wait_until_all_are_there(run.run, attempt=3)
    assert said(run.run, 3)[0].startswith(f"resumes from step {stopped['step']}: ")
    again.send_signal(signal.SIGTERM)
    ended(again, 75)
    broken = run.run.path / last_saved(run)["path"] / "optimizer.pt"
    os.truncate(broken, 1000)
    unfinished = run.run.path / "out" / "checkpoint-90"
    unfinished.mkdir()

    ended(resume(run.run), 0)
    words = said(run.run, 4)
    assert words[0] == f"skipped: {unfinished} was not finished, or not by this run"
    assert re.fullmatch(
        rf"skipped: {broken.parent} is broken: optimizer.pt has 1,000 bytes instead of [\d,]+", words[1]
    )
    assert words[2].startswith("resumes from step 40: "), "the one of every 20 steps"
    assert (run.run.path / "out/checkpoint-100/model.safetensors").read_bytes() == weights


def test_accelerate_goes_on_from_its_own_newest_checkpoint(scripts: Scripts) -> None:
    """`resume: {newest, args}`: the script is told by an argument."""
    weights = (scripts.undisturbed("accelerate").path / "out/checkpoint-100/model.safetensors").read_bytes()

    run = scripts.with_faults("accelerate", {"1": ["kill", 30]}, preload=["accelerate"])
    assert run.wait(LIMIT_S) == 0, run.text
    assert run.happened("attempt_started", attempt=2)[0]["resumes_from"].endswith("/out/checkpoint-20")
    assert re.findall(r"^step (\d+)", run.log(0, attempt=2), re.MULTILINE)[0] == "30"
    assert (run.run.path / "out/checkpoint-100/model.safetensors").read_bytes() == weights


def test_plain_script_goes_on_from_its_own_checkpoint(scripts: Scripts) -> None:
    """`resume: self`: the script looks in the folder that it is given."""
    weights = plain_weights(scripts.undisturbed("script_ddp", "preload=true"))

    run = scripts.with_faults("script_ddp", {"1": ["kill", 130]}, preload=True)
    assert run.wait(LIMIT_S) == 0, run.text
    assert re.findall(r"^step (\d+)", run.log(0, attempt=2), re.MULTILINE) == ["150", "200", "250", "300"]
    assert plain_weights(run.run) == weights


IMPORTS = {
    "lightning": """
import lightning.pytorch as pl
from lightning import Trainer
import pytorch_lightning
assert Trainer is pl.Trainer is not pytorch_lightning.Trainer
trainers = [Trainer, pytorch_lightning.Trainer]
""",
    "hf": """
from transformers import Trainer
trainers = [Trainer]
""",
}


@pytest.mark.parametrize("adapter", IMPORTS)
def test_trainer_is_changed_however_it_is_imported(adapter: str, tmp_path: Path) -> None:
    source = f"""
from launcher.agent.adapters import install
install({adapter!r})
{IMPORTS[adapter]}
method = {"fit" if adapter == "lightning" else "train"!r}
print([hasattr(getattr(trainer, method), "__wrapped__") for trainer in trainers])
"""
    environment = {
        **os.environ,
        "LAUNCH_RUN_DIR": str(tmp_path),
        "LAUNCH_CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
    }
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"{[True] * (2 if adapter == 'lightning' else 1)}\n"


def lightning_weights(run: RunDir) -> dict[str, list[Any]]:
    import torch

    (newest,) = (run.path / "lightning/checkpoints").glob("*step=120.ckpt")
    state = torch.load(newest, weights_only=True)["state_dict"]
    return {name: tensor.tolist() for name, tensor in state.items()}


def plain_weights(run: RunDir) -> dict[str, list[Any]]:
    import torch

    state = torch.load(run.checkpoints / "last.pt", weights_only=True)["model"]
    return {name: tensor.tolist() for name, tensor in state.items()}
