"""What is killed is replaced, its children are gone, and the run goes on or ends with a reason."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launched import Launch, Launched, Recipe, zygote_of

pytestmark = pytest.mark.process

UP = "import toy\ndist = toy.join()\ntoy.mark('up')\ntoy.wait_for(f'go.{toy.ATTEMPT}')\n"
CHILD = (
    "import os, subprocess, sys, toy\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    "(toy.RUN / f'child.{toy.RANK}.{toy.ATTEMPT}').write_text(str(child.pid))\n"
)
ProcessesOf = Callable[[str], list[int]]


def agent_of(run: Launched, node: int) -> int:
    """The pid of the newest agent of a node."""
    return int(run.happened("agent_started", node=node)[-1]["pid"])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill_and_see(run: Launched, victim: int, dependants: list[int]) -> None:
    """SIGKILL one process; what depends on it is gone 2 s later."""
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    run.until(lambda: all(is_gone(pid) for pid in dependants), limit_s=20.0)
    assert time.monotonic() - killed_s < 2.0


def test_an_agent_the_head_agent_and_a_zygote_are_replaced_and_the_run_goes_on(
    launch: Launch, recipe: Recipe, processes_of: ProcessesOf
) -> None:
    run = launch(recipe(CHILD + UP, nodes=2, nproc=1, resume="self"))

    workers = run.wait_for_marks("up", ranks=2)
    child = int((run.run.path / "child.1.1").read_text())
    kill_and_see(run, agent_of(run, 1), [workers[1], child])

    workers = run.wait_for_marks("up", ranks=2, attempt=2)
    child = int((run.run.path / "child.0.2").read_text())
    kill_and_see(run, agent_of(run, 0), [workers[0], child])

    workers = run.wait_for_marks("up", ranks=2, attempt=3)
    kill_and_see(run, zygote_of(agent_of(run, 1)), [workers[1]])

    run.wait_for_marks("up", ranks=2, attempt=4)
    run.let("go.4")
    assert run.wait() == 0, run.text
    assert processes_of(run.run_id) == []
    assert run.result["attempts"] == 4
    assert run.result["restarts"] == 3
    assert [event["attempt"] for event in run.happened("attempt_started")] == [1, 2, 3, 4]
    assert [event["node"] for event in run.happened("agent_lost")] == [1, 0]
    assert [event["node"] for event in run.happened("zygote_replaced")] == [1]
    causes = [event["cause"] for event in run.happened("attempt_ended")]
    assert causes == ["node_lost", "node_lost", "signal"]
    assert "launch | the agent of node 1" in run.text


def test_without_resume_a_lost_node_is_the_end_with_a_reason(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(UP, nodes=2, nproc=1))
    run.wait_for_marks("up", ranks=2)
    os.kill(agent_of(run, 1), signal.SIGKILL)
    assert run.wait() == 1, run.text
    assert run.result["cause"] == "node_lost"
    assert "the agent of node 1" in run.text
    assert "not retried: the script declares no `resume:`" in run.text


def test_a_killed_supervisor_takes_everything_with_it_and_that_is_said(
    launch: Launch,
    recipe: Recipe,
    processes_of: ProcessesOf,
    command: Callable[..., CompletedProcess[str]],
) -> None:
    run = launch(recipe(CHILD + UP, nodes=2, nproc=1, resume="self"))
    run.wait_for_marks("up", ranks=2)
    (supervisor,) = run.happened("supervisor_started")
    kill_and_see(run, supervisor["pid"], processes_of(run.run_id))
    assert run.wait() == 70, run.text
    assert "did not say why" in run.text
    status = command("status", run.run_id)
    assert "FAILED" in status.stdout


def test_a_zygote_that_dies_before_it_could_report_is_replaced(launch: Launch, recipe: Recipe) -> None:
    source = "import toy\ntoy.mark('up')\ntoy.wait_for('go')\n"
    run = launch(recipe(source, nproc=1, resume="self"))
    (worker,) = run.wait_for_marks("up", ranks=1)
    zygote = zygote_of(agent_of(run, 0))
    os.kill(zygote, signal.SIGSTOP)  # it does not report the end of the worker
    os.kill(worker, signal.SIGKILL)
    os.kill(zygote, signal.SIGKILL)
    run.wait_for_event("zygote_replaced")
    run.let("go")
    assert run.wait() == 0, run.text
    assert run.result["restarts"] == 1


def test_a_handler_of_term_that_blocks_costs_nothing_at_a_restart(launch: Launch, recipe: Recipe) -> None:
    """torchrun asks the survivors to end first, and waits up to 30 s for those that do not."""
    source = (
        "import signal, time, toy\n"
        "def save(*_):\n    toy.mark('asked')\n    dist.barrier()\n    time.sleep(600)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "dist = toy.join()\n"
        "toy.mark('up')\n"
        "if toy.ATTEMPT == 1:\n"
        "    dist.barrier() if toy.RANK else toy.wait_for('never')\n"
    )
    run = launch(recipe(source, nproc=3, resume="self"))
    workers = run.wait_for_marks("up", ranks=3)
    os.kill(workers[2], signal.SIGKILL)
    assert run.wait() == 0, run.text
    (ended,) = run.happened("attempt_ended")
    started = run.happened("attempt_started")[1]
    assert started["time"] - ended["time"] < 2.0
    assert not list(run.run.path.glob("asked.*")), "nobody was asked: the state is not theirs to save any more"
