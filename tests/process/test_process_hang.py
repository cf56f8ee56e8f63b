"""Where every rank is: asked by a person, or by the head agent when a collective has timed out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from launched import Launch, Recipe

from launcher.runs.spy import Target, take_stacks

pytestmark = pytest.mark.process

SPINS = """
import toy
dist = toy.join()
def spin():
    toy.mark("there")
    while True:
        pass
if toy.RANK == 1:
    spin()
toy.mark("there")
dist.barrier()
"""
TIMEOUT_S = 4
SLEEPS = f"""
import datetime, time, toy, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT_S}))
dist.barrier()
def sleep_for_ever():
    time.sleep(3600)
if toy.RANK == 1:
    sleep_for_ever()
toy.mark("waits")
dist.all_reduce(torch.ones(1))
"""
HANG_S = 2
CLOCKLESS = """
import time, toy, torch
dist = toy.join()
def sleep_until_told():
    while not (toy.RUN / "go").exists():
        time.sleep(0.01)
if toy.RANK == 1:
    sleep_until_told()
dist.all_reduce(torch.ones(1))
print("done", flush=True)
toy.wait_for("end")
"""
HOLDS = """
import re, sys, toy, torch, launch_client
dist = toy.join()
def match_for_ever():
    re.match(r"(a+)+$", "a" * 64 + "b")
for step in range(1, 8):
    if toy.RANK == 1 and toy.ATTEMPT == 1 and step == 5:
        match_for_ever()
    dist.all_reduce(torch.ones(1))
    TELL
"""
CLIENT, PRINT = "launch_client.progress(step)", "print('step', step, flush=True)"
LEAVES_OUT = """
import toy, torch, launch_client
dist = toy.join()
def train():
    for step in range(1, 8):
        if not (toy.RANK == 1 and toy.ATTEMPT == 1 and step == 5):
            dist.all_reduce(torch.ones(1))
        launch_client.progress(step)
    dist.broadcast(torch.ones(1), src=1)
    dist.broadcast(torch.ones(1), src=0)
train()
"""
Command = Callable[..., CompletedProcess[str]]


def names(stack: dict[str, Any]) -> list[str]:
    """The calls of the main thread, the innermost first."""
    (main,) = [thread for thread in stack["threads"] if thread["main"]]
    return [frame["function"] for frame in main["frames"]]


@pytest.mark.parametrize(("preload", "engine"), [(True, "agent"), (False, "torchrun")])
def test_stacks_of_a_rank_that_spins_and_of_one_that_waits_in_a_collective(
    launch: Launch, recipe: Recipe, command: Command, monkeypatch: pytest.MonkeyPatch, *, preload: bool, engine: str
) -> None:
    run = launch(recipe(SPINS, nodes=2, nproc=1, preload=preload), env={"LAUNCH_ENGINE": engine})
    run.wait_for_marks("there", ranks=2)
    run.until(lambda: "barrier" in names(json.loads(command("stacks", run.run_id, "--json").stdout)["ranks"][0]))

    shown = command("stacks", run.run_id)
    assert shown.returncode == 0, shown.stderr
    assert "rank 0  barrier at " in shown.stdout
    assert "in spin" in shown.stdout

    # The other way, for where py-spy is not allowed: each writes its own into its log.
    monkeypatch.setattr("launcher.runs.spy.find_pyspy", lambda: None)
    host = run.happened("agent_started")[0]["host"]
    started = run.happened("worker_started")
    targets = [
        Target(
            rank=e["rank"],
            node=e["node"],
            pid=e["pid"],
            host=host,
            log=run.run.log(attempt=1, node=e["node"], rank=e["rank"]),
        )
        for e in sorted(started, key=lambda event: int(event["rank"]))
    ]
    waits, spins = take_stacks(targets, run_id=run.run_id, hostname=host)
    assert waits.main is not None
    assert spins.main is not None
    assert "barrier" in [frame.function for frame in waits.main.frames]
    assert spins.main.frames[0].function == "spin"
    assert take_stacks(targets[:1], run_id="another-run", hostname=host)[0].trouble

    assert command("cancel", run.run_id).returncode == 0
    assert run.wait() == 143, run.text
    refused = command("stacks", run.run_id)
    assert refused.returncode == 3
    assert "no worker runs" in refused.stderr


def test_a_collective_that_times_out_leaves_the_stacks_of_all_ranks(launch: Launch, recipe: Recipe) -> None:
    """F017 F072: rank 1 sleeps for ever."""
    run = launch(recipe(SLEEPS, nodes=2, nproc=1))
    run.wait_for_marks("waits", ranks=1)
    assert run.wait() == 1, run.text
    assert "in all_reduce" in run.log(0)
    assert "in sleep_for_ever" in run.log(1, node=1)
    assert run.result["cause"] == "hang"
    assert run.result["first_failure"]["rank"] == 0
    assert "still running then: rank 1 on node 1" in run.result["first_failure"]["message"]
    assert "still running then: rank 1 on node 1" in run.text
    assert "; it is at script.py:6 in sleep_for_ever" in run.result["first_failure"]["message"]
    assert "waited in vain" in run.text
    assert "most recent call first" not in run.text, "stacks of all ranks would bury what a person wants to see"


def test_a_script_without_a_step_clock_that_prints_nothing_is_reported_and_goes_on(
    launch: Launch, recipe: Recipe, command: Command
) -> None:
    run = launch(recipe(CLOCKLESS, nodes=2, nproc=1, faults={"hang_timeout": f"{HANG_S}s"}))
    # On a busy machine the import alone may take longer than the limit, and is silent too.
    run.until(lambda: any(each["waiting"]["ranks"] == [0] for each in run.happened("hang")))
    told = len(run.happened("hang"))
    hang = run.happened("hang")[-1]
    assert [each["rank"] for each in hang["culprits"]] == [1]
    assert "in sleep_until_told" in hang["culprits"][0]["place"]
    assert hang["waiting"]["ranks"] == [0]
    assert "all_reduce" in hang["waiting"]["place"]
    assert hang["message"].startswith("no output for")
    run.until(lambda: "hang: no output for" in run.text)
    assert "  hangs     no output for" in command("status", run.run_id).stdout
    run.until(lambda: len(run.happened("hang")) > told)  # it has lasted twice as long: the stacks were no output
    assert run.happened("hang_over") == []
    run.let("go")
    run.wait_for_event("hang_over")
    run.until(lambda: "it goes on, after" in run.text)
    assert "  hangs " not in command("status", run.run_id).stdout
    run.let("end")
    assert run.wait() == 0, run.text
    assert len(run.happened("attempt_started")) == 1
    assert "; it went on after" in command("report", run.run_id).stdout


@pytest.mark.parametrize(
    ("nodes", "tell", "fields"), [(1, PRINT, {"progress": {"log": r"step (\d+)"}}), (2, CLIENT, {})]
)
def test_a_rank_in_a_loop_of_c_that_holds_the_interpreter_is_restarted(
    launch: Launch, recipe: Recipe, command: Command, *, nodes: int, tell: str, fields: dict[str, Any]
) -> None:
    """F072: the others would wait for ten minutes. Its step clock is what it says itself, or what it prints."""
    faults = {"hang_timeout": f"{HANG_S}s"}
    source = HOLDS.replace("TELL", tell)
    run = launch(recipe(source, nodes=nodes, nproc=2 // nodes, faults=faults, resume="self", **fields))
    assert run.wait() == 0, run.text
    (hang,) = run.happened("hang")
    assert [each["rank"] for each in hang["culprits"]] == [1]
    assert "in match_for_ever" in hang["culprits"][0]["place"]
    assert (hang["step"], hang["phase"]) == (4, "step")
    assert hang["waited_s"] < HANG_S + 8
    assert "in match_for_ever" in run.log(1, node=nodes - 1)
    assert "most recent call first" not in run.text
    (row,) = [line for line in command("report", run.run_id).stdout.splitlines() if line.startswith("hang ")]
    assert "rank 1 on node" in row
    assert row.endswith("; the attempt was ended")


def test_a_rank_that_leaves_out_a_collective_is_named(launch: Launch, recipe: Recipe) -> None:
    """Both wait, each for something else."""
    run = launch(recipe(LEAVES_OUT, nodes=2, nproc=1, faults={"hang_timeout": f"{HANG_S}s"}))
    # On a busy machine the import alone may take longer than the limit.
    hang = run.until(lambda: next((each for each in run.happened("hang") if each["step"]), None))
    assert "different collectives" in hang["message"]
    assert 1 in [each["rank"] for each in hang["culprits"]]


def test_a_zygote_that_was_stopped_is_woken_before_anybody_misses_it(launch: Launch, recipe: Recipe) -> None:
    """Stopped, it would neither tell of the end of a worker nor end one."""
    run = launch(recipe("import toy\ntoy.mark('up')\ntoy.wait_for('go')\n", nproc=1, resume="self"))
    (worker,) = run.wait_for_marks("up", ranks=1)
    zygote = int((Path("/proc") / str(worker) / "stat").read_text().rpartition(")")[2].split()[1])
    os.kill(zygote, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)
    assert run.wait_for_event("zygote_woken")["pid"] == zygote
    run.wait_for_marks("up", ranks=1, attempt=2)
    run.let("go")
    assert run.wait() == 0, run.text
    assert run.happened("zygote_replaced") == []
