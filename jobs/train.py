"""The training job: what every worker runs. `main` is the order of a run.

    under our agent    called in a process that was forked after the imports below; the job is in LAUNCH_RUN_DIR
    by hand            torchrun ... -m jobs.train RECIPE [KEY=VALUE ...]

Importing this module imports all that a training needs and starts nothing: no thread, no process group, and no torch
operation that would start threads. A process in which one of them has run cannot be forked safely.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first DDP or optimizer would import it: 1.2 s, in every worker at every restart
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from jobs import registry
from jobs.batches import Batches, divide, read_batches
from jobs.checkpoint import Checkpoints, Choice
from jobs.data.base import Data, Source
from jobs.folders import Progress, resolve_init
from jobs.job import Job, place, read_job, run_id
from jobs.keeper import Keeper, is_peer_lost
from jobs.kept import KeptState, is_whole
from jobs.loader import Loader
from jobs.marks import Marks
from jobs.memory import Memory
from jobs.preparing import Saves
from jobs.report import Reporter
from jobs.sampler import Sampler, derive_seed
from jobs.sockets import GroupSockets
from jobs.state import TrainingState, restore_model
from jobs.stop import Stopped, StopRequest
from jobs.tracking import Tracking, patience_s
from jobs.trainer import Calendar, Parts, Trainer
from jobs.weights import weights_sha256
from jobs.world import Meeting, World, check_identity, check_size, init_groups, pick_device
from launcher.errors import ExitCode, LaunchError
from launcher.runs.clock import Phase, StepPage
from launcher.runs.events import read_lines
from launcher.runs.rundir import RunDir
from launcher.wording import count

registry.load_all()


def main(argv: Sequence[str] | None = None) -> int:
    """Train what the run directory (LAUNCH_RUN_DIR) or the recipe in argv says. Returns the exit code of this rank.

    0 = trained to the end (or it was already), 75 = stopped on request with a checkpoint, 2 = the recipe is wrong.
    Raises whatever else goes wrong.
    """
    stop = StopRequest()
    stop.install()
    try:
        job = read_job(sys.argv[1:] if argv is None else argv, os.environ)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    try:
        return train(job, stop)
    except Stopped:
        print("stopped before there was anything to save", flush=True)
        return int(ExitCode.STOPPED)


def train(job: Job, stop: StopRequest) -> int:
    """Train. Where another rank is lost and there is an agent, wait for it: it has this rank's state kept first."""
    marks = Marks(StepPage.from_env())
    world = World.from_env(os.environ)
    device = pick_device(job.device, world)
    sockets = GroupSockets(store_port=int(os.environ["MASTER_PORT"]))
    keeper = Keeper.start(os.environ, sockets, device)
    try:
        return follow_order(job, stop, Here(world=world, device=device, marks=marks, sockets=sockets, keeper=keeper))
    except Exception as error:
        if keeper is not None and (keeper.is_over or (world.size > 1 and is_peer_lost(error))):
            step = getattr(error, "launch_step", None)
            keeper.wait_for_orders(error, step=step, limit_s=job.recipe.network.timeout.time_s)
        raise


@dataclass(frozen=True, kw_only=True)
class Here:
    """This process: which rank it is, and what ties it to its agent."""

    world: World
    device: torch.device
    marks: Marks
    sockets: GroupSockets
    keeper: Keeper | None


def follow_order(job: Job, stop: StopRequest, here: Here) -> int:
    """The order of a run."""
    world, device, marks = here.world, here.device, here.marks
    source: Source = registry.build("dataset", job.data.name, job.data.options)
    with stop.at_once():
        meeting, store = Meeting.join(world, prefix=f"attempt-{job.attempt}")
        check_identity(meeting.gather("meet", lambda: job.identity))
        check_size(world.size, job.world_sizes)
        run_dir = job.run_dir or RunDir(Path(meeting.decide("place the run", lambda: place_by_hand(job))))
        name = meeting.decide("name the run", lambda: run_id(run_dir, os.environ))
        memory = Memory.from_env(os.environ, world, run_id=name)
        checkpoints = make_checkpoints(job, run_dir, name, memory)
        meeting.gather("try the folder of the checkpoints", lambda: checkpoints.check_writable(world.rank))
        meeting.gather("prepare the data", lambda: source.prepare() if world.local_rank == 0 else None)
    with here.sockets.watch():
        group = init_groups(store, world, device, timeout_s=job.recipe.network.timeout.time_s)
    marks.at(Phase.START, 0)  # not before: preparing the data may take hours, and the others say that they wait

    data = source.load()
    net = make_model(job, device)
    optimizer = registry.build("optimizer", job.train.optimizer.name, job.train.optimizer.options, net.parameters())
    state = TrainingState(net, optimizer)
    choice, progress = checkpoints.resume(meeting, state, group)
    before = None
    if choice.name is None:
        initialise(job, net, meeting, group)
    else:
        before = read_batches(choice.state)
    batches = divide(job.data.global_batch_size, world_size=world.size, wanted=job.train.accumulate, before=before)
    checkpoints.record["batches"] = batches.to_record()
    sampler = make_sampler(job, data, world, batches)
    calendar = make_calendar(job, sampler)
    report = Reporter(
        run_dir,
        rank=world.rank,
        attempt=job.attempt,
        resumed_from=progress.step,
        kept=choice.state.get("lines", ()),
    )
    saves = Saves(job=job, meeting=meeting, checkpoints=checkpoints, state=state, report=report)
    parts = Parts(
        world=world,
        device=device,
        state=state,
        wrapped=wrap(job, net, device),
        factor=make_schedule(job, calendar),
        sampler=sampler,
        loader=Loader(data.train, sampler, samples_seen=progress.samples_seen, loader_workers=job.data.loader_workers),
        evaluation=data.evaluation,
        checkpoints=checkpoints,
        group=group,
        report=report,
        stop=stop,
        marks=marks,
        bf16=job.train.precision == "bf16",
        calendar=calendar,
        keeper=here.keeper,
        go_back=lambda name: go_back(checkpoints, meeting.again(name), state, group),
        on_nan=job.recipe.faults.on_nan,
        max_skips=job.recipe.faults.max_skips,
        asynchronous=job.recipe.checkpoint.asynchronous,
        max_failed_saves=job.recipe.checkpoint.max_failed_saves,
        snapshots=saves.prepare() if progress.step < calendar.total_steps else None,
        on_saved=nothing if here.keeper is None else here.keeper.saved,
    )
    marks.watch_forward(net)
    trainer = make_trainer(parts, progress, choice)
    already_complete = trainer.is_complete
    stopped = trainer.meet()
    keep_state(parts, trainer, attempt=job.attempt)  # now that rank 0 has written down what came with the state
    say_start(job, parts, trainer, choice, batches.changes(before))
    tracking = Tracking.start(job, run_dir) if world.rank == 0 and not already_complete else None
    gc.collect()
    gc.freeze()  # what is here now stays: no collection has to look at it again
    finished = trainer.run(stop=stopped and not already_complete)

    marks.at(Phase.END, trainer.progress.step)
    weights = weights_sha256(net)
    report_end(parts, trainer, weights, previous=last_summary(run_dir) if already_complete else {})
    leave_together()
    end_tracking(tracking, job, finished=finished)  # now that nobody waits for this rank
    if world.rank == 0:
        print(f"weights_sha256 {weights}" if finished else f"stopped at step {trainer.progress.step}", flush=True)
    return 0 if finished else int(ExitCode.STOPPED)


def end_tracking(tracking: Tracking | None, job: Job, *, finished: bool) -> None:
    """Let the copies of the metrics be completed, for as long as there is time."""
    if tracking is not None:
        tracking.finish(exit_code=0, limit_s=patience_s(None if finished else job.grace_s))


def make_trainer(parts: Parts, progress: Progress, choice: Choice) -> Trainer:
    """It goes on from there. What is in memory only is not saved, nor is what an attempt has died over saving."""
    is_on_disk = choice.name is not None and choice.memory is None
    owes_save = choice.newest_on_disk < parts.calendar.last_due(parts.calendar.save_every, progress.step)
    return Trainer(parts, progress, saved=is_on_disk, owes_save=owes_save)


def keep_state(parts: Parts, trainer: Trainer, *, attempt: int) -> None:
    """From now on this rank's state can be kept, if it has all of it."""
    if parts.keeper is not None and is_whole(parts.state.tensors()):
        parts.keeper.hold(KeptState(parts, lambda: trainer.progress, attempt=attempt))


def nothing(step: int) -> None:
    """Nobody is told of a checkpoint."""


def leave_together() -> None:
    """Wait for the others and end the group.

    Everything is written down by now, so a peer or a store that has left first is no failure of the training.
    """
    try:
        dist.barrier()
        if "LAUNCH_RUN_ID" not in os.environ:
            # Under our agent the process ends next, without any teardown. gloo's own may wait for ever for a peer that
            # has closed first (seen once in some hundred ends of two ranks, in plain torch 2.13 too).
            dist.destroy_process_group()
    except RuntimeError as error:  # of torch.distributed, all of them
        print(f"left without the others, after the end of the training: {error}", flush=True)


def place_by_hand(job: Job) -> str:
    """The run directory of a job that was started by hand."""
    return place(job.recipe.name, attempt=job.attempt, root=Path("runs"))


def make_sampler(job: Job, data: Data, world: World, batches: Batches) -> Sampler:
    """The order of the samples, for this rank."""
    return Sampler(
        num_samples=len(data.train),
        global_batch_size=job.data.global_batch_size,
        seed=job.train.seed,
        accumulate=batches.accumulate,
        rank=world.rank,
        world_size=world.size,
    )


def make_calendar(job: Job, sampler: Sampler) -> Calendar:
    """All lengths of the recipe, in steps."""
    per_epoch = sampler.steps_per_epoch
    eval_every, save_every = job.train.eval_every, job.recipe.checkpoint.every
    snapshot_every = job.recipe.checkpoint.memory_every
    return Calendar(
        total_steps=job.train.until.steps(per_epoch),
        steps_per_epoch=per_epoch,
        log_every=max(1, job.train.log_every.steps(per_epoch)),
        eval_every=None if eval_every is None else max(1, eval_every.steps(per_epoch)),
        save_every=None if save_every is None else max(1, save_every.steps(per_epoch)),
        snapshot_every=None if snapshot_every is None else max(1, snapshot_every.steps(per_epoch)),
    )


def make_model(job: Job, device: torch.device) -> nn.Module:
    """The network; its first weights depend on the seed alone, so they are the same on every rank."""
    torch.manual_seed(derive_seed("model", job.train.seed))
    net: nn.Module = registry.build("model", job.model.name, job.model.options)
    return net.to(device)


def wrap(job: Job, net: nn.Module, device: torch.device) -> nn.Module:
    """The network as the strategy shares it between the ranks."""
    section = job.recipe.parallelism
    wrapped: nn.Module = registry.build("strategy", section.name, section.options, net, device)
    return wrapped


def make_schedule(job: Job, calendar: Calendar) -> Any:
    """Step -> factor of the learning rate."""
    section = job.train.schedule
    function = registry.find("schedule", section.name)
    warmup_steps = section.warmup.steps(calendar.steps_per_epoch)
    return lambda step: function(step, calendar.total_steps, warmup_steps, **section.options)


def make_checkpoints(job: Job, run_dir: RunDir, run_id: str, memory: Memory) -> Checkpoints:
    """The checkpoints of the run; each notes what it was trained from."""
    recipe = job.recipe.model_dump(mode="json", by_alias=True, include={"name", "model", "data", "train"})
    section = job.recipe.checkpoint
    return Checkpoints(
        run_dir.checkpoints,
        run_id=run_id,
        attempt=job.attempt,
        keep=section.keep,
        best=section.best,
        record={"recipe": recipe},
        memory=memory,
    )


def go_back(
    checkpoints: Checkpoints, meeting: Meeting, state: TrainingState, group: dist.ProcessGroup
) -> tuple[Choice, Progress]:
    """Restore the newest checkpoint in the middle of a training; the same that an undisturbed one would go back to."""
    choice, progress = checkpoints.resume(meeting, state, group, kept=False)
    if choice.name is None:
        meeting.part("find no checkpoint")  # rank 0, which has the store, ends first with the error that follows
    return choice, progress


def initialise(job: Job, net: nn.Module, meeting: Meeting, group: dist.ProcessGroup) -> None:
    """Weights to start from, where the recipe names some."""
    init_from = job.recipe.checkpoint.init_from
    if init_from is not None:
        path = Path(meeting.decide("find the weights to start from", lambda: str(resolve_init(init_from))))
        restore_model(net, path, group)


def say_start(job: Job, parts: Parts, trainer: Trainer, choice: Choice, changes: str) -> None:
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
    if changes:
        report.say(changes)
    if trainer.finished and choice.memory is None:
        report.say(f"already complete: {step}/{calendar.total_steps} steps in {choice.name}")
        return
    start = "resuming" if choice.name else f"starting with the weights of {init_from}" if init_from else "starting"
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
        "samples_per_s": round(trainer.samples_trained / train_s, 1),
        "checkpoint": f"checkpoints/{best}",
        "checkpoint_verified": checkpoints.is_intact(best),
    }


def last_summary(run_dir: RunDir) -> dict[str, Any]:
    """Times and rate of the attempt that did the work, for a run that was complete already."""
    summaries = [event for event in read_lines(run_dir.events / "worker.jsonl") if event["event"] == "summary"]
    return {key: summaries[-1][key] for key in ("times", "samples_per_s")} if summaries else {}


if __name__ == "__main__":
    sys.exit(record(main)())
