"""Thirty kills of a training, each at a random step, in a random phase, on a random rank, with a random signal: every
run ends with the weights and the losses of one that nobody disturbed.

The workers kill themselves, from the inside, where chance says: only so is a kill between two lines of a save. What
does it is a `sitecustomize` of these tests, which the agents import; the product knows nothing of it.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from launched import LAUNCH, LIMIT_S, Launch
from outermost import OUTERMOST
from tiny import tiny

from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

RUNS, KILLS = 6, 5
STEPS, EVERY = 90, 5
FIRST_STEPS = 30
"""In which a kill is due. A save goes on for some steps more, and each attempt goes on from where the last one died."""
RECIPE = tiny(
    name="killed",
    train={
        "until": f"{STEPS} steps",
        "schedule": {"name": "cosine", "warmup": "5 steps"},
        "eval_every": "10 steps",
    },
    checkpoint={"every": f"{EVERY} steps", "best": "eval/loss min"},
    resources={"nodes": 2, "nproc_per_node": 1, "threads": 1},
    faults={"max_restarts": 100},
)

IN_A_STEP = ("forward", "optimizer", "updated")
IN_A_SAVE = (
    "write rank-0.safetensors",
    "write rank-1.safetensors",
    "write tensors.json",
    "write state.json",
    "write .manifest.json.tmp",
    "rename .manifest.json.tmp",
    "rename step",
    "write .latest.tmp",
    "rename .latest.tmp",
)
SIGNALS = ("SIGKILL", "SIGKILL", "SIGSEGV", "SIGSEGV", "SIGTERM")
"""TERM is rarer: it stops the run, and a new one takes seconds to start."""

SITECUSTOMIZE = (
    OUTERMOST
    + r"""
import json, os, re, resource, signal, sys

PLAN = json.loads(os.environ.get("KILLS_OF_THIS_TEST", "[]"))
WRITES = os.O_WRONLY | os.O_RDWR
state = {"trainer": None, "forwards": 0, "over": False}

def here(phase):
    # In a worker: is it the time and the place?
    if "LAUNCH_ATTEMPT" not in os.environ or "RANK" not in os.environ or state["over"]:
        return
    attempt = int(os.environ["LAUNCH_ATTEMPT"])
    if attempt > len(PLAN):
        return
    kill = PLAN[attempt - 1]
    if os.environ["RANK"] != str(kill["rank"]) or phase != kill["phase"]:
        return
    if state["forwards"] < 2 or state["trainer"].progress.step < kill["step"]:
        return
    state["over"] = True
    with open(os.path.join(os.environ["LAUNCH_RUN_DIR"], f"kill-{attempt}"), "x") as note:
        note.write(f"{state['trainer'].progress.step}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.Signals[kill["signal"]])

def audit(event, args):
    if event == "open" and "/checkpoints/" in str(args[0]):
        if args[2] & WRITES:
            here("write " + os.path.basename(str(args[0])))
    elif event == "os.rename" and "/checkpoints/" in str(args[0]):
        name = os.path.basename(str(args[0]))
        here("rename " + ("step" if name.startswith("step-") else name))

def forward(module, inputs):
    if outermost():
        if state["trainer"] is None:
            frame = sys._getframe()
            while type(frame.f_locals.get("self")).__name__ != "Trainer":
                frame = frame.f_back
            state["trainer"] = frame.f_locals["self"]
        state["forwards"] += 1  # the first one is a rehearsal
        here("forward")

if PLAN and re.search(r"launcher[./]agent", " ".join(sys.orig_argv)):
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(lambda *_: here("optimizer"))
    register_optimizer_step_post_hook(lambda *_: here("updated"))
    sys.addaudithook(audit)
"""
)


@dataclass(frozen=True)
class Kill:
    """What happens in one attempt."""

    step: int
    phase: str
    rank: int
    signal: str


def plan_kills() -> list[list[Kill]]:
    """For each run its kills, one per attempt, in the order of their steps. Half of them in the middle of a save."""
    chance = random.Random(54)
    plans = []
    for _ in range(RUNS):
        steps = sorted(chance.randint(1, FIRST_STEPS) for _ in range(KILLS))
        plans.append([draw(chance, step) for step in steps])
    return plans


def draw(chance: random.Random, step: int) -> Kill:
    phase = chance.choice(chance.choice((IN_A_STEP, IN_A_SAVE)))
    rank = chance.randint(0, 1) if phase in IN_A_STEP else int(phase == "write rank-1.safetensors")
    return Kill(step, phase, rank, chance.choice(SIGNALS))


def losses(run: RunDir) -> dict[int, tuple[str, ...]]:
    """What was recorded of each step, bit by bit."""
    names = ("train/loss", "train/lr", "samples_seen", "eval/loss")
    return {
        record["step"]: tuple(float(record[name]).hex() for name in names if name in record)
        for record in read_metrics(run.metrics)
    }


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbs."""

    recipe_file: Path
    weights_sha256: str
    losses: dict[int, tuple[str, ...]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("kills")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = folder / "killed.yaml"
    path.write_text(json.dumps(RECIPE))
    argv = [LAUNCH, str(path), "--runs-dir", str(folder), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=folder)
    run = RunDir(Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]))
    assert len(losses(run)) == STEPS
    return Undisturbed(path, json.loads(run.result.read_text())["weights_sha256"], losses(run))


def test_the_plan_of_kills_leaves_out_nothing() -> None:
    kills = [kill for plan in plan_kills() for kill in plan]
    assert len(kills) == 30
    assert {kill.phase for kill in kills} == {*IN_A_STEP, *IN_A_SAVE}
    assert {kill.signal for kill in kills} == set(SIGNALS)
    assert {kill.rank for kill in kills} == {0, 1}


@pytest.mark.parametrize("number", range(RUNS))
def test_a_run_killed_five_times_ends_as_if_nothing_had_happened(
    launch: Launch,
    command: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Undisturbed,
    number: int,
) -> None:
    """F009, F010: 30 of 30, over six runs; a stop by TERM is gone on from with `launch resume`.

    In every other run the survivors keep nothing, so that it goes on from the disk.
    """
    kills = plan_kills()[number]
    monkeypatch.setenv("PYTHONPATH", str(undisturbed.recipe_file.parent))
    monkeypatch.setenv("KILLS_OF_THIS_TEST", json.dumps([asdict(kill) for kill in kills]))
    launched = launch(undisturbed.recipe_file, f"faults.rescue={'true' if number % 2 else 'false'}")
    code, text = launched.wait(), launched.text
    while code == 75:
        resumed = command("resume", launched.run_id)
        code, text = resumed.returncode, text + resumed.stdout + resumed.stderr
    assert code == 0, text
    run = launched.run
    assert [kill for attempt, kill in enumerate(kills, 1) if not (run.path / f"kill-{attempt}").exists()] == [], text
    assert losses(run) == undisturbed.losses
    assert json.loads(run.result.read_text())["weights_sha256"] == undisturbed.weights_sha256
    assert not [path.name for path in run.checkpoints.iterdir() if ".tmp" in path.name or ".broken" in path.name]
