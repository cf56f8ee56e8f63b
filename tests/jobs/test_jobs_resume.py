from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ranks import Start
from tiny import tiny

from jobs.folders import complete
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_a_run_trains_to_its_end(start: Start, tmp_path: Path) -> None:
    ranks = start(tmp_path / "run", tiny())
    assert ranks.wait() == [0, 0], ranks.log()
    assert ranks.log().splitlines()[-1] == f"weights_sha256 {ranks.weights}"
    assert steps_of(ranks.metrics) == list(range(1, 241))
    assert complete(ranks.run_dir / "checkpoints") == ["step-220", "step-240"]


@pytest.mark.parametrize("world", [2, 3])
def test_killed_and_resumed_ends_with_the_same_weights(start: Start, tmp_path: Path, world: int) -> None:
    recipe = tiny(data={"global_batch_size": 12}, train={"until": "15 epochs"})
    whole = start(tmp_path / "whole", recipe, ranks=world)
    assert set(whole.wait()) == {0}, whole.log()
    for attempt, step in ((1, 33), (2, 71)):
        broken = start(tmp_path / "broken", recipe, ranks=world, attempt=attempt)
        broken.until_step(step)
        broken.signal(signal.SIGKILL, world - 1)
        broken.signal(signal.SIGKILL)
        broken.wait()
    last = start(tmp_path / "broken", recipe, ranks=world, attempt=3)
    assert set(last.wait()) == {0}, last.log()
    assert "resumes from step-" in last.log()
    assert last.weights == whole.weights
    assert steps_of(last.metrics) == steps_of(whole.metrics)
    losses = [[record["train/loss"] for record in read_metrics(ranks.metrics)] for ranks in (whole, last)]
    assert losses[0] == losses[1]


def test_killed_inside_a_save_the_run_goes_on_from_the_one_before(start: Start, tmp_path: Path) -> None:
    recipe = tiny(train={"until": "60 steps"}, checkpoint={"every": "10 steps"})
    whole = start(tmp_path / "whole", recipe)
    assert whole.wait() == [0, 0], whole.log()
    checkpoints = tmp_path / "broken" / "checkpoints"
    for attempt, victim in ((1, "step-20"), (2, "step-40")):
        broken = start(tmp_path / "broken", recipe, attempt=attempt)
        broken.until(lambda name=f"{victim}.tmp-{attempt}": (checkpoints / name).exists())  # type: ignore[misc]
        broken.signal(signal.SIGKILL)
        broken.wait()
    last = start(tmp_path / "broken", recipe, attempt=3)
    assert last.wait() == [0, 0], last.log()
    assert last.weights == whole.weights
    assert not list(checkpoints.glob("*.tmp-*"))
