"""The torchrun engine: what users see is the same as with the agent's own, for a torch that the agent does not know."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launch, Launched, Recipe

pytestmark = pytest.mark.process

ENV = {"LAUNCH_ENGINE": "torchrun"}
ProcessesOf = Callable[[str], list[int]]

TRAINS = (
    "import torch, toy\n"
    "from torch.nn.parallel import DistributedDataParallel as DDP\n"
    "torch.manual_seed(0)\n"
    "dist = toy.join()\n"
    "model = DDP(torch.nn.Linear(4, 1))\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for step in range(5):\n"
    "    torch.manual_seed(10 * step + toy.RANK)\n"
    "    optimizer.zero_grad()\n"
    "    model(torch.randn(8, 4)).square().mean().backward()\n"
    "    optimizer.step()\n"
    "print('weights', [value.hex() for value in model.module.weight.flatten().tolist()])\n"
    "dist.destroy_process_group()\n"
)


def _ended(run: Launched) -> list[tuple[int, int]]:
    return sorted((event["rank"], event["exit_code"]) for event in run.happened("worker_ended"))


def test_both_engines_end_with_the_same_result(launch: Launch, recipe: Recipe) -> None:
    path = recipe(TRAINS, nodes=2, nproc=1)
    theirs, ours = launch(path, env=ENV), launch(path)
    assert theirs.wait() == 0, theirs.text
    assert ours.wait() == 0, ours.text
    assert "weights" in ours.log(0)
    assert theirs.log(0) == ours.log(0)
    assert theirs.log(1, node=1) == ours.log(1, node=1)
    assert _ended(theirs) == _ended(ours) == [(0, 0), (1, 0)]
    assert len(theirs.happened("torchrun_started")) == 2
    assert not ours.happened("torchrun_started")
    assert "launch | LAUNCH_ENGINE=torchrun: the agent supervises torchrun, without fast restart\n" in theirs.text
    assert "torchrun" not in ours.text
    assert "torchrun" in theirs.run.plan.read_text()


def test_the_first_failing_rank_is_named_and_its_exit_code_stays(launch: Launch, recipe: Recipe) -> None:
    """torchrun makes 1 of every exit code; also those that leave no error file are told apart."""
    sources = {
        "exits": ("raise SystemExit(3)", 3),
        "leaves": ("import os; os._exit(4)", 4),
        "raises": ("raise ValueError('boom-1')", 1),
        "dies": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139),
    }
    waits = "import toy\nif toy.RANK == 0: toy.wait_for('never')\n"
    runs = {
        name: (launch(recipe(waits + source, name=name), env=ENV), code) for name, (source, code) in sources.items()
    }
    for run, code in runs.values():
        assert run.wait() == code, run.text
        first = run.result["first_failure"]
        assert (run.result["state"], first["rank"], first["exit_code"]) == ("FAILED", 1, code)
    raised = runs["raises"][0]
    assert raised.result["first_failure"]["message"] == "ValueError: boom-1"
    assert "raises.py:3 in <module>" in raised.text
    assert "SIGSEGV" in runs["dies"][0].text


def test_a_killed_worker_is_reported_as_such_and_restarted_where_the_script_can_resume(
    launch: Launch, recipe: Recipe, processes_of: ProcessesOf
) -> None:
    source = "import toy\ndist = toy.join()\ntoy.mark('up')\ntoy.wait_for(f'go.{toy.ATTEMPT}')\n"
    run = launch(recipe(source, nodes=2, nproc=1, resume="self"), env=ENV)
    os.kill(run.wait_for_marks("up", ranks=2)[1], signal.SIGKILL)
    run.wait_for_marks("up", ranks=2, attempt=2)
    (failure,) = run.happened("failure", attempt=1)
    assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, "signal", 137)
    torchruns = [event["pid"] for event in run.happened("torchrun_started", attempt=2)]
    os.kill(torchruns[0], signal.SIGKILL)  # its relays and workers end with it
    run.wait_for_marks("up", ranks=2, attempt=3)
    run.let("go.3")
    assert run.wait() == 0, run.text
    assert run.result["attempts"] == 3
    assert processes_of(run.run_id) == []


def test_a_stop_reaches_the_workers_and_their_75_is_that_of_the_run(launch: Launch, recipe: Recipe) -> None:
    source = (
        "import signal, toy\n"
        "signal.signal(signal.SIGTERM, lambda *_: (toy.mark('saved'), exit(75)))\n"
        "toy.mark('up')\ntoy.wait_for('never')\n"
    )
    run = launch(recipe(source, nodes=2, nproc=2), env=ENV)
    run.wait_for_marks("up", ranks=4)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    assert sorted(path.name for path in run.run.path.glob("saved.*")) == [f"saved.{rank}.1" for rank in range(4)]


def test_nothing_is_left_when_an_agent_is_killed(launch: Launch, recipe: Recipe, processes_of: ProcessesOf) -> None:
    run = launch(recipe("import toy\ntoy.mark('up')\ntoy.wait_for('never')\n", nproc=1), env=ENV)
    (worker,) = run.wait_for_marks("up", ranks=1)
    os.kill(run.happened("agent_started")[0]["pid"], signal.SIGKILL)
    assert run.wait() == 1, run.text
    assert run.result["cause"] == "node_lost"
    assert worker not in processes_of(run.run_id)


def test_what_torchrun_says_when_it_cannot_start_is_shown(launch: Launch, recipe: Recipe) -> None:
    folder = recipe("pass").parent
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('a torch that is no torch')\n")
    run = launch(folder / "script.yaml", env={**ENV, "PYTHONPATH": str(folder)})
    assert run.wait() == 1, run.text
    assert "a torch that is no torch" in run.text
    assert run.result["first_failure"]["rank"] == 0


def test_a_zygote_that_was_stopped_is_woken_here_too(launch: Launch, recipe: Recipe) -> None:
    """The one that has started torchrun, and not whoever else has said that it is one: the relay of each rank."""
    run = launch(recipe("import toy\ntoy.mark('up')\ntoy.wait_for('go')\n", nproc=1, resume="self"), env=ENV)
    run.wait_for_marks("up", ranks=1)
    torchrun = run.happened("torchrun_started")[0]["pid"]
    zygote = int((Path("/proc") / str(torchrun) / "stat").read_text().rpartition(")")[2].split()[1])
    os.kill(zygote, signal.SIGSTOP)
    assert run.wait_for_event("zygote_woken")["pid"] == zygote
    run.let("go")
    assert run.wait() == 0, run.text
