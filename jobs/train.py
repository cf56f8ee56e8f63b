"""The training job: what every worker runs. `main` is the order of a run.

    under our agent    called in a process that was forked after the imports below; the job is in LAUNCH_RUN_DIR
    by hand            torchrun ... -m jobs.train RECIPE [KEY=VALUE ...]

Importing this module imports all that a training needs and starts nothing: no thread, no process group, and no torch
operation that would start threads. A process in which one of them has run cannot be forked safely.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first DDP or optimizer would import it: 1.2 s, in every worker at every restart
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from jobs import registry
from jobs.batches import divide, read_batches
from jobs.checkpoint import Checkpoints
from jobs.choice import Choice
from jobs.data.base import Source
from jobs.data.once import prepare_once
from jobs.fit import check_fit, data_changes
from jobs.folders import Progress, resolve_init
from jobs.job import Job, place, read_job, run_id
from jobs.keeper import Keeper, is_peer_lost
from jobs.kept import KeptState
from jobs.making import (
    make_calendar,
    make_checkpoints,
    make_loader,
    make_sampler,
    make_schedule,
    make_state,
    make_task,
    share_model,
    with_all_nodes,
)
from jobs.marks import Marks
from jobs.memory import Memory
from jobs.mesh import Grid
from jobs.pace import make_pace
from jobs.parallel.base import Shared
from jobs.parts import Parts
from jobs.preparing import Saves
from jobs.private_torch import Store
from jobs.profiling import make_profiler
from jobs.report import Reporter
from jobs.sockets import GroupSockets
from jobs.state import TrainingState, restore_model
from jobs.stop import Stopped, StopRequest
from jobs.store import end_uploads, find_store, use_disks
from jobs.store_disks import Disks
from jobs.telling import last_summary, report_end, say_start
from jobs.tracking import Tracking, patience_s
from jobs.trainer import Trainer
from jobs.weights import weights_sha256
from jobs.world import Meeting, World, check_identity, check_size, init_groups, pick_device
from launcher.agent.memory import COUNTS_VARIABLE
from launcher.errors import ExitCode, LaunchError
from launcher.runs.clock import Phase, StepPage
from launcher.runs.rundir import RunDir

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
    source: Source = registry.build_section("dataset", job.data)
    # What may be in memory alone is not to be lost: then a stop comes after it was loaded, and saves it.
    with nullcontext() if COUNTS_VARIABLE in os.environ else stop.at_once():
        met = meet(job, world)
        prepare_once(source, met.meeting)
    meeting, checkpoints, run_dir = met.meeting, met.checkpoints, met.run_dir
    with here.sockets.watch():
        group = init_groups(met.store, world, device, timeout_s=job.recipe.network.timeout.time_s)
    use_disks(job, checkpoints, met.disks, run_dir, group)
    marks.at(Phase.START, 0)  # not before: preparing the data may take hours, and the others say that they wait

    data = source.load()
    grid, shared = share(job, here)
    state = make_state(job, shared, device)
    choice, progress = checkpoints.resume(meeting, state, group)
    if choice.name is None:
        initialise(job, shared, meeting, group)
        before = with_all_nodes(job)
    else:
        before = read_batches(choice.state)
    batches = divide(
        job.data.global_batch_size, world_size=grid.degrees.data, wanted=job.train.accumulate, before=before
    )
    checkpoints.record.update(batches=batches.to_record(), samples=len(data.train))
    task = make_task(job, source)
    check_fit(job.model, data, task)
    sampler = make_sampler(job, data, grid, batches)
    calendar = make_calendar(job, sampler)
    loader = make_loader(job, data, sampler, samples_seen=progress.samples_seen, device=device)
    if job.data.loader_workers and progress.step < calendar.total_steps:
        meeting.gather("find room for the batches", lambda: loader.check_room(world.local_size))
        loader.start()
    report = Reporter(
        run_dir,
        rank=world.rank,
        attempt=job.attempt,
        resumed_from=progress.step,
        kept=choice.state.get("lines", ()),
    )
    saves = Saves(job=job, meeting=meeting, checkpoints=checkpoints, state=state, report=report, stages=grid.degrees.pp)
    parts = Parts(
        world=world,
        device=device,
        state=state,
        grid=grid,
        shared=shared,
        task=task,
        factor=make_schedule(job, calendar),
        sampler=sampler,
        loader=loader,
        evaluation=data.evaluation,
        checkpoints=checkpoints,
        group=group,
        report=report,
        stop=stop,
        marks=marks,
        calendar=calendar,
        pace=make_pace(
            job.model,
            shared.net,
            data.train,
            task,
            device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            ranks=world.size,
        ),
        keeper=here.keeper,
        go_back=lambda name: go_back(checkpoints, meeting.again(name), state, group),
        on_nan=job.recipe.faults.on_nan,
        max_skips=job.recipe.faults.max_skips,
        clip_norm=job.train.clip_norm,
        compiles=job.train.compile,
        asynchronous=job.recipe.checkpoint.asynchronous,
        max_failed_saves=job.recipe.checkpoint.max_failed_saves,
        profiler=make_profiler(job, run_dir, world, device, marks),
        snapshots=saves.prepare() if progress.step < calendar.total_steps else None,
        on_saved=nothing if here.keeper is None else here.keeper.saved,
    )
    marks.watch_forward(shared.net)
    trainer = make_trainer(parts, progress, choice)
    already_complete = trainer.is_complete
    stopped = trainer.meet()
    keep_state(parts, trainer, attempt=job.attempt)  # now that rank 0 has written down what came with the state
    say_start(job, parts, trainer, choice, changes=(data_changes(choice.state, data), batches.changes(before)))
    tracking = Tracking.start(job, run_dir) if world.rank == 0 and not already_complete else None
    finished = trainer.run(stop=stopped and not already_complete)
    weights = end(parts, trainer, previous=last_summary(run_dir) if already_complete else {})
    end_uploads(job, checkpoints, finished=finished)  # now that nobody waits for this rank
    end_tracking(tracking, job, finished=finished)
    if world.rank == 0:
        print(f"weights_sha256 {weights}" if finished else f"stopped at step {trainer.progress.step}", flush=True)
    return 0 if finished else int(ExitCode.STOPPED)


@dataclass(frozen=True, kw_only=True)
class Met:
    """What all ranks know once they have met."""

    meeting: Meeting
    store: Store
    """For the process groups."""
    run_dir: RunDir
    checkpoints: Checkpoints
    disks: Disks


def meet(job: Job, world: World) -> Met:
    """Wait for the other ranks, and find out whether they are of this run, and what they share."""
    meeting, store = Meeting.join(world, prefix=f"attempt-{job.attempt}")
    check_identity(meeting.gather("meet", lambda: job.identity))
    check_size(world.size, job.world_sizes)
    run_dir = job.run_dir or RunDir(Path(meeting.decide("place the run", lambda: place_by_hand(job))))
    name = meeting.decide("name the run", lambda: run_id(run_dir, os.environ))
    checkpoints = make_checkpoints(job, run_dir, name, Memory.from_env(os.environ, world, run_id=name))
    disks = find_store(job, checkpoints, meeting, run_dir, name)
    return Met(meeting=meeting, store=store, run_dir=run_dir, checkpoints=checkpoints, disks=disks)


def share(job: Job, here: Here) -> tuple[Grid, Shared]:
    """The network as the strategy shares it, connected to the other ranks."""
    grid, shared = share_model(job, here.world, here.device)
    with here.sockets.watch():
        shared.connect(local_size=here.world.local_size, timeout_s=job.recipe.network.timeout.time_s)
    return grid, shared


def end(parts: Parts, trainer: Trainer, *, previous: dict[str, Any]) -> str:
    """Say how it ended, on all ranks together. previous: of the attempt that did the work. Returns the fingerprint."""
    parts.marks.at(Phase.END, trainer.progress.step)
    weights = weights_sha256(parts.net, parts.grid)
    report_end(parts, trainer, weights, previous=previous)
    leave_together()
    return weights


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
    if parts.keeper is not None and parts.state.is_whole:
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


def go_back(
    checkpoints: Checkpoints, meeting: Meeting, state: TrainingState, group: dist.ProcessGroup
) -> tuple[Choice, Progress]:
    """Restore the newest checkpoint in the middle of a training; the same that an undisturbed one would go back to."""
    choice, progress = checkpoints.resume(meeting, state, group, kept=False)
    if choice.name is None:
        meeting.part("find no checkpoint")  # rank 0, which has the store, ends first with the error that follows
    return choice, progress


def initialise(job: Job, shared: Shared, meeting: Meeting, group: dist.ProcessGroup) -> None:
    """Weights to start from, where the recipe names some."""
    init_from = job.recipe.checkpoint.init_from
    if init_from is not None:
        path = Path(meeting.decide("find the weights to start from", lambda: str(resolve_init(init_from))))
        restore_model(shared.net, path, group, shared.elsewhere)


if __name__ == "__main__":
    sys.exit(record(main)())
