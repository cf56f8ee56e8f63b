"""What is said of an attempt at its beginning and at its end, for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jobs.checkpoint import Checkpoints
from jobs.choice import Choice
from jobs.job import Job
from jobs.parts import Parts
from jobs.trainer import Trainer
from jobs.world import World
from launcher.runs.events import read_lines
from launcher.runs.rundir import RunDir
from launcher.wording import count


def say_start(job: Job, parts: Parts, trainer: Trainer, choice: Choice, *, changes: Sequence[str]) -> None:
    """Where the training starts and why there, for people and for programs."""
    step, calendar, report = trainer.progress.step, parts.calendar, parts.report
    init_from = job.recipe.checkpoint.init_from
    report.event(
        "training_started",
        step=step,
        resumed_from=choice.name,
        memory=choice.memory and {"node": choice.memory.node, "rank": choice.memory.kept_by},
        rejected=[dataclasses.asdict(other) for other in choice.rejected],
        init_from=init_from if choice.name is None else None,
        total_steps=calendar.total_steps,
        steps_per_epoch=calendar.steps_per_epoch,
        world_size=parts.world.size,
        accumulate=parts.sampler.accumulate,
    )
    if choice.name or choice.rejected:
        report.say(choice.sentence())
    if init_from and choice.name:
        report.say(f"checkpoint.init_from ({init_from}) is not read: the run goes on from a checkpoint of its own")
    for change in filter(None, changes):
        report.say(change)
    if trainer.finished and choice.memory is None:
        report.say(f"already complete: {step}/{calendar.total_steps} steps in {choice.name}")
        return
    start = "resuming" if choice.name else f"starting with the weights of {init_from}" if init_from else "starting"
    if job.data.pin_memory is True and parts.device.type == "cpu":
        report.say("data.pin_memory: true has no effect without a GPU")
    for remark in filter(None, (parts.precision.remark(), *parts.shared.remarks)):
        report.say(remark)
    ranks = count(parts.world.size, "rank")
    report.say(f"{start}: {calendar.total_steps - step} of {calendar.total_steps} steps, {ranks}")


def report_end(parts: Parts, trainer: Trainer, weights: str, *, previous: dict[str, Any]) -> None:
    """Say how the attempt ended, and end what belongs to it."""
    parts.loader.close()
    if parts.world.rank == 0:
        parts.report.event("summary", **{**make_summary(trainer, weights, parts.world, parts.checkpoints), **previous})
    parts.report.close()


def make_summary(trainer: Trainer, weights: str, world: World, checkpoints: Checkpoints) -> dict[str, Any]:
    """How the attempt ended."""
    progress, times = trainer.progress, trainer.times
    train_s = max(times.train_s, 1e-9)
    best = checkpoints.best() or f"step-{progress.step}"
    return {
        "step": progress.step,
        "samples_seen": progress.samples_seen,
        "steps_left_out": progress.left_out.count,
        "steps_skipped": progress.overflows,
        "world_size": world.size,
        "weights_sha256": weights,
        "metrics": dict(progress.metrics or {}),
        "times": {
            "train_s": round(times.train_s, 3),
            "eval_s": round(times.eval_s, 3),
            "save_s": round(times.save_s, 3),
        },
        "saves": dataclasses.asdict(trainer.saves),
        "snapshots": trainer.snapshots_told(),
        "input": trainer.starving(),
        "memory": trainer.memory_told(),
        "compiled": trainer.compiled_told(),
        "samples_per_s": round(trainer.samples_trained / train_s, 1),
        "checkpoint": f"checkpoints/{best}",
        "checkpoint_verified": checkpoints.is_intact(best),
    }


def last_summary(run_dir: RunDir) -> dict[str, Any]:
    """Times and rate of the attempt that did the work, for a run that was complete already."""
    summaries = [event for event in read_lines(run_dir.events / "worker.jsonl") if event["event"] == "summary"]
    return {key: summaries[-1][key] for key in ("times", "samples_per_s")} if summaries else {}
