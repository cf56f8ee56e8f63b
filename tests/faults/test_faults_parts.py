"""A part of one rank breaks: its code raises, a loader process of it is killed, its disk can no longer be written.

The training ends as one that nobody disturbed (rows 1, 3 and 17 of the fault model).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import criteria
import pytest
from criteria import Reference
from launched import Launch, Launched
from tiny import tiny

from jobs.folders import complete
from jobs.manifest import verify
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

RAISES = """
import os
from torch.optim.optimizer import register_optimizer_step_pre_hook

class BatchError(Exception):
    pass

steps = []
def step(*_):
    # Of rank 1, in the middle of its third step, in the first two attempts.
    steps.append(1)
    attempt = os.environ.get("LAUNCH_ATTEMPT")
    if os.environ.get("RANK") == "1" and attempt in ("1", "2") and len(steps) == 3:
        raise BatchError("no such sample")
register_optimizer_step_pre_hook(step)
"""


def recipe_of(**sections: Any) -> dict[str, Any]:
    return tiny(
        **{
            "name": "parts",
            "train": {"until": "60 steps", "eval_every": "20 steps"},
            "checkpoint": {"every": "10 steps", "keep": 20},
            "resources": {"nproc_per_node": 1, "threads": 1},
            **sections,
        }
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """On two nodes."""
    return criteria.undisturbed(tmp_path_factory.mktemp("reference"), recipe_of(), nodes=2)


def start(launch: Launch, folder: Path, *, hooks: str = "", step_s: float = 0.0, **sections: Any) -> Launched:
    path = folder / "parts.yaml"
    path.write_text(json.dumps(recipe_of(**sections)))
    env = {**criteria.install(folder), "TEST_STEP_S": str(step_s)}
    if hooks:
        with (folder / "sitecustomize.py").open("a") as file:
            file.write(f'\nif re.search(r"launcher[./]agent", " ".join(sys.orig_argv)):\n    exec({hooks!r}, {{}})\n')
    return launch(path, "--nodes", "2", env=env)


def ends_as_if_nothing_had_happened(run: Launched, reference: Reference) -> None:
    """BIT, ONCE, CODE; CLEAN is asked of every test."""
    assert run.wait() == 0, run.text
    criteria.assert_bit(run.run, reference)
    criteria.assert_once(run.run, reference)
    assert criteria.made_twice(run.run) == []


def test_a_rank_that_raises_is_the_cause_and_costs_no_step(
    launch: Launch, tmp_path: Path, reference: Reference
) -> None:
    """Row 1: twice, at another step each time; the other rank, which has lost it, is no cause."""
    run = start(launch, tmp_path, hooks=RAISES)
    ends_as_if_nothing_had_happened(run, reference)
    ended = run.happened("attempt_ended")
    assert [(event["rank"], event["cause"]) for event in ended] == [(1, "worker_error")] * 2, run.text
    assert all("BatchError: no such sample" in event["message"] for event in ended)
    begins = [event["step"] for event in run.happened("training_started")]
    assert begins == [0, *(event["step"] for event in run.happened("rescued"))]
    assert run.text.count("rank 1 on node 1") >= 2


def loaders(run: Launched, rank: int) -> list[int]:
    """The loader processes of a rank."""
    (worker,) = run.happened("worker_started", attempt=1, rank=rank)
    return [int(pid) for pid in Path(f"/proc/{worker['pid']}/task/{worker['pid']}/children").read_text().split()]


def test_a_loader_process_is_killed_and_costs_no_step(launch: Launch, tmp_path: Path, reference: Reference) -> None:
    """Row 3."""
    data = {**recipe_of()["data"], "loader_workers": 2}
    run = start(launch, tmp_path, step_s=0.05, data=data)
    run.until(lambda: run.run.metrics.exists() and len(read_metrics(run.run.metrics)) > 10)
    pids = loaders(run, 1)
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    ends_as_if_nothing_had_happened(run, reference)
    (ended,) = run.happened("attempt_ended")
    assert (ended["rank"], ended["cause"]) == (1, "worker_error"), run.text
    assert "DataLoader worker (pid" in ended["message"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_where_checkpoints_are_read_only_for_a_while_the_training_goes_on_and_saves_again(
    launch: Launch, tmp_path: Path, reference: Reference
) -> None:
    """Row 17: loud, and the recipe has allowed it."""
    checkpoint = {**recipe_of()["checkpoint"], "max_failed_saves": 5}
    run = start(launch, tmp_path, step_s=0.05, checkpoint=checkpoint)
    run.wait_for_event("checkpoint_saved", step=10)
    folder = str(run.run.checkpoints)
    mounted = subprocess.run(["mount", "--bind", folder, folder], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system that becomes read-only: {mounted.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        failed = run.wait_for_event("save_failed")
        subprocess.run(["mount", "-o", "remount,bind,rw", folder], check=True)
        ends_as_if_nothing_had_happened(run, reference)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert "Read-only file system" in failed["reason"]
    assert f"THE SAVE OF STEP {failed['step']} HAS FAILED, 1 in a row" in run.text
    names = complete(run.run.checkpoints)
    assert f"step-{failed['step']}" not in names
    assert {"step-10", "step-60"} <= set(names)
    for name in names:
        verify(run.run.checkpoints / name)
    assert run.result["attempts"] == 1
