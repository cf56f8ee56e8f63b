"""Checkpoints: complete or absent, verified before they are used, one decision for all ranks.

checkpoints/step-200/            rank-0.safetensors ...        tensors (`jobs.storage`)
                                 tensors.json                  which tensor, or which part of it, is in which file
                                 state.json                    step, samples_seen, numbers of the optimizer ...
                                 manifest.json                 size and hash of each file, written last
checkpoints/latest               the name of the newest one
checkpoints/step-300.tmp-2/      being written by attempt 2, or left by it
checkpoints/step-100.broken-2/   found broken by attempt 2, kept until newer ones have taken its place

Tensors and JSON, nothing else: there is no pickle in it, and none is ever read.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from jobs.choice import Choice, Rejected, newest_first
from jobs.circle import Circle, CircleError
from jobs.durable import FileInfo, write_hashed
from jobs.folders import Progress, named, plain_json, progress_from, read_state, step_of
from jobs.manifest import FORMAT, STATE, BrokenError, Manifest, compare, look, read_manifest, seal, share, verify
from jobs.memory import Found, InMemory, Memory, of_no_use
from jobs.room import answered, check_disk
from jobs.shelf import Shelf
from jobs.state import CheckpointError, DifferenceError, TrainingState, together
from jobs.storage import Layout, Part, plan
from jobs.store_copies import Copies
from jobs.store_remote import Away
from jobs.whole import check_fits
from jobs.world import Meeting


class SaveError(CheckpointError):
    """A checkpoint could not be written: no space, no permission, no folder. `reason`: without the place."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is to be written."""

    name: str
    layout: Layout
    parts: list[Part]
    """What this rank writes of it."""
    state: str
    """The text of state.json, on rank 0."""
    metrics: Mapping[str, float] | None
    problem: CheckpointError | None
    """Why it cannot be written, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was written."""

    name: str
    size_bytes: int
    best: bool


class Checkpoints:
    """The checkpoints of a run. `record`: what state.json says beside the state; `run_id`: no other run's are taken."""

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        attempt: int,
        keep: int,
        best: str | None,
        record: Mapping[str, Any] | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.folder = folder
        self.shelf = Shelf(folder, attempt=attempt, keep=keep, best=best)
        self.copies: Copies | None = None
        """On several disks; None: all ranks see one folder."""
        self.away: Away | None = None
        """At a URL, besides; None: nowhere."""
        self._memory = memory
        self._run_id, self._attempt, self._keep = run_id, attempt, keep
        self.record = dict(record or {})
        self._layout: Layout | None = None

    def check_writable(self, rank: int) -> None:
        """Find out now what the first save would find out later, and within a minute. Raises SaveError."""
        try:
            answered(partial(self._probe, rank), str(self.folder))
        except OSError as error:
            raise SaveError(f"no checkpoint can be written to {self.folder}", str(error)) from error

    def check_room(self, size_bytes: int) -> str:
        """Find out now whether a checkpoint of so many bytes fits. Raises SaveError; returns what is to be said.

        For one rank only.
        """
        probe = self.folder / f".probe-{self._attempt}-room"
        try:
            return check_disk(self.folder, size_bytes, keep=self._keep, probe=probe)
        except OSError as error:
            raise SaveError(f"no checkpoint can be written to {self.folder}", str(error)) from error

    def _probe(self, rank: int) -> None:
        probe = self.folder / f".probe-{self._attempt}-{rank}"
        self.folder.mkdir(parents=True, exist_ok=True)
        probe.unlink(missing_ok=True)
        write_hashed(probe, "can checkpoints be written here?\n")
        probe.unlink()

    def resume(
        self, meeting: Meeting, state: TrainingState, group: ProcessGroup | None, *, kept: bool = True
    ) -> tuple[Choice, Progress]:
        """Go on from the newest checkpoint that is complete and verified, on disk or in memory; all ranks together.

        kept: also from what a survivor of another attempt has kept, which an undisturbed training would not have.

        The ranks share the verification, which is done while the tensors are read. Removes what dead attempts left
        half-written, and puts aside what is broken. Raises CheckpointError where there are checkpoints and none can be
        used: to train from zero over them is for a person to decide; or where the checkpoint is of another training.
        """
        if self.away is not None:
            self.away.fetch(meeting)
        if self.copies is None:
            remarks = meeting.decide("look for checkpoints", self.shelf.clean)
            names = meeting.decide("list the checkpoints", lambda: named(self.folder))
        else:
            remarks, names = self.copies.look(meeting)
        rejected = [Rejected(**remark) for remark in remarks]
        in_memory = self._memory.look(meeting) if self._memory else []
        in_memory = [each for each in in_memory if kept or each.kept_by is None]
        for candidate in newest_first(names, in_memory):
            if isinstance(candidate, InMemory):
                assert self._memory is not None
                problem, found = self._memory.load(candidate, meeting, state, group)
            else:
                problem, found = self._load(candidate, meeting, state, group)
            if found is not None:
                check_precision(str(candidate), found.state, state)
                state.precision.restore(found.state["scaler"])
                broken = [other.name for other in rejected if other.name in names]
                in_use = candidate if isinstance(candidate, str) else None
                if self.copies is None:
                    meeting.decide("tidy the checkpoints", partial(self._tidy, in_use, broken))
                else:
                    self.copies.tidy(meeting, in_use, broken)
                if self.away is not None and in_use is not None:
                    self.away.offer(in_use)
                if self._memory:
                    self._memory.remove(of_no_use(in_memory, candidate, [other.name for other in rejected]))
                return Choice.of(candidate, rejected, names, found.state), progress_from(found.state, found.metrics)
            name = candidate.full_name if isinstance(candidate, InMemory) else candidate
            rejected.append(Rejected(name=name, problem=problem))
        if names:
            found_there = "\n  ".join(f"{other.name} {other.problem}" for other in rejected)
            meeting.part("use no checkpoint")
            raise CheckpointError(
                f"{self.folder}: no checkpoint can be used\n  {found_there}\nmove them away to start from zero"
            )
        return Choice(name=None, rejected=tuple(rejected)), Progress()

    def save(self, state: TrainingState, progress: Progress, group: ProcessGroup | None) -> Saved:
        """Write a checkpoint, all ranks together; when it returns it is complete on disk and the old ones are gone.

        Raises SaveError, after which all that was there before is still there.
        """
        draft = self.draft(state, progress, group, replan=True)
        return self.write(draft, draft.parts, Circle(group))

    def needs_plan(self, state: TrainingState) -> bool:
        """Whether the ranks must agree anew on who writes what: no save yet, or the state has other tensors now."""
        return self._layout is None or not self._layout.fits(state.tensors())

    def draft(self, state: TrainingState, progress: Progress, group: ProcessGroup | None, *, replan: bool) -> Draft:
        """What is to be written of the state as it is now. Its tensors are the memory of the training itself.

        replan: the same on all ranks, since they then agree on who writes what. True where it `needs_plan` on one.
        """
        tensors = state.tensors()
        if replan or self._layout is None:
            self._layout = plan(tensors, group)
        text, problem = "", None
        try:
            parts_of = {} if state.elsewhere is None else {"optimizer": together(Circle(group).gather(state.numbers))}
            if self._layout.rank == 0:
                text = self.describe(state, progress, **parts_of)
        except (CheckpointError, CircleError) as error:
            problem = CheckpointError(str(error))  # the other ranks must hear of it
        name = f"step-{progress.step}"
        parts = self._layout.parts(tensors)
        return Draft(name=name, layout=self._layout, parts=parts, state=text, metrics=progress.metrics, problem=problem)

    def write(
        self,
        draft: Draft,
        parts: Sequence[Part],
        circle: Circle,
        on_complete: Callable[[Saved], None] = lambda saved: None,
    ) -> Saved:
        """Write a checkpoint from its parts, or copies of them, all ranks together; in any thread.

        on_complete: called on rank 0 when it is on the disk, whoever of the others is lost after that.
        Raises SaveError on all ranks, after which all that was there before is still there.
        """
        unfinished = self.shelf.unfinished(draft.name)
        try:
            circle.gather(partial(self._begin, draft, unfinished))
            written = circle.gather(lambda: _to_json(draft.layout.write_part(unfinished, parts)))
            files = {name: FileInfo(**info) for of_rank in written for name, info in of_rank.items()}
            if self.copies is None:
                saved = circle.from_first(lambda: asdict(self._complete(draft, unfinished, files, on_complete)))
            else:
                make = partial(self._seal, draft, unfinished, files)
                size_bytes = self.copies.commit(draft.name, files, make, circle)
                saved = circle.from_first(lambda: asdict(self._told(draft.name, size_bytes, on_complete)))
        except CircleError as error:
            if circle.rank == 0 or (self.copies is not None and self.copies.is_lead):
                # What is full should not stay full; the next save tries too.
                shutil.rmtree(unfinished, ignore_errors=True)
            raise SaveError(f"{draft.name} could not be written to {self.folder}", str(error)) from error
        if self._memory:
            self._memory.saved(step_of(draft.name))
        return Saved(**saved)

    def describe(self, state: TrainingState, progress: Progress, **more: Any) -> str:
        """The text of state.json. Raises CheckpointError for what is neither a number nor a tensor."""
        content = {
            "format": FORMAT,
            "run_id": self._run_id,
            "attempt": self._attempt,
            "step": progress.step,
            "samples_seen": progress.samples_seen,
            "left_out": progress.left_out.to_record(),
            "world_size": dist.get_world_size(),
            "optimizer": state.numbers(),
            "scaler": state.precision.to_record(),
            "overflows": progress.overflows,
            "torch": torch.__version__,
            **self.record,
            **more,
        }
        return plain_json(content)

    def add_metrics(self, progress: Progress) -> None:
        """Note the evaluation of a checkpoint that was saved before it (by a stop); on all ranks, which know it."""
        if not (dist.get_rank() == 0 if self.copies is None else self.copies.is_holder):
            return
        path = self.folder / f"step-{progress.step}"
        seal(path, dataclasses.replace(read_manifest(path), metrics=progress.metrics))

    def best(self) -> str | None:
        """Name of the best checkpoint by the metric of the recipe; None without one."""
        return self.shelf.best()

    def point_to(self, name: str) -> None:
        """Let `latest` name a checkpoint."""
        self.shelf.point_to(name)

    def is_intact(self, name: str) -> bool:
        """Whether a checkpoint reads back as it was written; says what does not. For one rank only."""
        if problem := _broken(partial(verify, self.folder / name)):
            print(f"{name} {problem}", flush=True)
        return not problem

    def _look(self, name: str) -> str:
        """Why a checkpoint cannot be used, as far as it is seen without reading the tensors; empty where it can."""
        path = self.folder / name
        try:
            look(path)
            state = read_state(path)
        except (BrokenError, CheckpointError) as error:
            return f"is broken: {error}"
        if state["run_id"] != self._run_id:
            return f"is of another run: {state['run_id']}, not {self._run_id}"
        if state["step"] != step_of(name):
            return f"is broken: {STATE} says step {state['step']}"
        return ""

    def _load(
        self, name: str, meeting: Meeting, state: TrainingState, group: ProcessGroup | None
    ) -> tuple[str, Found | None]:
        """Restore model and optimizer in place. Returns why that is worth nothing, or what else was found."""
        path, world = self.folder / name, meeting.world
        part, parts = world.rank, world.size
        if self.copies is not None:
            if problem := self.copies.bring(name, meeting):
                return problem, None
            part, parts = self.copies.disks.share(world.rank)
        if problem := _first(meeting.gather(f"look at {name}", partial(self._look, name))):
            return problem, None
        saved, manifest = read_state(path), read_manifest(path)
        check_precision(str(path), saved, state)
        try:
            hashes = state.restore(path, saved["optimizer"], group, verify=share(manifest, part, parts))
        except DifferenceError:
            raise
        except CheckpointError:  # is it the file?
            check = partial(verify, path, part=part, parts=parts)
            if problem := _first(meeting.gather(f"verify {name}", partial(_broken, check))):
                return problem, None
            raise
        problem = _first(meeting.gather(f"compare {name}", partial(_broken, partial(compare, manifest, hashes))))
        return (problem, None) if problem else ("", Found(state=saved, metrics=manifest.metrics))

    def _begin(self, draft: Draft, unfinished: Path) -> None:
        """Before anybody writes: a place, and room for all of it."""
        if draft.problem is not None:
            raise draft.problem
        unfinished.mkdir(parents=True, exist_ok=True)
        if draft.layout.rank == 0 or (self.copies is not None and self.copies.is_holder):
            check_fits(unfinished, draft.layout.size_bytes)

    def _tidy(self, in_use: str | None, broken: list[str]) -> None:
        """Put broken ones aside, and let `latest` name the one that is used: a kill may have come before that."""
        self.shelf.put_aside(broken)
        if in_use is not None:
            self.shelf.point_to(in_use)

    def _complete(
        self, draft: Draft, unfinished: Path, files: Mapping[str, FileInfo], on_complete: Callable[[Saved], None]
    ) -> Saved:
        """On rank 0, when all have written: seal it, give it its name, remove the old ones."""
        manifest = self._seal(draft, unfinished, files)
        self.shelf.give_name(unfinished, draft.name)
        self.shelf.point_to(draft.name)
        self.shelf.prune()
        return self._told(draft.name, manifest.size_bytes, on_complete)

    def _seal(self, draft: Draft, unfinished: Path, files: Mapping[str, FileInfo]) -> Manifest:
        """On rank 0: write what belongs to a checkpoint beside its tensors."""
        small = {**draft.layout.write_list(unfinished), STATE: write_hashed(unfinished / STATE, draft.state)}
        manifest = Manifest(files={**files, **small}, metrics=draft.metrics)
        seal(unfinished, manifest)
        return manifest

    def _told(self, name: str, size_bytes: int, on_complete: Callable[[Saved], None]) -> Saved:
        """On rank 0: it is there."""
        saved = Saved(name=name, size_bytes=size_bytes, best=name == self.best())
        on_complete(saved)
        if self.away is not None:
            self.away.offer(name)
        return saved


def check_precision(name: str, saved: Mapping[str, Any], state: TrainingState) -> None:
    """Raise DifferenceError where a checkpoint has a gradient scale and this training has none, or the other way."""
    made_with = saved.get("recipe", {}).get("train", {}).get("precision", "fp32")
    if problem := state.precision.difference(saved["scaler"], made_with):
        raise DifferenceError(f"{name}: {problem}")


def _to_json(files: Mapping[str, FileInfo]) -> dict[str, Any]:
    return {name: asdict(info) for name, info in files.items()}


def _broken(check: Callable[[], None]) -> str:
    """What a check found; empty where it found nothing."""
    try:
        check()
    except BrokenError as error:
        return f"is broken: {error}"
    return ""


def _first(problems: list[str]) -> str:
    return next(filter(None, problems), "")
