"""Machines that are lost, cut off, frozen, late, or back again: on namespaces that are machines to all that matters."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import criteria
import pytest
from criteria import Reference
from hosts import Bed, HostsRun, MakeBed
from launched import LAUNCH, LIMIT_S
from tiny import tiny

from launcher.runs.rundir import RunDir

pytestmark = [pytest.mark.process, pytest.mark.needs("netns"), pytest.mark.timeout(240)]

STEPS, EVERY = 60, 10


def recipe_of(**sections: Any) -> dict[str, Any]:
    return tiny(
        **{
            "name": "hosts",
            "model": {"dropout": 0.0},  # which is other numbers on another number of ranks
            "train": {"until": f"{STEPS} steps", "eval_every": "20 steps", "schedule": {"name": "cosine"}},
            "checkpoint": {"every": f"{EVERY} steps"},
            "resources": {"nproc_per_node": 1, "threads": 1},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """On two nodes."""
    return criteria.undisturbed(tmp_path_factory.mktemp("reference"), recipe_of(), nodes=2)


def planned(bed: Bed, *, nodes: int | str = 2, step_s: float = 0.05, hold_at: int = 0, **sections: Any) -> HostsRun:
    """hold_at: a step that waits for `go_on`."""
    path = bed.folder / "hosts.yaml"
    path.write_text(json.dumps(recipe_of(**sections)))
    run = bed.plan(path, nodes=nodes)
    run.env |= {**criteria.install(bed.folder), "TEST_STEP_S": str(step_s), "TEST_HOLD_AT": str(hold_at)}
    return run


def is_there(run: HostsRun, node: int) -> bool:
    """Whether a node has joined, after it was lost."""
    lost_s = max((event["time"] for event in run.happened("node_lost", node=node)), default=0.0)
    return any(event["time"] > lost_s for event in run.happened("node_joined", node=node))


def go_on_with(run: HostsRun, *nodes: int) -> None:
    """Let the training go on from where it holds, once these nodes are there again."""
    run.until(lambda: all(is_there(run, node) for node in nodes))
    (run.run.path / "go-on").touch()


def left(run: HostsRun) -> dict[str, object]:
    """What is left on all machines that are up."""
    hosts = [host for host in run.bed.hosts if host.is_up]
    return {
        f"{host.name}: {what}": found
        for host in hosts
        for what, found in (
            ("processes", host.pids()), ("ports", host.listening()), ("/dev/shm", host.shared_memory())
        )
    }  # fmt: skip


def test_two_machines_train_as_two_nodes_of_one_do(make_bed: MakeBed, reference: Reference) -> None:
    run = planned(make_bed(2), step_s=0.0)
    run.start()
    assert run.wait() == 0, run.text
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)
    criteria.assert_clean(lambda: left(run))
    hosts = {event["node"]: event["host"] for event in run.happened("node_bound")}
    assert hosts == {0: "h0", 1: "h1"}
    assert "GLOO_SOCKET_IFNAME" in run.happened("node_bound")[0]["env"]


def one_at_a_time(run: HostsRun) -> None:
    """No split brain: rank 0 of an attempt is started when the one before it has ended, or its machine is gone."""
    lost = [(event["time"], event["node"]) for event in run.happened("node_lost")]
    began = [(event["time"], event["attempt"], event["node"]) for event in run.happened("worker_started", rank=0)]
    ended = {event["attempt"]: event["time"] for event in run.happened("worker_ended", rank=0)}
    for (_, attempt, node), (next_s, _, _) in itertools.pairwise(sorted(began)):
        gone_s = min((time_s for time_s, which in lost if which == node), default=math.inf)
        assert min(ended.get(attempt, math.inf), gone_s) <= next_s


def ends_as_if_nothing_had_happened(run: HostsRun, reference: Reference) -> None:
    """BIT, ONCE, CLEAN, CODE."""
    assert run.wait() == 0, run.text
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)
    one_at_a_time(run)
    criteria.assert_clean(lambda: left(run))


@pytest.mark.long
def test_an_agent_that_is_killed_takes_its_workers_with_it_and_is_replaced(
    make_bed: MakeBed, reference: Reference
) -> None:
    """Row 4, F064: the agent of the other machine; its workers are gone within 2 s, and no step is lost."""
    run = planned(make_bed(2))
    run.start()
    run.wait_for_step(15)
    host = run.bed.hosts[1]
    workers = run.workers(1)
    host.signal(run.agent(1), signal.SIGKILL)
    killed_s = time.monotonic()
    run.until(lambda: not set(workers) & host.pids().keys())
    assert time.monotonic() - killed_s < 2.0
    ends_as_if_nothing_had_happened(run, reference)
    assert len(run.happened("rescued")) == 1
    assert criteria.made_twice(run.run) == []


@pytest.mark.long
def test_the_agent_that_hosts_the_head_is_killed(make_bed: MakeBed, reference: Reference) -> None:
    """Row 10, F064: another takes its place, and the run goes on."""
    run = planned(make_bed(2))
    run.start()
    run.wait_for_step(15)
    run.bed.hosts[0].signal(run.agent(0), signal.SIGKILL)
    ends_as_if_nothing_had_happened(run, reference)
    assert run.result["attempts"] == 2


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_is_asked_to_leave_takes_the_run_with_it_saved(
    make_bed: MakeBed, reference: Reference, node: int
) -> None:
    """F064: TERM to one of two agents is a stop of the run, with one checkpoint; nobody is left that waits."""
    run = planned(make_bed(2))
    run.start()
    run.wait_for_step(15)
    asked_s = time.monotonic()
    run.bed.hosts[node].signal(run.agent(node), signal.SIGTERM)
    assert run.wait() == 75, run.text
    assert time.monotonic() - asked_s < 15.0
    criteria.assert_clean(lambda: left(run))
    stopped = run.result["step"]
    assert (run.run.checkpoints / f"step-{stopped}").is_dir()
    known = {step: loss for step, loss in reference.losses.items() if step <= stopped}
    assert criteria.losses(run.run) == known


@pytest.mark.long
@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_that_is_gone_is_waited_for_and_taken_in_again(
    make_bed: MakeBed, reference: Reference, node: int
) -> None:
    """Row 6, of a fixed size: it comes back after some seconds, with nothing in its memory. Also the first one."""
    run = planned(make_bed(2))
    run.start()
    run.wait_for_step(15)
    run.bed.hosts[node].kill()
    if node == 1:
        run.wait_for_event("restarting")
    else:
        run.wait_for_event("head_lost", node=1)
    run.bed.hosts[node].boot()
    run.start(node)
    ends_as_if_nothing_had_happened(run, reference)


@pytest.mark.long
def test_a_machine_that_stays_away_ends_the_run_with_its_cause(make_bed: MakeBed) -> None:
    """Row 6, CODE: at the limit of the joining, which a plan has as 300 s."""
    run = planned(make_bed(2))
    limits = dataclasses.replace(run.plan.limits, join_timeout_s=6.0)
    run.replan(dataclasses.replace(run.plan, limits=limits))
    run.start()
    run.wait_for_step(15)
    run.bed.hosts[1].kill()
    gone_s = time.monotonic()
    assert run.wait() == 1, run.text
    assert time.monotonic() - gone_s < 6.0 + 5.0
    assert (run.result["state"], run.result["cause"]) == ("FAILED", "node_lost")
    assert "node 1 (h1) did not come within 6 s" in run.result["reason"]
    criteria.assert_clean(lambda: left(run))


def test_a_run_of_one_to_two_nodes_goes_on_with_one_and_takes_the_other_in_again(
    make_bed: MakeBed, reference: Reference
) -> None:
    """Row 7: within 10 s of the loss, and with both again at a checkpoint after the other is back; no step is lost."""
    run = planned(make_bed(2), nodes="1:2", hold_at=35)
    run.start()
    run.wait_for_step(15)
    run.bed.hosts[1].kill()
    killed_s, before = time.monotonic(), run.step
    started = run.wait_for_event("training_started", attempt=2, world_size=1)
    assert started["step"] >= before
    run.wait_for_step(started["step"] + 1)
    assert time.monotonic() - killed_s < 10.0
    run.bed.hosts[1].boot()
    run.start(1)
    go_on_with(run, 1)
    run.wait_for_event("training_started", attempt=3, world_size=2)
    assert run.wait() == 0, run.text
    assert run.result["restarts"] == 0, "nobody is to blame"
    assert [event["nodes"] for event in run.happened("scaled")] == [[0], [0, 1]]
    criteria.assert_once(run.run, reference)
    criteria.assert_close(run.run, reference, until=before)
    assert criteria.made_twice(run.run) == []
    one_at_a_time(run)
    criteria.assert_clean(lambda: left(run))


@pytest.mark.long
def test_a_machine_that_is_cut_off_is_gone_on_without(make_bed: MakeBed, reference: Reference) -> None:
    """Row 8, of 1:2 nodes: from the cut to the next new step in 20 s; whoever is cut off ends its workers by itself."""
    run = planned(make_bed(2), nodes="1:2", hold_at=35)
    run.start()
    run.wait_for_step(15)
    host, workers = run.bed.hosts[1], run.workers(1)
    host.cut()
    cut_s = time.monotonic()
    run.until(lambda: not set(workers) & host.pids().keys())
    assert time.monotonic() - cut_s < 20.0
    started = run.wait_for_event("training_started", attempt=2, world_size=1)
    run.wait_for_step(started["step"] + 1)
    assert time.monotonic() - cut_s < 20.0
    host.mend()
    go_on_with(run, 1)
    run.wait_for_event("training_started", attempt=3, world_size=2)
    assert run.wait() == 0, run.text
    criteria.assert_once(run.run, reference)
    assert criteria.made_twice(run.run) == []
    one_at_a_time(run)
    criteria.assert_clean(lambda: left(run))


@pytest.mark.long
@pytest.mark.parametrize("how", ["cut", "freeze"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_machine_that_says_nothing_more_is_noticed_and_waited_for(
    make_bed: MakeBed, reference: Reference, how: str, node: int
) -> None:
    """Row 8, of a fixed size: cut off, or with all that runs on it stopped; noticed in 20 s, back after that."""
    run = planned(make_bed(2))
    run.start()
    run.wait_for_step(15)
    host, other = run.bed.hosts[node], run.bed.hosts[1 - node]
    workers = run.workers(1 - node)
    host.cut() if how == "cut" else host.freeze()
    gone_s = time.monotonic()
    if node == 1:
        run.wait_for_event("node_lost", node=1)
    else:
        run.wait_for_event("head_lost", node=1)
    run.until(lambda: not set(workers) & other.pids().keys())
    assert time.monotonic() - gone_s < 20.0
    host.mend() if how == "cut" else host.thaw()
    ends_as_if_nothing_had_happened(run, reference)


@pytest.mark.long
def test_the_first_machine_may_be_the_last_to_come(make_bed: MakeBed, reference: Reference) -> None:
    """Row 11: 90 s after the other."""
    run = planned(make_bed(2), step_s=0.0)
    run.start(1)
    run.wait_for_event("agent_started", node=1)
    time.sleep(90.0)
    run.start(0)
    ends_as_if_nothing_had_happened(run, reference)
    assert run.result["attempts"] == 1


@pytest.mark.long
def test_runs_that_start_together_meet_nobody_else_and_no_port_that_is_taken(
    make_bed: MakeBed, reference: Reference
) -> None:
    """Row 25: torchrun's ports and some random ones are held, and four launches of two nodes start at once."""
    bed = make_bed(1)
    host = bed.hosts[0]
    ports = [29400, 29500, *random.Random(25).sample(range(32768, 61000), 20)]
    hold = (
        "import socket, time\n"
        f"held = [socket.create_server((a, p)) for a in ('127.0.0.1', '{host.address}') for p in {ports}]\n"
        "open('held', 'w').close()\n"
        "while 1: time.sleep(60)"
    )
    host.start(
        ["sh", "-c", f'cd {bed.folder} && exec {sys.executable} -c "{hold}"'], env={}, output=bed.folder / "hold.log"
    )
    while not (bed.folder / "held").exists():
        time.sleep(0.02)
    path = bed.folder / "hosts.yaml"
    path.write_text(json.dumps(recipe_of()))
    env = {**os.environ, **criteria.install(bed.folder)}
    argv = [LAUNCH, str(path), "--nodes", "2", "--on", "local", "--runs-dir", str(bed.folder / "runs"), "--json"]
    runs = [
        subprocess.Popen(host.inside(*argv), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(4)
    ]
    said = [run.communicate(timeout=LIMIT_S)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, "\n".join(said)
    for text in said:
        run = RunDir(Path(json.loads(text.splitlines()[-1])["run_dir"]))
        criteria.assert_bit(run, reference)
        criteria.assert_once(run, reference)
        assert json.loads(run.result.read_text())["attempts"] == 1


@pytest.mark.long
def test_two_nodes_then_one_then_three_train_on_each_sample_once(
    make_bed: MakeBed, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Row 33: in the middle of an epoch, and with every step where it was."""
    sections = {"train": {"until": "90 steps", "eval_every": None}, "model": {"dropout": 0.0}}
    data = {**recipe_of()["data"], "global_batch_size": 12}
    whole = criteria.undisturbed(tmp_path_factory.mktemp("three"), recipe_of(data=data, **sections), nodes=3)
    bed = make_bed(3)
    bed.hosts[2].kill()
    run = planned(bed, nodes="1:3", hold_at=35, data=data, **sections)
    run.start(0, 1)
    run.wait_for_event("training_started", attempt=1, world_size=2)
    run.wait_for_step(15)
    bed.hosts[1].kill()
    run.wait_for_event("training_started", attempt=2, world_size=1)
    for node in (1, 2):
        bed.hosts[node].boot()
    run.start(1, 2)
    go_on_with(run, 1, 2)
    assert run.wait() == 0, run.text
    assert run.happened("training_started")[-1]["world_size"] == 3
    criteria.assert_once(run.run, whole)
    criteria.assert_close(run.run, whole, until=0)
    assert criteria.made_twice(run.run) == []
    criteria.assert_clean(lambda: left(run))
