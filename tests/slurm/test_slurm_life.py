"""What clusters do to jobs, on the real cluster: after each of it the run goes on exactly, or ends with its cause."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launched import Launch, Launched, Recipe, launch
from slurm_cluster import SlurmCluster, cut_off
from slurm_launched import OnSlurm, SlurmLaunched
from tiny import tiny

from launcher.runs.states import Cause

__all__ = ["launch"]
pytestmark = [pytest.mark.process, pytest.mark.needs("slurm"), pytest.mark.timeout(240)]

STEPS = 3000


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A training on two nodes of some seconds, which saves often."""
    path = tmp_path / "training.yaml"
    path.write_text(
        json.dumps(
            tiny(
                train={"until": f"{STEPS} steps", "eval_every": "1500 steps"},
                checkpoint={"every": "100 steps", "keep": 2},
                parallelism={"strategy": "ddp"},
                resources={"nodes": 2, "nproc_per_node": 1, "threads": 1, "device": "cpu"},
            )
        )
    )
    return path


class Undisturbed(NamedTuple):
    """What the same recipe comes to on this machine, with nothing in its way."""

    weights: str
    losses: dict[int, float]


@pytest.fixture(scope="session")
def known() -> dict[str, Undisturbed]:
    """By what was added to the recipe."""
    return {}


@pytest.fixture
def undisturbed_by(launch: Launch, training: Path, known: dict[str, Undisturbed]) -> Callable[..., Undisturbed]:
    """A local run of the recipe with these values, or the one that there was."""

    def find(*values: str) -> Undisturbed:
        key = " ".join(values)
        if key not in known:
            run = launch(training, "--on", "local", *values)
            assert run.wait() == 0, run.text
            known[key] = Undisturbed(run.result["weights_sha256"], losses(run))
        return known[key]

    return find


@pytest.fixture
def undisturbed(undisturbed_by: Callable[..., Undisturbed]) -> Undisturbed:
    """That of the recipe as it is."""
    return undisturbed_by()


def last_nodes(cluster: SlurmCluster, count: int) -> list[str]:
    """Nodes for tests that break some: the last ones. The other tests are not sent anywhere, and take the first."""
    names = cluster.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N").split()
    return sorted(set(names), key=lambda name: int(name.lstrip("n")))[-count:]


def on_nodes(names: list[str]) -> str:
    return 'slurm.sbatch={nodelist: "' + ",".join(names) + '"}'


def train_on(run: SlurmLaunched, attempt: int) -> None:
    """Wait until an attempt has saved something of its own."""
    run.wait_for_event("training_started", attempt=attempt)
    run.wait_for_event("checkpoint_saved", attempt=attempt)


def pid_of(run: SlurmLaunched, event: str, **fields: Any) -> int:
    return int(run.happened(event, **fields)[-1]["pid"])


def ends(run: SlurmLaunched) -> list[tuple[Cause, bool]]:
    """Cause of each allocation but the one that the run has ended in, and whether it had saved."""
    found = [(Cause(event["cause"]), event["saved"]) for event in run.happened("allocation_ended")]
    return [end for end in found if end[0] is not Cause.DONE]


def losses(run: Launched) -> dict[int, float]:
    """The loss of each step; of one that was done twice the newest attempt's counts."""
    lines = [json.loads(line) for line in run.run.metrics.read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def is_exact(run: Launched, undisturbed: Undisturbed) -> bool:
    """Whether nothing shows of what happened: every step once, with the same loss, to the same weights."""
    assert sorted(undisturbed.losses) == list(range(1, run.result["step"] + 1))
    assert losses(run) == undisturbed.losses
    return bool(run.result["weights_sha256"] == undisturbed.weights)


def test_signals_a_killed_agent_and_a_requeue(
    on_slurm: OnSlurm, training: Path, undisturbed: Undisturbed, slurm_cluster: SlurmCluster
) -> None:
    """F015 F042 F049 F050 F064: TERM to the step, USR1 to the batch script alone, TERM to one worker, `kill -9` of an
    agent, `scontrol requeue`: all ranks stop after the same step, one complete checkpoint, and it goes on exactly.
    """
    run = on_slurm(training)
    train_on(run, 1)
    job = run.job
    slurm_cluster.run("scancel", "--signal=TERM", f"{job}.0")
    train_on(run, 2)
    slurm_cluster.run("scancel", "--batch", "--signal=USR1", job)
    train_on(run, 3)
    os.kill(pid_of(run, "worker_started", node=1, attempt=3), signal.SIGTERM)
    train_on(run, 4)
    os.kill(pid_of(run, "agent_started", node=1), signal.SIGKILL)
    train_on(run, 5)
    slurm_cluster.run("scontrol", "requeue", job)
    result = run.wait_for_result()
    assert (result["state"], result["attempts"], result["step"]) == ("SUCCEEDED", 6, STEPS), run.console
    assert is_exact(run, undisturbed)
    assert ends(run) == [
        (Cause.SIGNAL, True),
        (Cause.SIGNAL, True),
        (Cause.SIGNAL, True),
        (Cause.REQUEUED, True),
    ]
    reasons = [event["reason"] for event in run.happened("allocation_ended")]
    assert reasons[:4] == [
        "TERM from outside, to processes of the run",
        "USR1 from outside, to processes of the run",
        "a worker was asked to stop",
        "requeued from outside (scontrol requeue)",
    ]
    assert [event["allocation"] for event in run.happened("attempt_started")] == [1, 2, 3, 4, 4, 5]
    assert [event["cause"] for event in run.happened("attempt_ended")] == ["node_lost"]
    assert result["restarts"] == 0, "a killed agent is no crash of the run"
    assert len(run.happened("stop_requested")) == 3, "one stop each, however many processes were signalled"
    for attempt in range(1, 7):
        assert "steps, 2 ranks" in run.log(0, attempt=attempt), "the logs of every attempt stay"
    assert len(run.happened("stopped", saved=True)) == 4
    assert run.refs == [f"slurm:{job}"] * 5


def test_a_higher_job_and_a_killed_parent_of_an_agent(
    on_slurm: OnSlurm, training: Path, undisturbed: Undisturbed, slurm_cluster: SlurmCluster
) -> None:
    """F012 F049: preempted in mid-run, then the launcher's process on a node is killed; both are free and named.

    The worker of the other node saves what both had, before SLURM ends it with its job step: no step is lost.
    """
    nodes = last_nodes(slurm_cluster, 2)
    run = on_slurm(training, on_nodes(nodes), "faults.max_restarts=0")
    train_on(run, 1)
    nodelist = f"--nodelist={','.join(nodes)}"
    high = slurm_cluster.submit("sleep 1", "--partition=high", nodelist, "--nodes=2", "--exclusive")
    slurm_cluster.wait_for(high, "COMPLETED")
    train_on(run, 2)
    parents = [event for event in run.happened("supervisor_started") if event["host"] == nodes[1]]
    os.kill(parents[-1]["pid"], signal.SIGKILL)
    result = run.wait_for_result()
    assert (result["state"], result["restarts"]) == ("SUCCEEDED", 0), run.console
    assert is_exact(run, undisturbed)
    assert ends(run) == [(Cause.PREEMPTED, True), (Cause.NODE_LOST, True)]
    lost = run.happened("allocation_ended")[1]
    assert (lost["node"], lost["host"]) == (1, nodes[1])
    (rescued,) = run.happened("rescued")
    assert run.happened("training_started")[-1]["step"] == rescued["step"]


@pytest.mark.parametrize("which", [0, 1], ids=["first node", "other node"])
def test_a_node_that_is_cut_off(  # noqa: PLR0917 - fixtures
    on_slurm: OnSlurm,
    training: Path,
    undisturbed: Undisturbed,
    slurm_cluster: SlurmCluster,
    processes_with: Callable[[str, str], list[int]],
    which: int,
) -> None:
    """F094: SLURM gives it up, and the job goes on on others; what still runs on it changes nothing."""
    others = [name for name in last_nodes(slurm_cluster, 1000) if name not in last_nodes(slurm_cluster, 4)]
    exclude = [f'slurm.sbatch={{exclude: "{",".join(others)}"}}'] if others else []
    run = on_slurm(training, *exclude)
    train_on(run, 1)
    hosts = run.happened("allocation_started")[0]["nodes"]
    with cut_off(run.cluster, hosts[which]):
        result = run.wait_for_result(170)
    assert result["state"] == "SUCCEEDED", run.console
    assert is_exact(run, undisturbed)
    first = next(event for event in run.happened("allocation_ended") if event["allocation"] == 1)
    assert first["cause"] == "node_lost"
    assert which == 0 or (first["node"], first["host"]) == (which, hosts[which])
    assert [event["allocation"] for event in run.happened("allocation_ended")] == [1, 2], "it has one end"
    later = [event for event in run.happened("requeued") if event["time"] > first["time"]]
    assert which == 1 or later == [], "who was cut off asks for nothing when it is back"
    run.cluster.wait_until(lambda: not processes_with("LAUNCH_RUN_ID", run.run_id), lambda: "some are left")


COUNTS_FOR_SO_LONG = """
import os, signal, sys, time
from toy import RANK, RUN, mark
wanted = []
signal.signal(signal.SIGTERM, lambda *_: wanted.append(True))
saved = RUN / f"count.{RANK}"
count = int(saved.read_text()) if saved.exists() else 0
mark("up")
while count < 140:
    time.sleep(0.5)
    count += 1
    print("step", count, flush=True)
    if wanted:
        saved.write_text(str(count))
        sys.exit(75)
"""


def test_a_time_limit_that_is_too_short(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F016 F048: it stops in time to save, and goes on until it is done; a warning that is too early is noted only."""
    progress = {"log": r"step (\d+)"}
    run = on_slurm(recipe(COUNTS_FOR_SO_LONG, nodes=2, nproc=1, resume="self", progress=progress), "slurm.time=1m")
    run.wait_for_marks("up", 2)
    run.cluster.run("scancel", "--signal=USR1", run.job)
    result = run.wait_for_result(170)
    assert (result["state"], result["attempts"], result["step"]) == ("SUCCEEDED", 2, 140), run.console
    assert ends(run) == [(Cause.TIME_LIMIT, True)]
    (heard,) = run.happened("signal_heard")
    assert heard["ignored"]
    assert 20 < heard["seconds_left"] <= 60
    assert run.happened("stop_requested")[0]["reason"] == "the job ends in 5 s"
    steps = [int(line.split()[1]) for attempt in (1, 2) for line in run.log(0, attempt=attempt).splitlines()]
    assert steps == list(range(1, 141)), "no step is lost and none is done again"


CRASHES = """
import sys
from toy import join, mark
group = join()
group.barrier()
if group.get_rank() == 1:
    sys.exit(7)
import time
time.sleep(600)
"""


def test_a_crash_each_time_ends_after_its_budget(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F012 F013 F043: with the script's own exit code, for SLURM too, the node and the rank; nothing is requeued."""
    run = on_slurm(recipe(CRASHES, nodes=2, nproc=1, resume="self", faults={"max_restarts": 1}))
    result = run.wait_for_result()
    assert (result["state"], result["exit_code"], result["attempts"]) == ("FAILED", 7, 2), run.console
    assert (result["first_failure"]["node"], result["first_failure"]["rank"]) == (1, 1)
    run.cluster.wait_for(run.job, "FAILED")
    assert ":7" not in run.cluster.run("squeue", "-h", "-j", run.job)
    assert "ExitCode=7:0" in run.cluster.run("scontrol", "show", "job", run.job)
    assert run.happened("requeued") == []


ENDS = {
    "seven": ("sys.exit(7)", 7),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "segv": ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
}


def test_the_exit_code_of_a_worker_is_that_of_launch_the_result_and_the_job(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F013: for one who follows the run, for a program that reads result.json, and for SLURM's dependencies."""
    started = {
        name: on_slurm(recipe(f"import os, signal, sys\n{source}", nproc=1, name=name), "--follow")
        for name, (source, _) in ENDS.items()
    }
    for name, (_, code) in ENDS.items():
        run = started[name]
        result = run.wait_for_result()
        assert (result["state"], result["exit_code"], result["attempts"]) == ("FAILED", code, 1), run.console
        assert run.wait() == code, run.text
        run.cluster.wait_for(run.job, "FAILED")
        assert f"ExitCode={code}:0" in run.cluster.run("scontrol", "show", "job", run.job)


SAVES_AND_GOES_ON = """
import os, signal, sys, time
from toy import ATTEMPT, RANK, RUN, mark
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
mark("up")
while ATTEMPT == 1:
    time.sleep(0.02)
"""


def test_nodes_without_slurms_commands_are_requeued_by_the_batch_side(
    on_slurm: OnSlurm, recipe: Recipe, tmp_path: Path
) -> None:
    """F046: inside an image there is no scontrol; whoever saves only says so by its exit code."""
    path = recipe(SAVES_AND_GOES_ON, nodes=2, nproc=1, resume="self", setup=[f"export PATH={tmp_path}/no-tools"])
    run = on_slurm(path, "slurm.continue=requeue")
    run.wait_for_marks("up", 2)
    run.cluster.run("scancel", "--signal=USR1", f"{run.job}.0")
    result = run.wait_for_result()
    assert (result["state"], result["attempts"]) == ("SUCCEEDED", 2), run.console
    assert run.happened("requeued")[0]["how"] == "requeue"
    assert run.happened("allocation_ended")[0]["cause"] == "signal"


SAVES_IN_ITS_HANDLER = """
import os, signal, sys, time
from toy import RANK, RUN, mark
def save(signum, frame):
    with open(RUN / f"saves.{RANK}", "a") as file:
        print(os.environ["LAUNCH_ATTEMPT"], file=file)
    time.sleep(1.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
mark("up")
time.sleep(600)
"""


@pytest.mark.parametrize("signals", [["TERM"], ["CONT", "TERM"], ["USR2", "CONT", "TERM"]], ids=" ".join)
def test_any_order_of_signals_is_one_save_and_one_exit(on_slurm: OnSlurm, recipe: Recipe, signals: list[str]) -> None:
    """F049: a script that saves in its handler is asked once, whatever SLURM sends to all of its processes."""
    run = on_slurm(recipe(SAVES_IN_ITS_HANDLER, nodes=2, nproc=1, resume="self"), "slurm.continue=none")
    run.wait_for_marks("up", 2)
    job = run.job
    run.cluster.run("bash", "-c", "; ".join(f"scancel --signal={name} {job}.0" for name in signals))
    result = run.wait_for_result()
    assert (result["state"], result["cause"], result["exit_code"]) == ("CANCELLED", "signal", 75), run.console
    assert "slurm.continue is none" in result["reason"]
    assert [(run.run.path / f"saves.{rank}").read_text() for rank in (0, 1)] == ["1\n", "1\n"]


COMES_NO_FURTHER = """
import time
from toy import mark
mark("up")
time.sleep(600)
"""


def test_what_comes_no_further_is_not_requeued_for_ever(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F043: three allocations in a row without a new step or checkpoint."""
    progress = {"log": r"step (\d+)"}
    again = on_slurm(
        recipe(
            COMES_NO_FURTHER.replace("mark(", "print('step 3', flush=True); mark("), resume="self", progress=progress
        ),
        "slurm.continue=resubmit",
    )
    for attempt in (1, 2, 3, 4):
        again.wait_for_marks("up", 2, attempt=attempt)
        again.wait_for_event("progress", attempt=attempt)
        again.cluster.run("scancel", "--signal=TERM", f"{again.job}.0")
    result = again.wait_for_result()
    assert (result["state"], result["cause"]) == ("FAILED", "no_progress"), again.console
    assert "3 allocations in a row ended without a new step or checkpoint" in result["reason"]
    assert len(set(again.refs)) == 4, "each was a job of its own"


def test_without_resume_a_stop_is_the_end(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F043: what cannot resume is not started again over its outputs; SLURM is told so (--no-requeue)."""
    run = on_slurm(recipe(COMES_NO_FURTHER, nproc=1))
    run.wait_for_marks("up", 1)
    run.cluster.run("scancel", "--signal=TERM", f"{run.job}.0")
    result = run.wait_for_result()
    assert (result["state"], result["cause"]) == ("CANCELLED", "signal"), run.console
    assert "declares no `resume:`" in result["reason"]


def test_a_finished_run_that_is_started_again_ends_at_once(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """Requeued, or the rest of a chain: exit code 0, and nothing is written that changes anything."""
    run = on_slurm(recipe("print('done')", nproc=1, resume="self"), "slurm.continue=chain:2")
    assert run.wait_for_result()["state"] == "SUCCEEDED", run.console
    _, second = run.happened("submitted")[0]["chain"]
    job = second.partition(":")[2]
    run.cluster.wait_for(job, "COMPLETED")
    assert len(run.happened("allocation_started")) == 1
    assert "this run is finished" in run.console


def test_a_chain_goes_on_with_the_next_job_and_no_further(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """F048: two jobs were submitted at once; a third one there is not."""
    run = on_slurm(recipe(SAVES_IN_ITS_HANDLER, nproc=1, resume="self"), "slurm.continue=chain:2")
    first, second = run.until(lambda: run.happened("submitted") and run.happened("submitted")[0]["chain"])
    run.wait_for_marks("up", 1)
    run.cluster.run("scancel", "--signal=TERM", f"{first.partition(':')[2]}.0")
    run.wait_for_marks("up", 1, attempt=2)
    assert run.happened("requeued")[0]["ref"] == second
    run.cluster.run("scancel", "--signal=TERM", f"{second.partition(':')[2]}.0")
    result = run.wait_for_result()
    assert (result["state"], result["exit_code"]) == ("CANCELLED", 75), run.console
    assert "all 2 jobs of the chain are used" in result["reason"]


def test_a_limit_of_the_run_counts_over_its_allocations(on_slurm: OnSlurm, recipe: Recipe) -> None:
    """`limits.wall` is what the workers had in all allocations together."""
    source = SAVES_IN_ITS_HANDLER
    run = on_slurm(recipe(source, nproc=1, resume="self", limits={"wall": "8s"}), "slurm.continue=resubmit")
    run.wait_for_marks("up", 1)
    run.cluster.run("scancel", "--signal=TERM", f"{run.job}.0")
    result = run.wait_for_result()
    assert (result["state"], result["cause"], result["exit_code"]) == ("TIMED_OUT", "time_limit", 75), run.console
    assert result["reason"] == "limits.wall: 8 s of 8 s are used"
    second = run.happened("attempt_started")[-1]["time"]
    assert result["attempts"] == 2
    assert run.happened("stop_requested")[-1]["time"] - second < 8


def test_scancel_ends_the_run_with_a_checkpoint(on_slurm: OnSlurm, training: Path) -> None:
    """By SLURM's own command, which is a person's word: cancelled, and nothing goes on."""
    run = on_slurm(training)
    train_on(run, 1)
    run.cluster.run("scancel", run.job)
    result = run.wait_for_result()
    assert (result["state"], result["exit_code"]) == ("CANCELLED", 75), run.console
    assert result["reason"] == "cancelled from outside (scancel)"
    assert result["checkpoint"]["latest"] == result["step"]
    assert run.happened("requeued") == []
