"""No step is lost while one worker lives: whatever else is killed, the training goes on where its survivors were."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import criteria
import pytest
from criteria import Reference
from launched import LIMIT_S, Launch, Launched
from test_process_deaths import agent_of, is_gone
from tiny import tiny

from launcher.agent.members import SILENCE_S
from launcher.agent.node import HOLD_S
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

STEPS = 150
STEP_S = 0.02
"""How long a step takes at least, so that there is time to kill somebody."""
RECIPE = tiny(
    train={"until": f"{STEPS} steps", "eval_every": "50 steps"},
    checkpoint={"every": "100000 steps"},
    resources={"nodes": 2, "nproc_per_node": 1, "threads": 1},
    faults={"max_restarts": 10},
)
MEMORY = Path("/dev/shm")
ProcessesOf = Callable[[str], list[int]]
Command = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rescue") / "tiny.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What a run that nobody disturbs ends with."""
    return criteria.undisturbed(tmp_path_factory.mktemp("reference"), RECIPE, nodes=2)


@pytest.fixture(autouse=True)
def _slow_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**criteria.install(tmp_path), "TEST_STEP_S": str(STEP_S)}.items():
        monkeypatch.setenv(name, value)


def worker_of(run: Launched, rank: int, attempt: int) -> int:
    """The pid of a worker."""
    return int(run.wait_for_event("worker_started", rank=rank, attempt=attempt)["pid"])


def trains(run: Launched, attempt: int) -> int:
    """Wait until an attempt has done some steps; the newest."""

    def newest() -> int:
        steps = [record["step"] for record in read_metrics(run.run.metrics) if record["attempt"] == attempt]
        return max(steps) if len(steps) > 3 else 0

    step: int = run.until(lambda: run.run.metrics.exists() and newest())
    return step


def memory_of(run: Launched) -> list[Path]:
    """The folders of a run in /dev/shm."""
    return list(MEMORY.glob(f"launch-{run.run_id[-4:]}-*"))


def test_agents_the_head_agent_and_a_worker_are_killed_and_no_step_is_lost(
    launch: Launch, recipe_file: Path, reference: Reference, processes_of: ProcessesOf
) -> None:
    run = launch(recipe_file)
    kills: list[Callable[[int], int]] = [
        lambda attempt: agent_of(run, 1),
        lambda attempt: agent_of(run, 0),
        lambda attempt: worker_of(run, 0, attempt),
        lambda attempt: worker_of(run, 1, attempt),
    ]
    for attempt, victim in enumerate(kills, 1):
        done = trains(run, attempt)
        os.kill(victim(attempt), signal.SIGKILL)
        rescued = run.wait_for_event("rescued", attempt=attempt)
        assert rescued["step"] >= done
        again = run.wait_for_event("training_started", attempt=attempt + 1)
        assert again["step"] == rescued["step"], "a step that was done was done again"
    assert run.wait() == 0, run.text
    assert run.result["attempts"] == 5
    assert run.result["weights_sha256"] == reference.weights_sha256
    assert criteria.recorded(run.run) == reference.recorded
    assert criteria.made_twice(run.run) == []
    assert processes_of(run.run_id) == []
    assert memory_of(run) == []


@pytest.mark.parametrize("victim", [pytest.param("launch", marks=pytest.mark.long), "supervisor", "everything"])
def test_nothing_is_left_in_memory_whoever_is_killed(
    launch: Launch, recipe_file: Path, processes_of: ProcessesOf, victim: str
) -> None:
    run = launch(recipe_file, "train.until=1000000 steps")
    trains(run, 1)
    os.kill(worker_of(run, 1, 1), signal.SIGKILL)
    run.wait_for_event("rescued")
    trains(run, 2)
    (supervisor,) = run.happened("supervisor_started")
    assert any(folder.glob("node-*/step-*") for folder in memory_of(run)), "there is something to leave behind"
    if victim == "launch":
        run.signal(signal.SIGKILL)
    elif victim == "supervisor":
        os.kill(supervisor["pid"], signal.SIGKILL)
    else:
        pids = processes_of(run.run_id)
        for pid in (pids[0], *pids):  # once more the first: nobody may have been started meanwhile
            subprocess.run(["kill", "-9", str(pid)], check=False, stderr=subprocess.DEVNULL)
        run.process.wait()
        after = launch(recipe_file, "train.until=2 steps")  # the next run of the same user
        assert after.wait() == 0, after.text
    run.process.wait()
    deadline_s = time.monotonic() + LIMIT_S
    while not is_gone(supervisor["pid"]) or processes_of(run.run_id) or memory_of(run):
        assert time.monotonic() < deadline_s, "something is left"
        time.sleep(0.02)


@pytest.mark.long
def test_a_frozen_head_agent_is_left_by_the_others_and_found_again(
    launch: Launch, recipe_file: Path, reference: Reference
) -> None:
    """Both sides of a cut: who does not hear the head agent ends its workers before anybody else may go on."""
    run = launch(recipe_file, "train.until=1000000 steps")
    trains(run, 1)
    head, worker = agent_of(run, 0), worker_of(run, 1, 1)
    os.kill(head, signal.SIGSTOP)
    frozen_s = time.monotonic()
    run.wait_for_event("workers_given_up", node=1)
    run.until(lambda: is_gone(worker))
    assert time.monotonic() - frozen_s < SILENCE_S + HOLD_S + 3.0
    os.kill(head, signal.SIGCONT)
    trains(run, 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    steps = [record["step"] for record in read_metrics(run.run.metrics)]
    assert steps == list(range(1, len(steps) + 1))
    recorded = criteria.recorded(run.run)
    both = recorded.keys() & reference.recorded.keys()
    assert {step: recorded[step] for step in both} == {step: reference.recorded[step] for step in both}


@pytest.mark.long
def test_of_a_range_of_nodes_the_others_go_on_and_a_node_that_is_back_is_taken_in(
    launch: Launch, recipe_file: Path, command: Command
) -> None:
    run = launch(recipe_file, "--nodes", "1:2", "train.until=1000000 steps", "checkpoint.every=20 steps")
    trains(run, 1)
    frozen = agent_of(run, 1)
    os.kill(frozen, signal.SIGSTOP)
    alone = run.wait_for_event("scaled")
    assert (alone["nodes"], alone["missing"]) == ([0], [1])
    (lost,) = run.happened("node_lost")
    assert alone["time"] - lost["time"] < 10.0
    trains(run, 2)
    os.kill(frozen, signal.SIGCONT)
    again = run.wait_for_event("scaled", attempt=3)
    assert again["nodes"] == [0, 1]
    trains(run, 3)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    assert run.result["restarts"] == 0
    sizes = [event["world_size"] for event in run.happened("training_started")]
    assert sizes == [2, 1, 2]
    for rescued, started in zip(run.happened("rescued"), run.happened("training_started")[1:], strict=True):
        assert started["step"] == rescued["step"], "a step that was done was done again"
    records = read_metrics(run.run.metrics)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert [record["samples_seen"] for record in records][:12] == [16, 32, 48, 64, 80, 90, 106, 122, 138, 154, 170, 180]


def test_a_stop_that_a_frozen_worker_cannot_follow_is_followed_by_another_one_for_all(
    launch: Launch, recipe_file: Path, reference: Reference, command: Command
) -> None:
    run = launch(recipe_file, "faults.grace=4s")
    trains(run, 1)
    frozen = worker_of(run, 1, 1)
    os.kill(frozen, signal.SIGSTOP)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    (rescued,) = run.happened("rescued")
    assert run.result["checkpoint"]["latest"] == rescued["step"]
    assert is_gone(frozen)
    resumed = command("resume", run.run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert run.result["weights_sha256"] == reference.weights_sha256
    assert criteria.recorded(run.run) == reference.recorded
    assert criteria.made_twice(run.run) == []


@pytest.mark.parametrize("moment", ["rescued", "worker_started"])
def test_a_stop_between_a_rescue_and_the_first_step_after_it_saves_what_is_in_memory(
    launch: Launch, recipe_file: Path, reference: Reference, command: Command, moment: str
) -> None:
    """It is in memory alone, and that ends with the run: the attempt that begins loads it, saves it, and leaves."""
    run = launch(recipe_file)
    trains(run, 1)
    os.kill(worker_of(run, 1, 1), signal.SIGKILL)
    run.wait_for_event(moment, attempt=1 if moment == "rescued" else 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.text
    (rescued,) = run.happened("rescued", attempt=1)
    assert run.result["checkpoint"]["latest"] >= rescued["step"]
    assert memory_of(run) == []
    resumed = command("resume", run.run_id)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert run.result["weights_sha256"] == reference.weights_sha256
    assert criteria.recorded(run.run) == reference.recorded
    assert criteria.made_twice(run.run) == []


def test_an_agent_that_is_killed_during_a_stop_leaves_the_saving_to_the_others(
    launch: Launch, recipe_file: Path, processes_of: ProcessesOf
) -> None:
    run = launch(recipe_file)
    done = trains(run, 1)
    os.kill(worker_of(run, 1, 1), signal.SIGSTOP)  # so that they do not stop together before
    run.signal(signal.SIGTERM)
    run.wait_for_event("stop_requested")
    os.kill(agent_of(run, 1), signal.SIGKILL)
    assert run.wait() == 75, run.text
    (rescued,) = run.happened("rescued")
    assert run.result["checkpoint"]["latest"] == rescued["step"] >= done
    assert "second request" not in run.text
    assert processes_of(run.run_id) == []
    assert memory_of(run) == []
