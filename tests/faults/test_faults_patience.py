"""What takes longer than the limits of the layers below: a save that is slow, an agent that is silent."""

from __future__ import annotations

import os
import signal
import time

import pytest
from launched import Launch, Recipe

from launcher.agent.members import SILENCE_S

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

SAVE_S = 45.0
SAVES_SLOWLY = f"""
import signal, sys, time, toy
def save(*_):
    time.sleep({SAVE_S})
    toy.mark("saved")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
toy.mark("up")
toy.wait_for("never")
"""
WAITS = "import toy\ntoy.mark('up')\ntoy.wait_for(f'go{toy.ATTEMPT}')\n"


@pytest.mark.long
@pytest.mark.parametrize(("grace", "code"), [("60s", 75), ("5s", 143)])
def test_the_grace_of_the_recipe_counts_and_not_the_30_s_of_torch(
    launch: Launch, recipe: Recipe, grace: str, code: int
) -> None:
    """F016: with 60 s a save of 45 s comes to its end; with 5 s it is cut off after so long (and a moment).

    In shorter times, on two nodes: test_faults_stops.py.
    """
    run = launch(recipe(SAVES_SLOWLY, nproc=1, faults={"grace": grace}))
    run.wait_for_marks("up", ranks=1)
    asked_s = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait() == code, run.text
    took_s = time.monotonic() - asked_s
    assert (run.run.path / "saved.0.1").exists() == (code == 75)
    assert SAVE_S <= took_s < SAVE_S + 5 if code == 75 else 5 <= took_s < 10, run.text


def test_an_agent_that_falls_silent_is_lost_and_one_that_dies_then_comes_back(launch: Launch, recipe: Recipe) -> None:
    """F064 F094: SIGSTOP, then SIGKILL: the others do not wait for it for ever, and the node is named."""
    run = launch(recipe(WAITS, nodes=2, nproc=1, resume="self"))
    run.wait_for_marks("up", ranks=2)
    (agent,) = run.happened("agent_started", node=1)
    os.kill(agent["pid"], signal.SIGSTOP)
    lost = run.wait_for_event("node_lost", node=1)
    assert f"nothing heard for {SILENCE_S:g} s" in lost["reason"]
    os.kill(agent["pid"], signal.SIGKILL)
    run.wait_for_marks("up", ranks=2, attempt=2)
    run.let("go2")
    assert run.wait() == 0, run.text
    (ended,) = run.happened("attempt_ended")
    assert (ended["cause"], ended["node"]) == ("node_lost", 1)
    assert len(run.happened("agent_started", node=1)) == 2
