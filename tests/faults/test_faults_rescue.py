"""Workers are killed in the middle of their steps, and no step is lost: what any of the others has completed counts.

A worker kills itself where chance says: before its forward, between two buckets of gradients (the first one is on its
way to the others), before its update, in the middle of it (half of the weights are new, and so are half of everybody
else's), after it. What does it is a `sitecustomize` of these tests, which the agents import; the product knows nothing
of it. Every rank notes which steps it has completed.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from launched import LAUNCH, LIMIT_S, Launch, Launched
from tiny import tiny

from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

STEPS, RANKS = 60, 3
RECIPE = tiny(
    name="rescued",
    data={"global_batch_size": 18},
    train={
        "until": f"{STEPS} steps",
        "schedule": {"name": "cosine", "warmup": "5 steps"},
        "eval_every": "10 steps",
    },
    checkpoint={"every": "25 steps", "best": "eval/loss min"},
    resources={"nodes": RANKS, "nproc_per_node": 1, "threads": 1},
    faults={"max_restarts": 100},
)
BETWEEN = ("forward", "optimizer", "updated")
INSIDE = ("bucket", "half")
"""Between two buckets, and inside the optimizer step."""
RUNS, KILLS_INSIDE, KILLS_BETWEEN = 5, 4, 6
"""Per run."""

SITECUSTOMIZE = r"""
import json, os, re, signal, sys, time

PLAN = json.loads(os.environ.get("RESCUES_OF_THIS_TEST", "[]"))
state = {"forwards": 0, "trainer": None}

def due(phase):
    # In a worker: is this the attempt, the phase and the step of a kill? Returns it.
    attempt = int(os.environ.get("LAUNCH_ATTEMPT", "0"))
    if not 0 < attempt <= len(PLAN) or state["forwards"] < 2:
        return None
    kill = PLAN[attempt - 1]
    if kill["phase"] != phase or state["trainer"].progress.step + 1 < kill["step"] or os.path.exists(note(attempt)):
        return None
    return kill

def note(attempt):
    return os.path.join(os.environ["LAUNCH_RUN_DIR"], f"kill-{attempt}")

def here(phase):
    kill = due(phase)
    if kill is not None and os.environ["RANK"] == str(kill["rank"]):
        with open(note(os.environ["LAUNCH_ATTEMPT"]), "x"):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

def forward(module, inputs):
    if type(module).__name__ != "DistributedDataParallel":
        return
    if state["trainer"] is None:
        frame = sys._getframe()
        while type(frame.f_locals.get("self")).__name__ != "Trainer":
            frame = frame.f_back
        state["trainer"] = frame.f_locals["self"]
        # In a backward the gradients of the first layer come last: those behind it are on their way.
        next(module.parameters()).register_hook(lambda _: here("bucket"))
    state["forwards"] += 1  # the first one is a rehearsal
    here("forward")

def updated(*_):
    here("updated")
    if state["trainer"] is not None:
        name = "done-{LAUNCH_ATTEMPT}-{RANK}".format_map(os.environ)
        with open(os.path.join(os.environ["LAUNCH_RUN_DIR"], name), "w") as file:
            file.write(str(state["trainer"].progress.step + 1))

def half_of_it(update):
    def call(*lists, **options):
        kill = due("half")
        if kill is None:
            return update(*lists, **options)
        cut = len(lists[0]) // 2
        update(*(each[:cut] for each in lists), **options)
        here("half")
        while not os.path.exists(note(os.environ["LAUNCH_ATTEMPT"])):
            time.sleep(0.001)  # so that the others are in the middle of theirs when this one dies
        update(*(each[cut:] for each in lists), **options)
    return call

if "RESCUES_OF_THIS_TEST" in os.environ and re.search(r"launcher[./]agent", " ".join(sys.orig_argv)):
    import torch, torch.distributed
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 64  # a bucket of its own for the last layer
    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(lambda *_: here("optimizer"))
    register_optimizer_step_post_hook(updated)
    torch._fused_adamw_ = half_of_it(torch._fused_adamw_)
"""


@dataclass(frozen=True)
class Kill:
    """What happens in one attempt: from this step on, as soon as the rank comes to the phase."""

    step: int
    phase: str
    rank: int


SHORT = (
    Kill(2, "forward", 1),
    Kill(7, "bucket", 2),
    Kill(8, "half", 0),
    Kill(20, "optimizer", 1),
    Kill(25, "updated", 0),
    Kill(41, "half", 2),
)


def plan_kills() -> list[list[Kill]]:
    """For each run its kills, one per attempt, in the order of their steps."""
    chance = random.Random(7)
    plans = []
    for _ in range(RUNS):
        phases = [chance.choice(INSIDE) for _ in range(KILLS_INSIDE)]
        phases += [chance.choice(BETWEEN) for _ in range(KILLS_BETWEEN)]
        chance.shuffle(phases)
        steps = sorted(chance.randint(1, STEPS) for _ in phases)
        plans.append([Kill(*each, chance.randrange(RANKS)) for each in zip(steps, phases, strict=True)])
    return plans


def losses(run: RunDir) -> dict[int, tuple[str, ...]]:
    """What was recorded of each step, bit by bit."""
    names = ("train/loss", "train/lr", "samples_seen", "eval/loss", "eval/accuracy")
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
    folder = tmp_path_factory.mktemp("rescues")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = folder / "rescued.yaml"
    path.write_text(json.dumps(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("RESCUES_OF_THIS_TEST", "[]")
        argv = [LAUNCH, str(path), "--runs-dir", str(folder), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=folder)
    run = RunDir(Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]))
    assert len(losses(run)) == STEPS
    return Undisturbed(path, json.loads(run.result.read_text())["weights_sha256"], losses(run))


def rescue(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed, kills: Sequence[Kill]
) -> Launched:
    """Run with these kills to the end."""
    monkeypatch.setenv("PYTHONPATH", str(undisturbed.recipe_file.parent))
    monkeypatch.setenv("RESCUES_OF_THIS_TEST", json.dumps([asdict(kill) for kill in kills]))
    launched = launch(undisturbed.recipe_file)
    assert launched.wait() == 0, launched.text
    return launched


def check(launched: Launched, undisturbed: Undisturbed, kills: Sequence[Kill]) -> None:
    """Each kill has happened and has cost nothing; the end is that of a run that nobody disturbs."""
    run = launched.run
    assert [kill for attempt, kill in enumerate(kills, 1) if not (run.path / f"kill-{attempt}").exists()] == []
    begins = {event["attempt"]: event["step"] for event in launched.happened("training_started")}
    assert sorted(begins) == list(range(1, len(kills) + 2)), launched.text
    for attempt, kill in enumerate(kills, 1):
        assert begins[attempt + 1] == completed(run, attempt, kill.rank, begins[attempt]), (attempt, kill)
    assert losses(run) == undisturbed.losses
    assert launched.result["weights_sha256"] == undisturbed.weights_sha256


def completed(run: RunDir, attempt: int, killed: int, begin: int) -> int:
    """The newest step that a survivor of an attempt has completed."""
    notes = [run.path / f"done-{attempt}-{rank}" for rank in range(RANKS) if rank != killed]
    return max([begin, *(int(path.read_text()) for path in notes if path.exists())])


def test_six_kills_cost_no_step(launch: Launch, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed) -> None:
    launched = rescue(launch, monkeypatch, undisturbed, SHORT)
    check(launched, undisturbed, SHORT)
    rescued = launched.happened("rescued")
    assert len(rescued) == len(launched.happened("restarting")) == len(SHORT)
    started = launched.happened("training_started", attempt=3)[0]
    assert started["resumed_from"] == f"step-{started['step']}"
    assert started["memory"] == {"node": rescued[1]["node"], "rank": rescued[1]["rank"]}
    assert f"resumes from step-{started['step']}, kept in the memory of node {rescued[1]['node']}" in launched.text


def test_the_plan_of_kills_is_what_it_says() -> None:
    kills = [kill for plan in plan_kills() for kill in plan]
    assert len(kills) == 50
    assert sum(kill.phase in INSIDE for kill in kills) == 20
    assert {kill.phase for kill in kills} == {*BETWEEN, *INSIDE}
    assert {kill.rank for kill in kills} == set(range(RANKS))


@pytest.mark.long
@pytest.mark.parametrize("number", range(RUNS))
def test_fifty_kills_cost_no_step(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed, number: int
) -> None:
    """50 seeded kills of one of 3 workers, 20 of them inside the update or between two buckets: 0 steps lost."""
    kills = plan_kills()[number]
    check(rescue(launch, monkeypatch, undisturbed, kills), undisturbed, kills)
