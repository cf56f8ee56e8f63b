"""Restart after restart after restart: not one may hang."""

from __future__ import annotations

import os
import random
import signal

import pytest
from launched import Launch, Recipe

pytestmark = pytest.mark.process

RESTARTS = int(os.environ.get("LAUNCH_TEST_RESTARTS", "20"))
"""`LAUNCH_TEST_RESTARTS=200 pytest tests/faults` is the whole of it."""
AGAIN_S = 20.0
"""A restart takes a fraction of a second; one that takes this long hangs."""
REDUCES = """
import torch, toy
dist = toy.join()
toy.mark("up")
while True:
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.timeout(60 + 10 * RESTARTS)
def test_workers_killed_in_the_middle_of_an_all_reduce_are_restarted_every_time(launch: Launch, recipe: Recipe) -> None:
    order = random.Random(0)
    run = launch(recipe(REDUCES, nodes=2, resume="self", faults={"max_restarts": 10**6}))
    for attempt in range(1, RESTARTS + 1):
        run.wait_for_marks("up", ranks=4, attempt=attempt, limit_s=AGAIN_S if attempt > 1 else 90.0)
        workers = run.happened("worker_started", attempt=attempt)
        os.kill(order.choice(workers)["pid"], signal.SIGKILL)
    run.wait_for_marks("up", ranks=4, attempt=RESTARTS + 1, limit_s=AGAIN_S)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143, run.text
    assert run.result["restarts"] == RESTARTS
    first_causes = [event["cause"] for event in run.happened("attempt_ended")]
    assert set(first_causes) == {"signal"}, "a lost peer was taken for the cause"
