"""Snapshots in memory: where no rank survives, a restart goes on from the newest one, and not from zero."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from criteria import recorded
from kills import SITECUSTOMIZE, VARIABLE, Kill, environment, has_happened
from launched import Launch, Launched
from tiny import tiny

pytestmark = pytest.mark.process

STEPS, EVERY = 40, 5
KILLS = (Kill(14, "optimizer", 0), Kill(29, "forward", 0))
RECIPE = tiny(
    train={"until": f"{STEPS} steps", "eval_every": None},
    checkpoint={"every": None, "memory_every": f"{EVERY} steps"},
    resources={"nodes": 1, "nproc_per_node": 1, "threads": 1},
)


def run(launch: Launch, folder: Path, name: str, env: dict[str, str]) -> Launched:
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / f"{name}.yaml").write_text(json.dumps({**RECIPE, "name": name}))
    launched = launch(folder / f"{name}.yaml", env={"PYTHONPATH": str(folder), **env})
    assert launched.wait() == 0, launched.text
    return launched


def test_a_single_worker_that_is_killed_goes_on_from_its_newest_snapshot(launch: Launch, tmp_path: Path) -> None:
    """Twice; each step is in the record once, as if nothing had happened, and nothing is left in memory."""
    undisturbed = run(launch, tmp_path, "quiet", {VARIABLE: "[]"})
    launched = run(launch, tmp_path, "snapped", environment(KILLS))
    assert all(has_happened(launched.run.path, attempt) for attempt in (1, 2)), launched.text
    started = launched.happened("training_started")
    assert [event["attempt"] for event in started] == [1, 2, 3]
    for event, kill in zip(started[1:], KILLS, strict=True):
        # the newest but one where the newest was still being written
        assert event["step"] in (kill.step // EVERY * EVERY, kill.step // EVERY * EVERY - EVERY), launched.text
        assert event["memory"] == {"node": 0, "rank": None}
        assert f"resumes from step-{event['step']}, a snapshot in the memory of node 0" in launched.text
    assert recorded(launched.run) == recorded(undisturbed.run)
    assert launched.result["weights_sha256"] == undisturbed.result["weights_sha256"]
    summary = undisturbed.happened("summary")[0]
    assert summary["snapshots"]["count"] == STEPS // EVERY - 1  # the last step is saved to the disk
    assert [event["step"] for event in undisturbed.happened("memory_saved")] == list(range(EVERY, STEPS, EVERY))
    assert not list(Path("/dev/shm").glob(f"launch-{launched.run_id[-4:]}-*"))
