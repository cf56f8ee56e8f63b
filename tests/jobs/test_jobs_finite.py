"""Losses and gradients that are not finite, on one of three ranks: what becomes of the steps, and of their record."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks, Start
from tiny import tiny

from jobs.folders import complete, progress_of
from jobs.sampler import Sampler
from launcher.runs.events import read_events
from launcher.runs.metrics import read_metrics

pytestmark = pytest.mark.process

SAMPLES, BATCH, RANKS, SEED = 90, 6, 3, 0
PER_EPOCH, STEPS = 15, 30

SETTING = f"""
import json, os, signal, torch
import jobs.trainer
from jobs.data.base import Data, TensorSamples
from jobs.folders import Progress
from jobs.registry import dataset, model

NAN, TRAP = (set(json.loads(os.environ.get(name, "[]"))) for name in ("NAN", "TRAP"))
LEAVE_OUT = set(json.loads(os.environ.get("LEAVE_OUT", "[]")))
MARK = 1234.5

class Source:
    def prepare(self): ...
    def load(self):
        inputs = torch.randn({SAMPLES}, 20, generator=torch.Generator().manual_seed(0))
        targets = (inputs[:, 0] > 0).long()
        for index in NAN: inputs[index, 3] = float("nan")
        for index in TRAP: inputs[index, 0] = MARK
        return Data(TensorSamples(inputs, targets))

@dataset("spoiled")
def spoiled(): return Source()

class Trap(torch.autograd.Function):
    # A finite loss whose gradient is not.
    @staticmethod
    def forward(ctx, hidden, marked):
        ctx.marked = marked
        return hidden.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf") if ctx.marked else grad, None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(20, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
    def forward(self, inputs):
        marked = bool((inputs[:, 0] == MARK).any())
        return self.last(torch.relu(Trap.apply(self.norm(self.first(inputs)), marked)))

@model("normed")
def normed(): return Net()

inner = jobs.trainer.Trainer._step

def step(trainer):
    number = trainer.progress.step + 1
    if number == int(os.environ.get("KILL_AT", "0")):
        trainer._parts.report.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if number not in LEAVE_OUT:
        stop = inner(trainer)
        with open(os.environ["LAUNCH_RUN_DIR"] + "/buffers-" + os.environ["RANK"], "a") as file:
            file.write(repr([buffer.tolist() for buffer in trainer._parts.net.buffers()]) + "\\n")
        return stop
    share = trainer._parts.sampler.share(trainer.progress.samples_seen)
    list(trainer._parts.loader.take(len(share.micro_batches)))
    trainer.progress = Progress(step=number, samples_seen=trainer.progress.samples_seen + share.global_count)
    trainer._saved = False
    return False

jobs.trainer.Trainer._step = step
"""

Run = Callable[..., Ranks]


def spoiled(on_nan: str, *, every: str = "5 steps", **faults: Any) -> dict[str, Any]:
    recipe: dict[str, Any] = tiny(checkpoint={"every": every, "keep": 10}, faults={"on_nan": on_nan, **faults})
    recipe["model"] = {"name": "normed"}
    recipe["data"] = {"name": "spoiled", "global_batch_size": BATCH}
    recipe["train"] = {"until": f"{STEPS} steps", "optimizer": {"name": "adamw", "lr": 0.01}, "seed": SEED}
    return recipe


def sampler(rank: int) -> Sampler:
    return Sampler(num_samples=SAMPLES, global_batch_size=BATCH, seed=SEED, rank=rank, world_size=RANKS)


def sample(step: int, rank: int) -> int:
    """The first sample of a rank in a step."""
    return int(sampler(rank).share((step - 1) * BATCH).micro_batches[0][0])


def steps_with(samples: Collection[int]) -> list[int]:
    """The steps of the whole training that see one of these."""
    return [n for n in range(1, STEPS + 1) if set(sampler(0).batch((n - 1) * BATCH).tolist()) & set(samples)]


@pytest.fixture
def run(start: Start, tmp_path: Path) -> Run:
    """run(folder, recipe, nan=[samples], trap=[samples], leave_out=[steps], kill_at=step, attempt=1) -> Ranks."""
    (tmp_path / "setting.py").write_text(SETTING)

    def start_run(
        folder: str,
        recipe: dict[str, Any],
        *,
        nan: Collection[int] = (),
        trap: Collection[int] = (),
        leave_out: Collection[int] = (),
        kill_at: int = 0,
        attempt: int = 1,
        memory: Path | None = None,
    ) -> Ranks:
        lists = {"NAN": nan, "TRAP": trap, "LEAVE_OUT": leave_out}
        env = {**{name: json.dumps(list(each)) for name, each in lists.items()}, "KILL_AT": str(kill_at)}
        if memory is not None:
            env["LAUNCH_MEMORY_DIR"] = str(memory)
        return start(
            tmp_path / folder, recipe, ranks=RANKS, attempt=attempt, env=env, load=[str(tmp_path / "setting.py")]
        )

    return start_run


def last_lines(ranks: Ranks) -> set[str]:
    return {ranks.log(rank).splitlines()[-1] for rank in range(RANKS)}


def events(ranks: Ranks, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(ranks.run_dir) if event["event"] == name]


def newest_record(ranks: Ranks) -> tuple[tuple[int, int], ...]:
    folder = ranks.run_dir / "checkpoints"
    return progress_of(folder / complete(folder)[-1]).left_out.ranges


def test_a_skipped_batch_leaves_no_trace_in_the_weights(run: Run) -> None:
    """A NaN that one rank alone has seen, and a gradient that is Inf under a finite loss."""
    nan, trap = [sample(4, rank=0)], [sample(9, rank=1)]
    bad = steps_with([*nan, *trap])
    assert len(bad) == 4, "one of each per epoch"
    without = run("without", spoiled("stop"), leave_out=bad)
    assert without.wait() == [0] * RANKS, without.log()
    skipping = run("skipping", spoiled("skip"), nan=nan, trap=trap)
    assert skipping.wait() == [0] * RANKS, skipping.log()

    assert skipping.weights == without.weights
    assert [event["step"] for event in events(skipping, "step_skipped")] == bad
    reasons = {event["step"]: event["reason"] for event in events(skipping, "step_skipped")}
    assert reasons[4] == "loss is nan on rank 0 alone"
    assert reasons[9].startswith("the gradient of first.weight is ")
    metrics = read_metrics(skipping.metrics)
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert [record["samples_seen"] for record in metrics] == [BATCH * n for n in range(1, STEPS + 1)]
    assert [record["step"] for record in metrics if record.get("skipped")] == bad
    assert [record["step"] for record in metrics if "train/loss" not in record] == bad
    losses = {record["step"]: record.get("train/loss") for record in read_metrics(without.metrics)}
    assert all(record["train/loss"] == losses[record["step"]] for record in metrics if "train/loss" in record)
    assert skipping.event("summary")["steps_left_out"] == 4
    assert newest_record(skipping) == tuple((n, n) for n in bad)


def test_a_resumed_run_skips_what_it_would_have_skipped(run: Run) -> None:
    nan = [sample(7, rank=2)]
    bad = steps_with(nan)
    whole = run("whole", spoiled("skip"), nan=nan)
    assert whole.wait() == [0] * RANKS, whole.log()
    for kill_at in (8, 12):  # after the bad step and before it is saved; after that
        folder = f"killed-{kill_at}"
        killed = run(folder, spoiled("skip"), nan=nan, kill_at=kill_at)
        assert 0 not in killed.wait()
        resumed = run(folder, spoiled("skip"), nan=nan, attempt=2)
        assert resumed.wait() == [0] * RANKS, resumed.log()
        assert resumed.weights == whole.weights
        assert newest_record(resumed) == newest_record(whole) == tuple((n, n) for n in bad)


def test_the_statistics_of_a_batch_norm_are_those_of_rank_0_on_every_rank_after_every_step(run: Run) -> None:
    """Each rank computes its own from its own samples; evaluations, checkpoints and survivors need one set of them."""
    whole = run("whole", spoiled("stop"))
    assert whole.wait() == [0] * RANKS, whole.log()
    steps = [(whole.run_dir / f"buffers-{rank}").read_text().splitlines() for rank in range(RANKS)]
    assert len(set(steps[0])) == len(steps[0]) == STEPS
    assert steps[1] == steps[0]
    assert steps[2] == steps[0]
    killed = run("killed", spoiled("stop"), kill_at=8)
    assert 0 not in killed.wait()
    resumed = run("killed", spoiled("stop"), attempt=2)
    assert resumed.wait() == [0] * RANKS, resumed.log()
    assert resumed.weights == whole.weights


def test_too_many_skips_in_a_row_end_all_ranks(run: Run) -> None:
    nan = [sample(step, rank=1) for step in (6, 7, 8)]
    ranks = run("run", spoiled("skip", max_skips=2), nan=nan)
    assert ranks.wait() == [1] * RANKS
    assert len(last_lines(ranks)) == 1
    line = last_lines(ranks).pop()
    assert line.startswith(
        "FloatingPointError: loss is nan on rank 1 alone at step 8 (samples_seen 48), after 2 that were skipped in a "
        "row (faults.max_skips)"
    )


def test_a_gradient_that_is_not_finite_ends_all_ranks_before_the_weights_change(run: Run) -> None:
    ranks = run("run", spoiled("stop", every="1 steps"), trap=[sample(4, rank=2)])
    assert ranks.wait() == [1] * RANKS
    assert len(last_lines(ranks)) == 1
    assert "the gradient of first.weight is " in (line := last_lines(ranks).pop())
    assert " at step 4 (samples_seen 24); " in line
    assert complete(ranks.run_dir / "checkpoints")[-1] == "step-3"


def rolled_back(bad: Collection[int], every: int) -> list[tuple[int, int]]:
    """(step, checkpoint that it goes back to), where a checkpoint is written every so many steps."""
    return [(step, (step - 1) // every * every) for step in bad]


def test_a_rollback_goes_on_from_the_checkpoint_without_the_batches_since(run: Run) -> None:
    nan = [sample(8, rank=1)]
    back = rolled_back(steps_with(nan), every=5)
    assert len(back) == 2
    gone = [step for last, kept in back for step in range(kept + 1, last + 1)]
    without = run("without", spoiled("stop"), leave_out=gone)
    assert without.wait() == [0] * RANKS, without.log()
    for kill_at in (0, 9):  # never; between the rollback and the next save
        folder = f"killed-{kill_at}"
        ranks = run(folder, spoiled("rollback"), nan=nan, kill_at=kill_at)
        codes = ranks.wait()
        if kill_at:
            assert 0 not in codes
            ranks = run(folder, spoiled("rollback"), nan=nan, attempt=2)
            codes = ranks.wait()
        assert codes == [0] * RANKS, ranks.log()
        assert ranks.weights == without.weights
        assert newest_record(ranks) == tuple((kept + 1, last) for last, kept in back)
        seen = {(event["step"], event["to_step"]) for event in events(ranks, "rolled_back")}
        assert seen == set(back)
        metrics = read_metrics(ranks.metrics)
        assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
        assert [record["step"] for record in metrics if record.get("skipped")] == gone
    assert "rolled back to step-5; the batches of steps 6 to 8 are left out" in (
        (ranks.run_dir / "attempt-1-rank-0.log").read_text()
    )


def test_a_rollback_goes_back_to_a_snapshot_in_memory_where_that_is_newer(run: Run, tmp_path: Path) -> None:
    nan = [sample(8, rank=1)]
    back = rolled_back(steps_with(nan), every=2)
    gone = [step for last, kept in back for step in range(kept + 1, last + 1)]
    recipe = spoiled("rollback", every="10 steps")
    recipe["checkpoint"]["memory_every"] = "2 steps"
    (tmp_path / "memory").mkdir()
    without = run("without", spoiled("stop"), leave_out=gone)
    ranks = run("run", recipe, nan=nan, memory=tmp_path / "memory")
    assert without.wait() == [0] * RANKS, without.log()
    assert ranks.wait() == [0] * RANKS, ranks.log()
    assert {(event["step"], event["to_step"]) for event in events(ranks, "rolled_back")} == set(back)
    assert ranks.weights == without.weights


def test_a_rollback_needs_a_checkpoint_and_ends_somewhere(run: Run) -> None:
    early = run("early", spoiled("rollback"), nan=[sample(3, rank=1)])
    assert early.wait() == [1] * RANKS
    assert "at step 3 (samples_seen 18); there is no checkpoint to roll back to yet" in last_lines(early).pop()
    nan = [sample(step, rank=0) for step in (7, 8, 9)]
    often = run("often", spoiled("rollback", max_skips=2), nan=nan)
    assert often.wait() == [1] * RANKS
    assert len(last_lines(often)) == 1
    assert "at step 9 (samples_seen 54), after 2 rollbacks without a new checkpoint" in last_lines(often).pop()
    assert [event["to_step"] for event in events(often, "rolled_back")] == [5, 5]
