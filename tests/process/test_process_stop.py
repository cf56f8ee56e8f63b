"""Asked to stop, a run stops: in time, with nothing left behind, and nothing restarts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest
from launched import Launch, Launched, Recipe

pytestmark = pytest.mark.process

GRACE_S = 2.0
FAULTS = {"grace": "2s"}
WAITS = "import toy\ntoy.mark('up')\ntoy.wait_for('never')\n"
SAVES = (
    "import signal, toy\nsignal.signal(signal.SIGTERM, lambda *_: (toy.mark('saved'), exit(75)))\n"
    "toy.mark('up')\ntoy.wait_for('never')\n"
)
IGNORES = "import signal, toy\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntoy.mark('up')\ntoy.wait_for('never')\n"
LOADS = """
import time, torch, toy
from torch.utils.data import DataLoader, Dataset

class Endless(Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.zeros(1)

for number, batch in enumerate(DataLoader(Endless(), batch_size=2, num_workers=2)):
    if number == 2:
        toy.mark("up")
"""

ProcessesOf = Callable[[str], list[int]]
Command = Callable[..., CompletedProcess[str]]


def test_nothing_is_left_behind_whatever_ends_launch(launch: Launch, recipe: Recipe, processes_of: ProcessesOf) -> None:
    """F011: 2 ranks with 2 loader processes each."""
    path = recipe(LOADS, faults=FAULTS)
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
    runs = {signum: launch(path) for signum in signals}
    for run in runs.values():
        run.wait_for_marks("up", ranks=2)
        assert len(processes_of(run.run_id)) >= 1 + 2 + 2 + 4  # supervisor, agent, zygote, workers, loaders
    asked_s = time.monotonic()
    for signum, run in runs.items():
        run.signal(signum)
    for signum, run in runs.items():
        limit_s = 10.0 if signum == signal.SIGKILL else GRACE_S + 5.0
        code = run.wait()
        while left := processes_of(run.run_id):
            assert time.monotonic() < asked_s + limit_s, f"{left} outlive {signum.name}:\n{run.text}"
        assert code == (-signal.SIGKILL if signum == signal.SIGKILL else 128 + signum), run.text
        assert run.result["exit_code"] == (143 if signum == signal.SIGKILL else 128 + signum)
        assert run.result["state"] == "CANCELLED"
    assert runs[signal.SIGKILL].result["cause"] == "launcher_lost"


def test_a_script_that_saves_on_term_ends_with_75_on_every_rank(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(SAVES, nodes=2))
    run.wait_for_marks("up", ranks=4)
    run.signal(signal.SIGINT)
    assert run.wait() == 75, run.text
    run_dir = run.run.path
    assert sorted(path.name for path in run_dir.glob("saved.*")) == [f"saved.{rank}.1" for rank in range(4)]
    assert (run_dir / "stop").exists()
    assert run.result["stop_reason"] == "Ctrl-C"


def test_a_script_that_ignores_term_is_killed_at_the_end_of_the_grace_time(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(IGNORES, faults=FAULTS))
    run.wait_for_marks("up", ranks=2)
    asked_s = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    assert GRACE_S <= time.monotonic() - asked_s < GRACE_S + 5.0
    assert "the grace time is over" in run.text


def test_the_second_ctrl_c_is_immediate(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe(IGNORES, nodes=2, nproc=1))
    run.wait_for_marks("up", ranks=2)
    run.signal(signal.SIGINT)
    run.wait_for_event("stop_requested")
    asked_s = time.monotonic()
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.text
    assert time.monotonic() - asked_s < 5.0
    assert "second request" in run.text


def test_a_failure_while_stopping_restarts_nothing_and_keeps_its_code(launch: Launch, recipe: Recipe) -> None:
    source = WAITS.replace("toy.mark", "import signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(7))\ntoy.mark")
    run = launch(recipe(source, resume="self"))
    run.wait_for_marks("up", ranks=2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 7, run.text
    assert run.result["state"] == "CANCELLED"
    assert run.result["attempts"] == 1


def test_a_stop_between_two_attempts_restarts_nothing(launch: Launch, recipe: Recipe) -> None:
    """Ctrl-C by someone who watches a run that fails again and again."""
    run = launch(recipe("raise SystemExit(7)", resume="self", faults={"max_restarts": 10**6}))
    run.wait_for_event("restarting", attempt=3)
    run.signal(signal.SIGINT)
    assert run.wait() in (130, 7), run.text
    assert run.result["state"] == "CANCELLED"
    last = run.events[-1]
    assert last["event"] == "supervisor_ended"
    stop = run.happened("stop_requested")[0]
    assert not [e for e in run.happened("attempt_started") if e["time"] > stop["time"]]


def test_a_detached_run_is_cancelled_from_another_directory(launch: Launch, recipe: Recipe, command: Command) -> None:
    run = launch(recipe(SAVES), "--detach")
    assert run.wait() == 0, run.text
    run.wait_for_marks("up", ranks=2)
    done = command("cancel", run.run_id)
    assert done.returncode == 0, done.stderr
    assert "CANCELLED" in done.stdout
    assert run.result["exit_code"] == 75
    assert run.happened("cancel_requested")
    again = command("cancel", run.run_id)
    assert "has ended already" in again.stdout


def test_a_detached_run_outlives_its_launcher_and_its_terminal(launch: Launch, recipe: Recipe) -> None:
    run = launch(recipe("import toy\ntoy.mark('up')\ntoy.wait_for('go')\n"), "--detach", prefix=("setsid", "--wait"))
    assert run.wait() == 0
    run.wait_for_marks("up", ranks=2)
    (supervisor,) = run.happened("supervisor_started")
    assert os.getsid(supervisor["pid"]) == supervisor["pid"]
    run.let("go")
    run.until(run.run.result.exists)
    assert run.result["state"] == "SUCCEEDED"
    run.until(lambda: run.happened("supervisor_ended"))


MOMENTS = ("created", "submitted", "supervisor_started", "agent_started", "node_joined", "worker_started")


def test_a_stop_at_any_moment_of_the_start_is_not_lost(
    launch: Launch, recipe: Recipe, processes_of: ProcessesOf
) -> None:
    path = recipe(WAITS, nodes=2, nproc=1)

    def stop_at(moment: str, run: Launched) -> int:
        run.wait_for_event(moment)
        run.signal(signal.SIGTERM)
        return run.wait(limit_s=30.0)

    runs = {moment: launch(path) for moment in MOMENTS}
    with ThreadPoolExecutor(len(MOMENTS)) as pool:
        codes = dict(zip(MOMENTS, pool.map(stop_at, MOMENTS, runs.values()), strict=True))
    assert codes == dict.fromkeys(MOMENTS, 143)
    for run in runs.values():
        assert run.result["state"] == "CANCELLED"
        assert processes_of(run.run_id) == []
