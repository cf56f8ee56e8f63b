"""How a worker ends is how `launch` ends, and what is said about it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from launched import Launch, Recipe

pytestmark = pytest.mark.process

ENDS = {
    "zero": ("pass", 0),
    "one": ("raise ValueError('boom-1')", 1),
    "seven": ("raise SystemExit(7)", 7),
    "hard": ("import os; os._exit(3)", 3),
    "kill": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
    "segv": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139),
    "abort": ("import os; os.abort()", 134),
}


def test_the_exit_code_of_the_first_failing_worker_is_that_of_launch_and_of_the_result(
    launch: Launch, recipe: Recipe
) -> None:
    """F013; rank 0 waits, as for a peer in a collective, and is not what is reported."""
    waiting = "import toy\nif toy.RANK == 0: toy.wait_for('never')\n"
    started = {
        name: launch(recipe(("" if code == 0 else waiting) + source, name=name))
        for name, (source, code) in ENDS.items()
    }
    for name, (_, code) in ENDS.items():
        run = started[name]
        assert run.wait() == code, run.text
        result = run.result
        assert result["exit_code"] == code
        assert result["state"] == ("SUCCEEDED" if code == 0 else "FAILED")
        assert result["attempts"] == 1
        if code:
            assert (result["first_failure"]["rank"], result["first_failure"]["exit_code"]) == (1, code)
            assert "rank-1.log" in run.text
            assert "rank 1 on node 0" in run.text
    assert "ValueError: boom-1" in started["one"].text
    assert "one.py:3 in <module>" in started["one"].text
    assert "killed by SIGKILL" in started["kill"].text
    assert "killed by SIGSEGV" in started["segv"].text


def test_what_the_workers_need_and_cannot_be_imported_ends_the_run_by_its_name(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe("pass", preload=["nosuchmodule"]))
    assert run.wait() == 1, run.text
    assert "nosuchmodule cannot be imported: ModuleNotFoundError" in run.text
    assert (run.result["state"], run.result["cause"], run.result["attempts"]) == ("FAILED", "usage", 0)


def test_two_nodes_of_two_ranks_meet_and_know_who_they_are(launch: Launch, recipe: Recipe) -> None:
    """F034, F035, F075: the world is as large as was asked for; each rank has the environment of the plan."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LAUNCH_NODE", "LAUNCH_ATTEMPT")
    source = (
        "import json, os, threading, toy\n"
        f"seen = {{name: os.environ[name] for name in {names}}}\n"
        "dist = toy.join()\n"
        "seen['interface'] = os.environ['GLOO_SOCKET_IFNAME']\n"
        "seen['group'] = os.getpgid(0) == os.getpid()\n"
        "print(json.dumps(seen))\n"
        "dist.destroy_process_group()\n"
    )
    run = launch(recipe(source, nodes=2))
    assert run.wait() == 0, run.text
    for rank in range(4):
        seen = json.loads(run.log(rank, node=rank // 2))
        assert seen == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "GROUP_RANK": str(rank // 2),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "LAUNCH_NODE": str(rank // 2),
            "LAUNCH_ATTEMPT": "1",
            "interface": "lo",
            "group": True,
        }
    assert len(run.happened("node_joined")) == 2
    assert run.run.agents_log.read_text() == "", "agents have nothing to say when all is well"


@pytest.mark.parametrize("preload", ["true", "false"])
def test_arguments_reach_the_script_unchanged(launch: Launch, tmp_path: Path, preload: str) -> None:
    """F097: no shell on the way, so nothing is expanded, split or quoted."""
    argv = ["a b", "it's", '72" tall', '--x={"a":[1]}', "$HOME", "${HOME}", "*", "", "two\nlines", "größe", "-v", "--"]
    script = tmp_path / "say.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    run = launch(script, f"preload={preload}", "--nproc-per-node", "1", "--", *argv)
    assert run.wait() == 0, run.text
    assert json.loads(run.log(0)) == argv


class TestRestart:
    FAILS_TWICE = (
        "import toy\ndist = toy.join()\ntoy.mark('up')\n"
        "if toy.ATTEMPT < 3 and toy.RANK == 1: raise SystemExit(7)\n"
        "if toy.ATTEMPT < 3: toy.wait_for('never')\n"
        "dist.destroy_process_group()\n"
    )

    def test_fails_twice_with_a_budget_of_two_and_succeeds(self, launch: Launch, recipe: Recipe) -> None:
        """F065"""
        run = launch(recipe(self.FAILS_TWICE, nodes=2, nproc=1, resume="self", faults={"max_restarts": 2}))
        assert run.wait() == 0, run.text
        assert run.result["attempts"] == 3
        assert run.result["restarts"] == 2
        ports = {event["master_port"] for event in run.happened("attempt_started")}
        assert len(ports) == 3, "each attempt has a port of its own"
        assert [event["attempt"] for event in run.happened("attempt_started")] == [1, 2, 3]
        assert "restarting (restart 1 of 2)" in run.text
        assert run.log(1, node=1, attempt=2) == ""

    def test_an_exhausted_budget_ends_with_the_workers_code(self, launch: Launch, recipe: Recipe) -> None:
        """F065"""
        run = launch(recipe(self.FAILS_TWICE, resume="self", faults={"max_restarts": 1}))
        assert run.wait() == 7, run.text
        assert "policy  not retried: no restart is left. restarts 1/1" in run.text
        assert run.result["attempts"] == 2

    def test_a_killed_worker_restarts_all_of_them(self, launch: Launch, recipe: Recipe) -> None:
        source = "import toy\ndist = toy.join()\ntoy.mark('up')\ntoy.wait_for(f'go.{toy.ATTEMPT}')\n"
        run = launch(recipe(source, nodes=2, nproc=1, resume="self"))
        first = run.wait_for_marks("up", ranks=2)
        os.kill(first[1], signal.SIGKILL)
        second = run.wait_for_marks("up", ranks=2, attempt=2)
        assert not set(first) & set(second)
        run.let("go.2")
        assert run.wait() == 0, run.text
        (failure,) = run.happened("failure", attempt=1)
        assert (failure["rank"], failure["cause"], failure["exit_code"]) == (1, "signal", 137)

    def test_without_resume_a_killed_worker_is_the_end_and_the_screen_says_why(
        self, launch: Launch, recipe: Recipe
    ) -> None:
        run = launch(recipe("import toy\ntoy.mark('up')\ntoy.wait_for('never')\n"))
        os.kill(run.wait_for_marks("up", ranks=2)[1], signal.SIGKILL)
        assert run.wait() == 137, run.text
        assert run.result["attempts"] == 1
        assert "not retried: the script declares no `resume:`" in run.text

    def test_a_lost_peer_is_not_taken_for_the_first_failure(self, launch: Launch, recipe: Recipe) -> None:
        source = (
            "import time, torch, toy\ndist = toy.join()\n"
            "if toy.RANK == 2:\n    raise ValueError('boom-2')\n"
            "dist.all_reduce(torch.ones(1))\n"
        )
        run = launch(recipe(source, nodes=2))
        assert run.wait() == 1, run.text
        assert run.result["first_failure"]["rank"] == 2
        assert run.result["first_failure"]["message"] == "ValueError: boom-2"

    def test_what_cannot_run_as_written_is_not_tried_again(self, launch: Launch, recipe: Recipe) -> None:
        sources = {"imports": "import no_such_module", "reads": "x = = 1", "takes": "import sys; sys.exit(2)"}
        runs = [launch(recipe(source, name=name, resume="self", nproc=1)) for name, source in sources.items()]
        assert [run.wait() for run in runs] == [1, 1, 2]
        for run in runs:
            assert (run.result["cause"], run.result["attempts"]) == ("usage", 1)


def test_what_runs_once_runs_once(launch: Launch, recipe: Recipe) -> None:
    """F097: a phase that is not per rank (the preload) is run by one process per machine, not by each agent."""
    (recipe("pass").parent / "slow_import.py").write_text(
        "import os, pathlib\npathlib.Path(os.environ['COUNTED']).open('a').write('x')\n"
    )
    folder = recipe("import slow_import\n", nodes=2, preload=["slow_import"]).parent
    run = launch(folder / "script.yaml", env={"PYTHONPATH": str(folder), "COUNTED": str(folder / "counted")})
    assert run.wait() == 0, run.text
    assert (folder / "counted").read_text() == "x"


def test_arguments_may_be_longer_than_a_message_of_the_agent(launch: Launch, tmp_path: Path) -> None:
    """Linux takes 128 KiB per argument; a datagram to the zygote would not take three of them."""
    script = tmp_path / "long.py"
    script.write_text("import sys\nprint('lengths', [len(argument) for argument in sys.argv[1:]])\n")
    run = launch(script, "preload=true", "--", *["x" * 120_000] * 3)
    assert run.wait() == 0, run.text
    assert "lengths [120000, 120000, 120000]" in run.text
