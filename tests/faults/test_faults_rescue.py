"""Workers are killed in the middle of their steps (`kills`): what any of the others has completed is not lost."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from criteria import recorded
from kills import BETWEEN, INSIDE, SITECUSTOMIZE, VARIABLE, Kill, completed, environment, has_happened
from launched import LAUNCH, LIMIT_S, Launch, Launched
from tiny import tiny

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
RUNS, KILLS_INSIDE, KILLS_BETWEEN = 5, 4, 6
"""Per run."""

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


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbs."""

    recipe_file: Path
    weights_sha256: str
    recorded: dict[int, tuple[str, ...]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("rescues")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = folder / "rescued.yaml"
    path.write_text(json.dumps(RECIPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv(VARIABLE, "[]")
        argv = [LAUNCH, str(path), "--runs-dir", str(folder), "--json"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=folder)
    run = RunDir(Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]))
    assert len(recorded(run)) == STEPS
    return Undisturbed(path, json.loads(run.result.read_text())["weights_sha256"], recorded(run))


def rescue(launch: Launch, undisturbed: Undisturbed, kills: Sequence[Kill]) -> Launched:
    """Run with these kills to the end."""
    env = {"PYTHONPATH": str(undisturbed.recipe_file.parent), **environment(kills)}
    launched = launch(undisturbed.recipe_file, env=env)
    assert launched.wait() == 0, launched.text
    return launched


def check(launched: Launched, undisturbed: Undisturbed, kills: Sequence[Kill]) -> None:
    """Each kill has happened and has cost nothing; the end is that of a run that nobody disturbs."""
    run = launched.run
    assert [kill for attempt, kill in enumerate(kills, 1) if not has_happened(run.path, attempt)] == []
    begins = {event["attempt"]: event["step"] for event in launched.happened("training_started")}
    assert sorted(begins) == list(range(1, len(kills) + 2)), launched.text
    for attempt, kill in enumerate(kills, 1):
        newest = completed(run.path, attempt, killed=kill.rank, begin=begins[attempt])
        assert begins[attempt + 1] == newest, (attempt, kill)
    assert recorded(run) == undisturbed.recorded
    assert launched.result["weights_sha256"] == undisturbed.weights_sha256


def test_six_kills_cost_no_step(launch: Launch, undisturbed: Undisturbed) -> None:
    launched = rescue(launch, undisturbed, SHORT)
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
def test_fifty_kills_cost_no_step(launch: Launch, undisturbed: Undisturbed, number: int) -> None:
    """50 seeded kills of one of 3 workers, 20 of them inside the update or between two buckets: 0 steps lost."""
    kills = plan_kills()[number]
    check(rescue(launch, undisturbed, kills), undisturbed, kills)
