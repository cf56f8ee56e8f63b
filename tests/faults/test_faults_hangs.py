"""A rank that freezes, in every way there is: it is noticed from outside, named, and the training ends bit for bit as
one that nobody disturbed.

The workers freeze themselves, where a plan says, by a `sitecustomize` of these tests; the product knows nothing of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from launched import LAUNCH, LIMIT_S, Launch, Launched
from outermost import OUTERMOST
from tiny import tiny

from launcher.runs.metrics import read_metrics
from launcher.runs.rundir import RunDir

pytestmark = pytest.mark.process

STEPS = 60
HANG_S = 2.0
TIMEOUT_S = 5.0
NOTICED_S = HANG_S + 10.0
"""A machine that does other things too may take so much longer."""

SITECUSTOMIZE = (
    OUTERMOST
    + r"""
import json, os, re, signal, sys, time

PLAN = json.loads(os.environ.get("FREEZES_OF_THIS_TEST", "[]"))
state = {"steps": 0, "forwards": 0, "done": False}

def hold_the_interpreter():
    # A loop in C that never lets go of it: no thread of this process runs any more.
    re.match(r"(a+)+$", "a" * 64 + "b")

def sleep_for_ever():
    time.sleep(3600)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


HOW = {"gil": hold_the_interpreter, "sleep": sleep_for_ever, "stop": stop}

def here(phase):
    if "LAUNCH_ATTEMPT" not in os.environ or "RANK" not in os.environ or state["done"]:
        return
    attempt = int(os.environ["LAUNCH_ATTEMPT"])
    if attempt > len(PLAN):
        return
    freeze = PLAN[attempt - 1]
    if os.environ["RANK"] != str(freeze["rank"]) or phase != freeze["phase"] or state["steps"] < freeze["steps"]:
        return
    state["done"] = True
    with open(os.path.join(os.environ["LAUNCH_RUN_DIR"], f"froze-{attempt}"), "x"):
        pass
    HOW[freeze["how"]]()

def forward(module, inputs):
    if outermost():
        here("forward")

def updated(*_):
    state["steps"] += 1
    here("updated")

if PLAN and re.search(r"launcher[./]agent", " ".join(sys.orig_argv)):
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    register_module_forward_pre_hook(forward)
    register_optimizer_step_pre_hook(lambda *_: here("optimizer"))
    register_optimizer_step_post_hook(updated)
"""
)


@dataclass(frozen=True)
class Freeze:
    """What happens in one attempt, after so many steps of it."""

    how: str
    rank: int
    phase: str = "forward"
    steps: int = 5


WORDS = {"gil": "hold_the_interpreter", "sleep": "sleep_for_ever", "stop": "is stopped (state T)"}


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbs."""

    folder: Path
    weights_sha256: str
    losses: dict[int, str]


def recipe(network_timeout: str | None = None, **resources: int) -> dict[str, object]:
    faults = {"hang_timeout": f"{HANG_S} s"} if network_timeout is None else {}
    return tiny(
        name="frozen",
        train={"until": f"{STEPS} steps", "eval_every": "20 steps"},
        checkpoint={"every": "25 steps"},
        resources={**resources, "threads": 1},
        faults={**faults, "max_restarts": 20},
        network={"timeout": network_timeout or "10m"},
    )


def losses(run: RunDir) -> dict[int, str]:
    """Of each step, bit by bit."""
    found = read_metrics(run.metrics)
    return {record["step"]: float(record["train/loss"]).hex() for record in found if "train/loss" in record}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("hangs")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / "frozen.json").write_text(json.dumps(recipe(nodes=2, nproc_per_node=1)))
    (folder / "frozen.yaml").write_text((folder / "frozen.json").read_text())
    argv = [LAUNCH, str(folder / "frozen.yaml"), "--runs-dir", str(folder), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=folder)
    run = RunDir(Path(json.loads(done.stdout.splitlines()[-1])["run_dir"]))
    assert len(losses(run)) == STEPS
    return Undisturbed(folder, json.loads(run.result.read_text())["weights_sha256"], losses(run))


def check(run: Launched, freezes: list[Freeze], undisturbed: Undisturbed) -> None:
    """Each was noticed in time, with the right rank named; nothing else differs from a run without them."""
    assert run.wait() == 0, run.text
    assert len(run.happened("attempt_started")) == len(freezes) + 1, run.text
    for attempt, freeze in enumerate(freezes, 1):
        (hang,) = run.happened("hang", attempt=attempt)
        assert [each["rank"] for each in hang["culprits"]] == [freeze.rank], hang["message"]
        assert WORDS[freeze.how] in hang["culprits"][0]["place"], hang["message"]
        assert hang["waited_s"] < NOTICED_S, hang["message"]
        assert hang["action"] == "restart"
        assert run.happened("failure", attempt=attempt)[0]["cause"] == "hang"
    assert losses(run.run) == undisturbed.losses
    assert run.result["weights_sha256"] == undisturbed.weights_sha256


def start(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, folder: Path, freezes: list[Freeze], **fields: Any
) -> Launched:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("FREEZES_OF_THIS_TEST", json.dumps([asdict(freeze) for freeze in freezes]))
    path = folder / "-".join(["frozen", *map(str, fields.values())])
    path.with_suffix(".yaml").write_text(json.dumps(recipe(**fields)))
    return launch(path.with_suffix(".yaml"))


def test_a_rank_that_freezes_on_either_of_two_nodes_is_named_and_no_step_differs(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed
) -> None:
    """Stopped; asleep; in a loop of C that holds the interpreter."""
    freezes = [Freeze("stop", 1), Freeze("sleep", 0, "optimizer"), Freeze("gil", 1, "updated", 8)]
    run = start(launch, monkeypatch, undisturbed.folder, freezes, nodes=2, nproc_per_node=1)
    check(run, freezes, undisturbed)
    for attempt, freeze in enumerate(freezes, 1):
        if freeze.how != "stop":
            assert f"in {WORDS[freeze.how]}" in run.log(freeze.rank, node=freeze.rank, attempt=attempt)
    assert "most recent call first" not in run.text, "stacks are for the logs"


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_collective_that_times_out_first_leads_to_the_same(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed, nodes: int
) -> None:
    """F072: `network.timeout` is below what the watch waits, and does what it says."""
    fields = {"nodes": nodes, "nproc_per_node": 2 // nodes, "network_timeout": f"{TIMEOUT_S} s"}
    run = start(launch, monkeypatch, undisturbed.folder, [Freeze("sleep", 1)], **fields)
    assert run.wait() == 0, run.text
    froze_s = (run.run.path / "froze-1").stat().st_mtime
    (ended,) = run.happened("attempt_ended")
    assert ended["time"] - froze_s < TIMEOUT_S + 10.0
    assert ended["cause"] == "hang"
    assert "still running then" in ended["message"]
    assert "in sleep_for_ever" in ended["message"]
    assert "in sleep_for_ever" in run.log(1, node=nodes - 1)
    assert "most recent call first" in run.log(0)
    assert "rank 1 on node" in ended["message"]
    assert "rank 0 on node" not in ended["message"], "it has waited, and says so itself"
    assert losses(run.run) == undisturbed.losses
    assert run.result["weights_sha256"] == undisturbed.weights_sha256


@pytest.mark.long
@pytest.mark.parametrize("phase", ["forward", "optimizer", "updated"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_freezes_on_one_node_is_named_and_no_step_differs(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, undisturbed: Undisturbed, phase: str, rank: int
) -> None:
    freezes = [Freeze(how, rank, phase, steps) for steps, how in enumerate(("stop", "sleep", "gil"), 3)]
    run = start(launch, monkeypatch, undisturbed.folder, freezes, nodes=1, nproc_per_node=2)
    check(run, freezes, undisturbed)


SHARE_S = (0.006, 0.018)
"""A slow machine: its process runs for so long, then it stands still for so long."""


def slow_down(pid: int, over: threading.Event) -> None:
    """What `cpulimit` does, until it is over."""
    runs_s, stands_s = SHARE_S
    while not over.is_set():
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stands_s)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        time.sleep(runs_s)


def test_the_rank_that_the_others_wait_for_at_every_step_is_named(
    launch: Launch, command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Time of a whole step is the same on all ranks: what tells them apart is their own work in it."""
    path = tmp_path / "slow.yaml"
    path.write_text(
        json.dumps(
            tiny(
                model={"in_features": 2000, "hidden": 800},
                data={"shape": "2000", "samples": 160},
                train={"until": "100000 steps", "eval_every": None},
                checkpoint={"every": None},
                resources={"nodes": 2, "nproc_per_node": 1, "threads": 1},
            )
        )
    )
    run = launch(path)
    run.wait_for_event("training_started")
    (slow,) = [event["pid"] for event in run.happened("worker_started") if event["rank"] == 1]
    over = threading.Event()
    thread = threading.Thread(target=slow_down, args=(slow, over))
    thread.start()
    try:
        found = run.wait_for_event("straggler")
    finally:
        over.set()
        thread.join()
    assert (found["rank"], found["node"]) == (1, 1)
    assert found["own_ms"] > 1.5 * found["others_ms"]
    run.until(lambda: "straggler: rank 1 on node 1" in run.text)
    assert "  straggler rank 1 on node 1" in command("status", run.run_id).stdout
    assert "straggler  attempt 1   rank 1 on node 1" in command("report", run.run_id).stdout
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    assert [event["rank"] for event in run.happened("straggler")] == [1]
    assert run.happened("hang") == [], "slow is not frozen"
