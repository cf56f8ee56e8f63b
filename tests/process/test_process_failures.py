"""The last screen of a failed run: who was first, his last words, where; and `launch report`, which is the same."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import LAUNCH, Launch, Launched, Recipe
from memory_groups import make_memory_group

pytestmark = pytest.mark.process

DEATHS = {
    "raises": ("raise ValueError('boom-2')", 1, "ValueError: boom-2"),
    "kill": ("import signal; os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    "hard": ("os._exit(3)", 3, "exited with code 3"),
    "segv": ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    "text": ("sys.exit('no data in /x')", 1, "| no data in /x"),
}


def last_screen(run: Launched) -> str:
    """What is printed once the run is over."""
    return run.text[run.text.index(f"\n{run.run_id}  ") + 1 :]


def test_the_last_screen_names_who_was_first_and_quotes_what_he_said_last(launch: Launch, recipe: Recipe) -> None:
    """F001: four gloo ranks on two nodes, rank 2 dies in each of these ways, the others lose it in an all-reduce."""
    started = {}
    for name, (source, _, _) in DEATHS.items():
        text = (
            "import os, sys, torch, toy\ndist = toy.join()\n"
            f"def work():\n    print('last-words', file=sys.stderr)\n    {source}\n"
            "if toy.RANK == 2: work()\n"
            "dist.all_reduce(torch.ones(1))\ntoy.wait_for('never')\n"
        )
        started[name] = launch(recipe(text, name=name, nodes=2))
    for name, (_, code, said) in DEATHS.items():
        run = started[name]
        assert run.wait() == code, run.text
        screen = last_screen(run)
        assert len(screen.splitlines()) <= 14, "one block, not a page of ranks"
        first, *rest = screen.split("\n", 1)[1].splitlines()
        assert re.match(rf"first   rank 2 on node 1 \({os.uname().nodename}\), \d\d:\d\d:\d\d", first), screen
        assert any(line.strip() == said for line in rest), screen
        if name == "raises":
            assert first.endswith(f"   {name}.py:5 in work")
        else:
            assert "        | last-words" in rest
        if name == "segv":
            assert first.endswith("   segv.py:5 in work"), "a crash has a place too"
        (log,) = [line.strip() for line in rest if "rank-2.log:" in line]
        path, _, number = log.rpartition(":")
        lines = (run.run.path / path).read_text().splitlines()
        begins = "[rank2]: Traceback (most recent call last):" if name == "raises" else "last-words"
        assert lines[int(number) - 1] == begins
        assert "policy  not retried: the script declares no `resume:`" in screen
        assert f"launch logs {run.run_id[-4:]} --rank 2" in screen.splitlines()[-1]
        again = subprocess.run(
            [LAUNCH, "report", run.run_id], cwd=run.runs.parent, capture_output=True, text=True, check=True
        )
        assert again.stdout.startswith(screen), "the record alone says the same"
        assert "attempt" in again.stdout.removeprefix(screen)
        assert "total" in again.stdout.removeprefix(screen)


def test_the_same_error_at_the_same_place_is_not_tried_a_third_time(launch: Launch, recipe: Recipe) -> None:
    source = "import toy\ntoy.mark('up')\nif toy.RANK == 1: raise ValueError('again')\ntoy.wait_for('never')\n"
    run = launch(recipe(source, resume="self", faults={"max_restarts": 9}))
    assert run.wait() == 1, run.text
    assert (run.result["cause"], run.result["attempts"], run.result["restarts"]) == ("repeated", 2, 1)
    assert "FAILED: the same error at the same step, twice" in last_screen(run)
    assert "policy  not retried: the same error came at the same step, twice. restarts 1/9" in last_screen(run)


def test_with_something_saved_in_between_it_is_another_error(launch: Launch, recipe: Recipe) -> None:
    source = (
        "import os, pathlib, toy\nkept = pathlib.Path(os.environ['LAUNCH_CHECKPOINT_DIR'])\n"
        "kept.mkdir(exist_ok=True)\n(kept / f'step-{toy.ATTEMPT}.pt').write_text('x')\n"
        "if toy.ATTEMPT < 4: raise ValueError('again')\n"
    )
    run = launch(recipe(source, nproc=1, resume="self", faults={"max_restarts": 9}))
    assert run.wait() == 0, run.text
    assert run.result["attempts"] == 4


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A memory cgroup with a limit that one greedy worker reaches soon."""
    folder = make_memory_group(f"launch-test-{os.getpid()}", limit_bytes=1 << 30)
    yield folder
    deadline_s = time.monotonic() + 10.0
    while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    folder.rmdir()


@pytest.mark.needs("cgroup")
def test_a_kill_by_the_kernel_for_want_of_memory_is_named_and_not_retried(
    launch: Launch, recipe: Recipe, memory_limit: Path
) -> None:
    """F001, fault 24: the real OOM killer, in a real memory cgroup."""
    source = (
        "import sys, toy\ntoy.join()\nif toy.RANK == 0: toy.wait_for('never')\n"
        "print('taking more and more', file=sys.stderr)\ntaken = []\n"
        "while True: taken.append(b'x' * (32 << 20))\n"
    )
    inside = ("sh", "-c", f'echo $$ > {memory_limit}/cgroup.procs; exec "$@"', "sh")
    run = launch(recipe(source, nodes=2, nproc=1, resume="self"), prefix=inside)
    assert run.wait() == 137, run.text
    assert (run.result["cause"], run.result["attempts"]) == ("oom_killed", 1)
    screen = last_screen(run)
    assert "FAILED: killed by the kernel: out of host memory" in screen
    assert "first   rank 1 on node 1" in screen
    assert "limit of its cgroup 1.0 GiB" in screen
    assert "| taking more and more" in screen
    assert "then    1 rank: ended by the launcher" in screen, "not by the kernel, though it has killed one meanwhile"
    assert "policy  not retried: out of memory repeats. restarts 0/3" in screen


def test_a_node_that_leaves_later_than_the_first_is_no_failure(launch: Launch, recipe: Recipe) -> None:
    """F067: rank 0, whose process holds the store, is gone long before rank 1."""
    source = (
        "import os, time, toy\ndist = toy.join()\ntoy.mark('up')\n"
        "if toy.RANK == 1: toy.wait_for('go')\n"
        "dist.destroy_process_group()\n"
    )
    run = launch(recipe(source, nodes=2, nproc=1))
    run.wait_for_event("worker_ended", rank=0, exit_code=0)
    run.let("go")
    assert run.wait() == 0, run.text
    assert run.result["state"] == "SUCCEEDED"
    assert run.happened("worker_ended", rank=1, exit_code=0), "nobody has ended it"
    assert not re.search("error|warning|traceback|broken pipe", run.text, re.IGNORECASE), run.text
